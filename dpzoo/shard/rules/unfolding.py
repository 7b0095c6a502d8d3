"""Windows as values: Tensor.unfold along the cut dim, F.unfold (im2col), and what is made of shifted copies: gradient.

`F.fold` is the transpose of `F.unfold` on blocks that are numbered over the whole picture; with cut blocks it gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import native
from dpzoo.shard.moved_view import copied_view
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.convolution import per_dim
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import normal_dim, normal_dims, whole_values
from dpzoo.shard.rules.window import forward_windows, run_windows
from dpzoo.shard.tensor import ShardTensor


@handler(torch.Tensor.unfold, name="Tensor.unfold")
def tensor_unfold(func: Any, input: Tensor, dimension: int, size: int, step: int) -> Any:
    """Every window along a dim; a copy where torch returns a view, if the dim is cut."""
    if not isinstance(input, ShardTensor) or not input.ndim:
        return gather_call(func, (), (input, dimension, size, step), {})
    shape = output_shape(torch.Tensor.unfold, input, dimension, size, step)
    d = normal_dim(dimension, input.ndim)
    spec = whole_values(input._spec)
    axis = spec.axis_of(d)
    if axis is None:
        return native(torch.Tensor.unfold, (ShardTensor,), (input, d, size, step), {})
    if not size:
        return gather_call(func, (), (input, dimension, size, step), {})
    plans = {d: forward_windows(spec.sizes[axis], shape[d], size, step)}
    return copied_view(run_windows(input, spec, plans, lambda t: t.unfold(d, size, step)), input)


@handler(F.unfold, torch._C._nn.im2col, name="unfold")
def unfold(func: Any, input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    """im2col: (N, C, H, W) as (N, C * kernel, blocks), blocks numbered row by row over the whole picture.

    Rows of blocks stay together where rows are cut; cut columns would interleave in the numbering, and are gathered.
    """
    args = (input, kernel_size, dilation, padding, stride)
    if not isinstance(input, ShardTensor):
        return gather_call(F.unfold, (), args, {})
    shape = output_shape(F.unfold, *args)
    batched = input.ndim == 4
    first = input.ndim - 2
    spec = whole_values(input._spec)
    if spec.axis_of(first + 1) is not None or spec.axis_of(first - 1) is not None or not all(spec.shape[:first]):
        return gather_call(F.unfold, (), args, {})
    kernel, gaps, pads, strides = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    columns = (spec.shape[first + 1] + 2 * pads[1] - gaps[1] * (kernel[1] - 1) - 1) // strides[1] + 1
    rows = shape[-1] // columns
    axis = spec.axis_of(first)
    plans = {}
    if axis is not None:
        plans[first] = forward_windows(spec.sizes[axis], rows, kernel[0], strides[0], pads[0], gaps[0])
    inner = (0 if plans else pads[0], pads[1])

    def local(t: Tensor) -> Tensor:
        cols = F.unfold(t, kernel, gaps, inner, strides)
        return cols.unflatten(-1, (-1, columns))  # the rows of blocks are dim `first`, as the rows of the input

    blocks = run_windows(input, spec, plans, local, (0,) if batched else ())
    return blocks.flatten(-2)


# ---------------------------------------------------------------------- differences
@handler(*spellings("gradient"), name="gradient")
def gradient(
    func: Any, input: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1
) -> tuple[Tensor, ...]:
    """Second-order central differences, one-sided at the ends (`torch.gradient`)."""
    spacing = 1 if spacing is None else spacing
    options = {"spacing": spacing, "dim": dim, "edge_order": edge_order}
    steps = list(spacing) if isinstance(spacing, (list, tuple)) else [spacing]
    if not isinstance(input, ShardTensor) or any(isinstance(h, ShardTensor) for h in steps):
        return gather_call(func, (), (input,), {k: v for k, v in options.items() if v is not None})
    _check_gradient(input, {k: v for k, v in options.items() if v is not None})
    dims = normal_dims(dim, input.ndim)
    if len(steps) == 1:
        steps = steps * len(dims)
    if any(isinstance(h, Tensor) and h.shape != (input.shape[d],) for d, h in zip(dims, steps, strict=True)):
        return gather_call(func, (), (input,), {k: v for k, v in options.items() if v is not None})
    return tuple(_slope(input, d, h, edge_order) for d, h in zip(dims, steps, strict=True))


def _check_gradient(x: Tensor, options: dict[str, Any]) -> None:
    """torch's own checks, on tensors without data."""
    meta = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), (x, options))
    torch.gradient(meta[0], **meta[1])


def _slope(x: Any, dim: int, h: Any, edge_order: int) -> Tensor:
    """The derivative along one dim; `h` is a step or the coordinates of the points."""
    n = x.shape[dim]

    def at(lo: int, count: int) -> Tensor:
        return x.narrow(dim, lo, count)

    a, b, c = at(0, n - 2), at(1, n - 2), at(2, n - 2)
    if isinstance(h, Tensor):
        width = torch.diff(h).reshape(-1, *[1] * (x.ndim - 1 - dim))
        left, right = width.narrow(0, 0, n - 2), width.narrow(0, 1, n - 2)
        inner = (
            -right / (left * (left + right)) * a
            + (right - left) / (left * right) * b
            + left / (right * (left + right)) * c
        )
        first, second = width[:1], width[1:2]
        last, before = width[-1:], width[-2:-1]
    else:
        inner = (c - a) / (2 * h)
        first = second = last = before = h
    return torch.cat(
        [
            _end(at, first, second, (0, 1, 2), edge_order),
            inner,
            _end(at, last, before, (n - 1, n - 2, n - 3), edge_order),
        ],
        dim,
    )


def _end(at: Any, near: Any, far: Any, points: Sequence[int], edge_order: int) -> Tensor:
    """One-sided difference at points[0], of first or second order; backwards in space when points fall."""
    sign = 1 if points[1] > points[0] else -1
    x0, x1 = at(points[0], 1), at(points[1], 1)
    if edge_order == 1:
        return (x1 - x0) * sign / near
    x2 = at(points[2], 1)
    slope = (
        -(2 * near + far) / (near * (near + far)) * x0
        + (near + far) / (near * far) * x1
        - near / (far * (near + far)) * x2
    )
    return slope * sign
