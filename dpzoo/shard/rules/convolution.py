"""Convolution and transposed convolution on cut spatial, batch or channel dims, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import plain_to_shard, relayout, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.partition import even_sizes
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.halo_conv import ConvCall, halo_conv, halo_of
from dpzoo.shard.rules.meta import as_torch, output_shape
from dpzoo.shard.rules.parts import cut_axes, whole_values
from dpzoo.shard.rules.window import (
    Windows,
    forward_windows,
    run_windows,
    stays,
    transposed_windows,
    windows_of_cut_dims,
)
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing


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


def _same_padding(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Rows before and after for padding="same" (the odd one goes to the end, as in torch)."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((t // 2, t - t // 2) for t in totals)


@dataclass(frozen=True)
class _Call:
    """What a convolution is asked to do: a number per spatial dim, and rows of zeros before and after each of them."""

    func: Any
    transposed: bool
    stride: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    output_padding: tuple[int, ...] = ()

    @property
    def before(self) -> tuple[int, ...]:
        return tuple(p for p, _ in self.pads)

    def run(self, t: Tensor, w: Tensor, b: Tensor | None, padding: tuple[int, ...]) -> Tensor:
        """torch's own, with other padding."""
        if self.transposed:
            return self.func(t, w, b, self.stride, padding, self.output_padding, self.groups, self.dilation)
        return self.func(t, w, b, self.stride, padding, self.dilation, self.groups)


def _on_shards(x: ShardTensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int], call: _Call) -> Any:
    """The frame of both convolutions: halos along cut spatial dims, weights' gradients summed over the mesh."""
    first, kernel = x.ndim - len(call.stride), tuple(weight.shape[2:])
    x = without_channel_cut(x, first)
    spec = whole_values(x._spec)
    windows = transposed_windows if call.transposed else forward_windows
    plans = windows_of_cut_dims(windows, spec, shape, first, kernel, call.stride, call.before, call.dilation)
    axes = cut_axes(spec, range(x.ndim))
    w, b = whole_weight(weight, spec, axes), whole_weight(bias, spec, axes)
    inner, extra = _local_padding(call.pads, plans, first)
    seam = _seam_dim(call, x, weight, bias, spec, plans, first)

    def op(t: Tensor) -> Tensor:
        t = F.pad(t, extra) if any(extra) else t
        return call.run(t, w, b, inner) if seam is None else seam(t, w, b, inner)

    dim = None if seam is None else next(iter(plans))
    return run_windows(x, spec, plans, op, range(first - 1), dim)


def _local_padding(
    pads: Sequence[tuple[int, int]], plans: dict[int, Windows], first: int
) -> tuple[tuple[int, ...], list[int]]:
    """Padding of the uncut dims: what the op does itself, and one-sided rows to add before (last dim first)."""
    inner, extra = [], []
    for i, (before, after) in enumerate(pads):
        cut = first + i in plans
        inner.append(0 if cut else min(before, after))
        extra.append((0, 0) if cut else (before - inner[-1], after - inner[-1]))
    return tuple(inner), [n for pair in reversed(extra) for n in pair]


def _seam_dim(
    call: _Call,
    x: ShardTensor,
    w: Tensor,
    b: Tensor | None,
    spec: ShardTensorSpec,
    plans: dict[int, Windows],
    first: int,
) -> Callable[..., Tensor] | None:
    """How the first cut spatial dim is convolved without a copy of the shard; None where a copy is made.

    The same on every rank of the dim's mesh axis.
    """
    floating = all(t is None or t.dtype.is_floating_point for t in (x, w, b))
    if call.transposed or first != 2 or not plans or not floating or is_tracing():
        return None
    dim = next(iter(plans))
    axis = spec.cut_dims[dim]
    if stays(plans[dim], spec.sizes[axis]):
        return None  # nothing to borrow
    reach = call.dilation[dim - 2] * (w.shape[dim] - 1) + 1
    me, group = spec.layout.coords[axis], spec.layout.groups[axis]
    halo = halo_of(dim, spec.sizes[axis], plans[dim], me, group, reach, call.stride[dim - 2])

    def seam(t: Tensor, w: Tensor, b: Tensor | None, padding: tuple[int, ...]) -> Tensor:
        t, w, b = _autocast(t, w, b)
        return halo_conv(t, w, b, ConvCall(call.stride, padding, call.dilation, call.groups), halo)

    return seam


def _autocast(t: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast, where it is on, makes of the operands of a convolution."""
    kind = t.device.type
    if not torch.is_autocast_enabled(kind) or torch.float64 in (t.dtype, w.dtype):
        return t, w, b
    dtype = torch.get_autocast_dtype(kind)
    return t.to(dtype), w.to(dtype), None if b is None else b.to(dtype)


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
    """Convolution."""
    if not isinstance(input, ShardTensor):
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return gather_call(func, (), (input, weight, bias), options)
    shape = _checked_shape(func, input, weight, bias, stride, padding, dilation, groups)
    n = weight.ndim - 2
    dilations = per_dim(dilation, n)
    if padding == "same":
        pads = _same_padding(weight.shape[2:], dilations)
    else:
        pads = tuple((p, p) for p in per_dim(0 if padding == "valid" else padding, n))
    return _on_shards(input, weight, bias, shape, _Call(func, False, per_dim(stride, n), pads, dilations, groups))


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
    call_options = (stride, padding, output_padding, groups, dilation)
    shape = _checked_shape(func, input, weight, bias, *call_options)
    strides, dilations, pads, extra = (per_dim(v, weight.ndim - 2) for v in (stride, dilation, padding, output_padding))
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        as_torch(func, input, weight, bias, *call_options)  # refused by torch's kernels, not by its shape function
    call = _Call(func, True, strides, tuple((p, p) for p in pads), dilations, groups, extra)
    return _on_shards(input, weight, bias, shape, call)
