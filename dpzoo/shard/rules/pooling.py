"""Pooling on cut dims: the windows of `window.py`, with what a window means outside of the domain.

max: rows outside are copies of rows that the window sees anyway; indices are global. avg: the divisor of each window is
the one it has in the global tensor. lp: made of averages, as in torch. Adaptive pooling is in `adaptive.py`.
max_unpool gathers: an index may point anywhere, and one out of range must be found on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.convolution import per_dim
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import whole_values
from dpzoo.shard.rules.window import Windows, forward_windows, run_windows, windows_of_cut_dims, with_edge_copies
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


def _is_unset(stride: Any) -> bool:
    return stride is None or stride == () or stride == []


# ---------------------------------------------------------------------- average
@handler(*spellings("avg_pool1d", "avg_pool2d", "avg_pool3d"), name="avg_pool")
def avg_pool(
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Mean of each window; the divisor is that of the global window."""
    n = int(func.__name__[-2])
    options = (ceil_mode, count_include_pad, *([divisor_override] if n > 1 else []))
    if not isinstance(input, ShardTensor):
        return gather_call(func, (), (input, kernel_size, stride, padding, *options), {})
    shape = output_shape(func, input, kernel_size, stride, padding, *options)
    first = input.ndim - n
    kernel, pads = per_dim(kernel_size, n), per_dim(padding, n)
    strides = kernel if _is_unset(stride) else per_dim(stride, n)
    spec = whole_values(input._spec)
    plans = windows_of_cut_dims(forward_windows, spec, shape, first, kernel, strides, pads)
    batch = range(max(first, 0))
    if not plans:
        return run_windows(input, spec, plans, lambda t: func(t, kernel_size, stride, padding, *options), batch)
    inner = tuple(0 if first + i in plans else p for i, p in enumerate(pads))

    def means(x: Any, divisor: int) -> Any:
        sums = functools.partial(_window_sums, kernel=kernel, stride=strides, pad=inner, ceil_mode=ceil_mode)
        return run_windows(x, spec, plans, lambda t: sums(t, divisor=divisor), batch)

    counts = [
        _counts(input.shape[first + i], shape[first + i], kernel[i], strides[i], pads[i], count_include_pad)
        for i in range(n)
    ]
    return _divided(input, means, divisor_override, kernel, counts)


def _divided(
    x: Tensor,
    means: Callable[[Tensor, int], Any],
    given: int | None,
    kernel: Sequence[int],
    counts: Sequence[int | list[int]],
) -> Tensor:
    """Window sums by the divisor of each; `means` gives them by one divisor for all."""
    size = math.prod(kernel)
    if given is None and all(c == k for c, k in zip(counts, kernel, strict=True)):
        given = size
    if not x.dtype.is_floating_point:
        return torch.div(means(x, 1), given or _product(counts, x), rounding_mode="trunc")
    if given is not None:
        return means(x, given)
    # The divisor of most windows goes into the kernel, so that sums of half floats do not overflow.
    wide = x.float() if x.dtype.itemsize == 2 else x
    return (means(wide, size) * (size / _product(counts, wide))).to(x.dtype)


def _window_sums(
    t: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pad: tuple[int, ...],
    ceil_mode: bool,
    divisor: int,
) -> Tensor:
    """Sums over windows by one divisor; avg_pool1d has none of its own and borrows that of 2-D."""
    if len(kernel) == 1:
        out = F.avg_pool2d(
            t.unsqueeze(-2), (1, kernel[0]), (1, stride[0]), (0, pad[0]), ceil_mode, divisor_override=divisor
        )
        return out.squeeze(-2)
    op = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return op(t, kernel, stride, pad, ceil_mode, True, divisor)


def _counts(n: int, n_out: int, kernel: int, stride: int, pad: int, with_padding: bool) -> int | list[int]:
    """Elements of each window along one dim, with or without padding rows (rows that only ceil_mode adds never count).

    One number when all windows are full.
    """
    counts = []
    for j in range(n_out):
        start = j * stride - pad
        end = min(start + kernel, n + pad)
        counts.append(end - start if with_padding else min(end, n) - max(start, 0))
    return kernel if all(c == kernel for c in counts) else counts


def _product(counts: Sequence[int | list[int]], like: Tensor) -> Tensor:
    """The divisor of every window, to broadcast over the last dims."""
    total = torch.ones((), dtype=like.dtype, device=like.device)
    for i, c in enumerate(counts):
        total = total * torch.tensor(c).to(total).reshape(-1, *[1] * (len(counts) - 1 - i))
    return total


# ---------------------------------------------------------------------- maximum
def _max_pool(dims: int, with_indices: bool) -> Callable[..., Any]:
    plain: Any = getattr(torch, f"max_pool{dims}d")
    indexed: Any = getattr(F, f"max_pool{dims}d_with_indices")

    def answer(
        func: Any,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        stride = kernel_size if _is_unset(stride) else stride
        op = indexed if with_indices or return_indices else plain
        if not isinstance(input, ShardTensor):
            return gather_call(op, (), (input, kernel_size, stride, padding, dilation, ceil_mode), {})
        shape = output_shape(plain, input, kernel_size, stride, padding, dilation, ceil_mode)
        first = input.ndim - dims
        kernel, strides, pads, gaps = (per_dim(v, dims) for v in (kernel_size, stride, padding, dilation))
        spec = whole_values(input._spec)
        bare = windows_of_cut_dims(forward_windows, spec, shape, first, kernel, strides, pads, gaps)
        plans = {d: with_edge_copies(plan, input.shape[d], gaps[d - first]) for d, plan in bare.items()}
        inner = tuple(0 if first + i in plans else p for i, p in enumerate(pads))

        def local(t: Tensor) -> Any:
            out = op(t, kernel, strides, inner, gaps, ceil_mode)
            if op is plain or not plans:
                return out
            return out[0], _global_indices(out[1], t.shape, spec, bare, first, gaps)

        return run_windows(input, spec, plans, local, range(max(first, 0)))

    return answer


def _global_indices(
    index: Tensor,
    shape: Sequence[int],
    spec: ShardTensorSpec,
    plans: dict[int, Windows],
    first: int,
    dilation: Sequence[int],
) -> Tensor:
    """Flat indices into the spatial plane of a rank's window rows, as indices into the global plane."""
    flat, step = torch.zeros_like(index), 1
    for d in reversed(range(first, spec.ndim)):
        n = spec.shape[d]
        at = index % shape[d]
        index = index // shape[d]
        if d in plans:
            me, gap = spec.layout.coords[spec.cut_dims[d]], dilation[d - first]
            rows, (before, _) = plans[d].wanted[me], plans[d].pads[me]
            at = at + ((rows[0][0] if rows else 0) - before)
            at = torch.where(at < 0, at % gap, at)  # copies of edge rows count as those rows: see `source_row`
            at = torch.where(at >= n, at - (at - n + gap) // gap * gap, at).clamp(0, max(0, n - 1))
        flat, step = flat + at * step, step * n
    return flat


for _n in (1, 2, 3):
    _indexed = f"max_pool{_n}d_with_indices"
    handler(getattr(F, f"max_pool{_n}d"), *spellings(f"max_pool{_n}d"), name=f"max_pool{_n}d")(_max_pool(_n, False))
    handler(getattr(F, _indexed), *spellings(_indexed), name=_indexed)(_max_pool(_n, True))


# ---------------------------------------------------------------------- power mean
@handler(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, name="lp_pool")
def lp_pool(
    func: Any, input: Tensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
) -> Any:
    """Power mean of each window, from its average, as torch computes it."""
    n = int(func.__name__[-2])
    average = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[n]
    size = math.prod(per_dim(kernel_size, n))
    out = average(input.pow(norm_type), kernel_size, stride, 0, ceil_mode)
    return (torch.sign(out) * F.relu(torch.abs(out))).mul(size).pow(1.0 / norm_type)


# ---------------------------------------------------------------------- back to where the maxima were
@handler(F.max_unpool1d, F.max_unpool2d, F.max_unpool3d, name="max_unpool")
def max_unpool(
    func: Any,
    input: Tensor,
    indices: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
) -> Any:
    """Values at the indices that a max_pool returned, zeros elsewhere; on gathered tensors."""
    sizes = (kernel_size, stride, padding, None if output_size is None else tuple(output_size))
    output_shape(func, input, indices, *sizes)
    return gather_call(func, (), (input, indices, *sizes), {})
