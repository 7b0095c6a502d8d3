"""pixel_shuffle, pixel_unshuffle, channel_shuffle: channels whole, rows and columns on the rank that has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import relayout
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.partition import align_sizes
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.convolution import without_channel_cut
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import fill_empty, on_shards, whole_values
from dpzoo.shard.tensor import ShardTensor


def _on_pixels(x: ShardTensor, op: Any, first: int, grow: int = 1, shrink: int = 1) -> ShardTensor:
    """Run `op` on the shards, whose spatial sizes it multiplies by `grow` or divides by `shrink`."""
    x = without_channel_cut(x, first)
    spec = whole_values(x._spec)
    sizes = list(spec.sizes)
    for d, axis in spec.cut_dims.items():
        if d >= first:
            sizes[axis] = align_sizes(sizes[axis], shrink)
    x = relayout(x, spec.like(sizes=sizes))
    out = [
        tuple(n * grow // shrink for n in s) if c in range(first, x.ndim) else s
        for c, s in zip(spec.cuts, sizes, strict=True)
    ]

    def local(t: Tensor) -> Tensor:
        missing = [d for d in range(t.ndim) if t.shape[d] == 0]
        y = fill_empty(t, missing, 0)
        y = op(y.repeat([shrink if d in missing and d >= first else 1 for d in range(t.ndim)]) if missing else y)
        for d in missing:
            y = y.narrow(d, 0, 0)
        return y

    return on_shards(x, local, spec.cuts, out)


@handler(*spellings("pixel_shuffle"), name="pixel_shuffle")
def pixel_shuffle(func: Any, input: Tensor, upscale_factor: int) -> Any:
    """(.., C r^2, H, W) as (.., C, H r, W r)."""
    if not isinstance(input, ShardTensor):
        return gather_call(func, (), (input, upscale_factor), {})
    output_shape(torch.pixel_shuffle, input, upscale_factor)
    first = input.ndim - 2
    return _on_pixels(input, lambda t: torch.pixel_shuffle(t, upscale_factor), first, grow=upscale_factor)


@handler(*spellings("pixel_unshuffle"), name="pixel_unshuffle")
def pixel_unshuffle(func: Any, input: Tensor, downscale_factor: int) -> Any:
    """(.., C, H r, W r) as (.., C r^2, H, W); borders between shards move to multiples of r first."""
    if not isinstance(input, ShardTensor):
        return gather_call(func, (), (input, downscale_factor), {})
    output_shape(torch.pixel_unshuffle, input, downscale_factor)
    first = input.ndim - 2
    return _on_pixels(input, lambda t: torch.pixel_unshuffle(t, downscale_factor), first, shrink=downscale_factor)


@handler(*spellings("channel_shuffle", "native_channel_shuffle"), name="channel_shuffle")
def channel_shuffle(func: Any, input: Tensor, groups: int) -> Any:
    """Interleave the channels of groups; channels are dim 1."""
    if not isinstance(input, ShardTensor):
        return gather_call(func, (), (input, groups), {})
    output_shape(torch.channel_shuffle, input, groups)
    return _on_pixels(input, lambda t: torch.channel_shuffle(t, groups), 2)
