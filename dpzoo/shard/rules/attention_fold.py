"""Shards of any number of lead dims as (batch, heads, tokens, channels), and back.

With grouped queries the last two lead dims are (key heads, query heads of each); keys and values have size 1 there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dpzoo.shard.partition import contiguous_stride


def folded(t: Tensor, grouped: bool, query: bool = False) -> Tensor:
    """Queries, keys or values with four dims; a view wherever the memory allows it."""
    if grouped:
        t = t.flatten(-4, -3) if query else t.squeeze(-3)
    if t.ndim == 4:
        return t
    if t.ndim > 4:
        return t.reshape(math.prod(t.shape[:-3]), *t.shape[-3:])
    return t.reshape(*(1,) * (4 - t.ndim), *t.shape)


def in_token_order(t: Tensor) -> Tensor:
    """With four dims, in memory as (batch, tokens, heads, channels)."""
    _, h, n, d = t.shape
    if t.stride() == (n * h * d, d, h * d, 1):
        return t
    return _plainly_contiguous(t.transpose(1, 2)).transpose(1, 2)


def as_kernels_leave_it(out: Tensor, like_tokens: bool = False) -> Tensor:
    """The result in the memory order of torch's own on this device, whichever way it was made: alike on all ranks.

    Args:
        like_tokens: the queries lie in memory token by token, and torch's kernel for the CPU does as they do.
    """
    return in_token_order(out) if like_tokens or out.device.type != "cpu" else _plainly_contiguous(out)


def _plainly_contiguous(t: Tensor) -> Tensor:
    """Contiguous with the strides of a new tensor: those of a dim of one row would else differ between ranks."""
    t, stride = t.contiguous(), contiguous_stride(t.shape)
    return t if t.stride() == stride else t.as_strided(t.shape, stride)


def folded_mask(mask: Tensor, query_shape: Sequence[int], grouped: bool) -> Tensor:
    """A mask that broadcasts against (batch, heads, rows, columns)."""
    whole = _spread(mask.shape, query_shape, grouped)
    mask = mask.reshape(*(1,) * (len(whole) - mask.ndim), *mask.shape).expand(whole)
    return mask.reshape(_four(whole, grouped))


def unfolded_mask(g: Tensor, shape: Sequence[int], query_shape: Sequence[int], grouped: bool) -> Tensor:
    """The gradient of a mask of `shape`, given that of the folded one."""
    return g.reshape(_spread(shape, query_shape, grouped)).sum_to_size(shape)


def _spread(shape: Sequence[int], query_shape: Sequence[int], grouped: bool) -> list[int]:
    """The lead dims that are folded into one are given their full size, unless all of them are 1."""
    ndim = len(query_shape)
    out = [*(1,) * (ndim - len(shape)), *shape]
    split = ndim - 4 if grouped else ndim - 3  # where the heads begin
    for lo, hi in ((0, split), (split, ndim - 2)):
        if any(n != 1 for n in out[lo:hi]):
            out[lo:hi] = query_shape[lo:hi]
    return out


def _four(shape: Sequence[int], grouped: bool) -> list[int]:
    split = len(shape) - 4 if grouped else len(shape) - 3
    return [math.prod(shape[:split]), math.prod(shape[split:-2]), *shape[-2:]]
