"""Convolution and transposed convolution on cut spatial, batch or channel dims, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import plain_to_shard, relayout, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.partition import even_sizes
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.meta import as_torch, output_shape
from dpzoo.shard.rules.parts import cut_axes, whole_values
from dpzoo.shard.rules.window import Windows, forward_windows, run_windows, transposed_windows, windows_of_cut_dims
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


def per_dim(value: Any, n: int) -> tuple[int, ...]:
    """An argument that may be one number for all spatial dims."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


def _checked_shape(func: Any, input: Tensor, weight: Tensor, *args: Any) -> torch.Size:
    """Global output shape, or the error that plain torch raises."""
    if input.dtype is not weight.dtype and not torch._C._is_any_autocast_enabled():
        return as_torch(func, input, weight, *args)
    return output_shape(func, input, weight, *args)


def without_channel_cut(x: ShardTensor, first: int) -> ShardTensor:
    """Move a cut of the channel dim to the longest free spatial dim (or gather that axis)."""
    spec = whole_values(x._spec)
    channel = first - 1
    axis = spec.axis_of(channel)
    if axis is None:
        return x
    free = [(spec.shape[d], d) for d in range(first, x.ndim) if d not in spec.cuts]
    cuts, sizes = list(spec.cuts), list(spec.sizes)
    n, target = max(free, default=(0, REPLICATED))
    cuts[axis], sizes[axis] = target, even_sizes(n, spec.layout.shape[axis]) if free else ()
    return relayout(x, spec.like(cuts=cuts, sizes=sizes))


def whole_weight(w: Tensor | None, spec: ShardTensorSpec, axes: tuple[int, ...]) -> Any:
    """A weight on a rank that uses it for its part of the work: its gradient is summed over `axes`."""
    if w is None:
        return None
    if isinstance(w, ShardTensor):
        return to_shard(w, w._spec.replicated(), axes)
    n = len(spec.cuts)
    return plain_to_shard(w, ShardTensorSpec.make(spec.layout, (REPLICATED,) * n, ((),) * n, w.shape, w.dtype), axes)


def _same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """Rows before and after for padding="same" (the odd one goes to the end, as in torch)."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return [(t // 2, t - t // 2) for t in totals]


@handler(F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d, name="conv")
def conv(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolution: halos along cut spatial dims, weights' gradients summed over the mesh."""
    if not isinstance(input, ShardTensor):
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return gather_call(func, (), (input, weight, bias), options)
    n = weight.ndim - 2
    shape = _checked_shape(func, input, weight, bias, stride, padding, dilation, groups)
    first = input.ndim - n
    strides, dilations, kernel = per_dim(stride, n), per_dim(dilation, n), tuple(weight.shape[2:])
    pads = _same_padding(kernel, dilations) if padding == "same" else [(p, p) for p in _symmetric(padding, n)]
    x = without_channel_cut(input, first)
    spec = whole_values(x._spec)
    before = [p for p, _ in pads]
    plans = windows_of_cut_dims(forward_windows, spec, shape, first, kernel, strides, before, dilations)
    axes = cut_axes(spec, range(x.ndim))
    w, b = whole_weight(weight, spec, axes), whole_weight(bias, spec, axes)
    inner, extra = _local_padding(pads, plans, first)

    def op(t: Tensor) -> Tensor:
        t = F.pad(t, extra) if any(extra) else t
        return func(t, w, b, strides, inner, dilations, groups)

    return run_windows(x, spec, plans, op, range(first - 1))


def _symmetric(padding: Any, n: int) -> tuple[int, ...]:
    return (0,) * n if padding == "valid" else per_dim(padding, n)


def _local_padding(
    pads: list[tuple[int, int]], plans: dict[int, Windows], first: int
) -> tuple[tuple[int, ...], list[int]]:
    """Padding of the uncut dims: what the op does itself, and one-sided rows to add before (last dim first)."""
    inner, extra = [], []
    for i, (before, after) in enumerate(pads):
        cut = first + i in plans
        inner.append(0 if cut else min(before, after))
        extra.append((0, 0) if cut else (before - inner[-1], after - inner[-1]))
    return tuple(inner), [n for pair in reversed(extra) for n in pair]


@handler(
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    name="conv_transpose",
)
def conv_transpose(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Transposed convolution: each rank computes the outputs near its inputs, neighbours lend the rows at the seam."""
    if not isinstance(input, ShardTensor):
        options = {"stride": stride, "padding": padding, "output_padding": output_padding}
        return gather_call(func, (), (input, weight, bias), {**options, "groups": groups, "dilation": dilation})
    n = weight.ndim - 2
    shape = _checked_shape(func, input, weight, bias, stride, padding, output_padding, groups, dilation)
    first = input.ndim - n
    strides, dilations, pads, extra = (per_dim(v, n) for v in (stride, dilation, padding, output_padding))
    x = without_channel_cut(input, first)
    spec = whole_values(x._spec)
    kernel = tuple(weight.shape[2:])
    plans = windows_of_cut_dims(transposed_windows, spec, shape, first, kernel, strides, pads, dilations)
    axes = cut_axes(spec, range(x.ndim))
    w, b = whole_weight(weight, spec, axes), whole_weight(bias, spec, axes)
    inner = tuple(0 if first + i in plans else p for i, p in enumerate(pads))
    return run_windows(
        x, spec, plans, lambda t: func(t, w, b, strides, inner, extra, groups, dilations), range(first - 1)
    )
