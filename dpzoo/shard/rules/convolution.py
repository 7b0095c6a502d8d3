"""Convolutions that need no halo: patch embeddings (kernel == stride), pointwise kernels, cut batch or channel dims.

Borders move to multiples of the stride, so that each window lies on one rank. Other kernels are gathered for now.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import plain_to_shard, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.partition import align_sizes
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.parts import cut_axes, global_of, whole_values
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


def per_dim(value: Any, n: int) -> tuple[int, ...]:
    """An argument that may be one number for all spatial dims."""
    if isinstance(value, int):
        return (value,) * n
    return tuple(value) * n if len(value) == 1 else tuple(value)


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
    """Convolution without overlapping windows along the cut dims."""
    n = weight.ndim - 2
    call = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if not isinstance(input, ShardTensor) or input.ndim < n + 1:
        return gather_call(func, (), (input, weight, bias), call)
    spec = whole_values(input._spec)
    first = input.ndim - n
    strides, dilations = per_dim(stride, n), per_dim(dilation, n)
    pads = (0,) * n if padding == "valid" else per_dim(padding, n) if not isinstance(padding, str) else None
    batch = {0} if input.ndim == n + 2 else set()
    local_dims = {
        first + i
        for i in range(n)
        if pads and not pads[i] and weight.shape[2 + i] == strides[i] and (dilations[i] == 1 or strides[i] == 1)
    }
    if any(d not in local_dims | batch for d in spec.cut_dims) or any(
        isinstance(t, ShardTensor) and not t._spec.is_replicated for t in (weight, bias)
    ):
        return gather_call(func, (), (input, weight, bias), call)
    if any(spec.shape[first + i] + 2 * p < weight.shape[2 + i] for i, p in enumerate(pads or ())):
        return gather_call(func, (), (input, weight, bias), call)  # torch says what is wrong
    return _windows(func, input, spec, weight, bias, call, {d: strides[d - first] for d in local_dims})


def _windows(
    func: Any,
    x: ShardTensor,
    spec: ShardTensorSpec,
    weight: Tensor,
    bias: Tensor | None,
    call: dict[str, Any],
    step: dict[int, int],
) -> Any:
    """Each rank convolves its own windows; a rank without any runs one window of zeros and keeps none of it."""
    sizes = [
        align_sizes_to(s, step[c]) if isinstance(c, int) and c in step else s
        for c, s in zip(spec.cuts, spec.sizes, strict=True)
    ]
    source = spec.like(sizes=sizes)
    axes = cut_axes(spec, range(x.ndim))
    local = to_shard(x, source)
    short = {d: step[d] - local.shape[d] for d in spec.cut_dims if d in step and local.shape[d] < step[d]}
    for d, missing in short.items():
        local = F.pad(local, [0, 0] * (x.ndim - 1 - d) + [0, missing])
    if x.ndim == weight.ndim and local.shape[0] == 0 and 0 in spec.cut_dims:
        local = torch.cat([local, local.new_zeros((1, *local.shape[1:]))])
        short[0] = 1
    out = func(local, whole_weight(weight, spec, axes), whole_weight(bias, spec, axes), **call)
    for d in short:
        out = out.narrow(d, 0, 0)
    out_sizes = [
        tuple(n // step[c] for n in s) if isinstance(c, int) and c in step else s
        for c, s in zip(spec.cuts, sizes, strict=True)
    ]
    return global_of(out, spec, spec.cuts, out_sizes)


def align_sizes_to(sizes: tuple[int, ...], step: int) -> tuple[int, ...]:
    """Borders at multiples of `step`; rows left over at the end stay with the last shard that has any."""
    return sizes if step == 1 else align_sizes(sizes, step)


def whole_weight(w: Tensor | None, spec: ShardTensorSpec, axes: tuple[int, ...]) -> Any:
    """A weight on a rank that uses it for its part of the work: its gradient is summed over `axes`."""
    if w is None:
        return None
    if isinstance(w, ShardTensor):
        return to_shard(w, w._spec.replicated(), axes)
    n = len(spec.cuts)
    return plain_to_shard(w, ShardTensorSpec.make(spec.layout, (REPLICATED,) * n, ((),) * n, w.shape, w.dtype), axes)
