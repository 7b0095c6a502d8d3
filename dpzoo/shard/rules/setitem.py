"""`x[...] = value` by every kind of index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpzoo.shard.fallback import gather_call, whole
from dpzoo.shard.function_door import native
from dpzoo.shard.registry import RULE_OF, handler
from dpzoo.shard.rules.index_writing import can_put
from dpzoo.shard.rules.indexing import is_basic, items_of, run_of_tensors
from dpzoo.shard.tensor import ShardTensor


@handler(torch.Tensor.__setitem__, name="setitem")
def setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    """`x[...] = value`: a write into the view, where `x[...]` is one; gradients as in torch."""
    if not isinstance(x, ShardTensor):
        x[tree_map(whole, index)] = whole(value)
        return
    scalar = not isinstance(value, Tensor) or value.ndim == 0
    if scalar and isinstance(index, Tensor) and index.dtype is torch.bool and 0 < index.ndim <= x.ndim:
        _set_masked(x, index, value)
    elif is_basic(index):
        _set_view(native(torch.Tensor.__getitem__, (ShardTensor,), (x, index), {}), value)
    elif not _set_rows(x, index, value):
        _set_gathered(x, index, value)


def _set_masked(x: ShardTensor, mask: Tensor, value: Any) -> None:
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} does not match the shape of the indexed tensor {list(x.shape)}"
        )
    x.masked_fill_(mask.reshape([*mask.shape, *[1] * (x.ndim - mask.ndim)]), value)


def _set_view(view: Tensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
        return
    while value.ndim > view.ndim and value.shape[0] == 1:  # torch drops leading dims of size 1 here
        value = value.squeeze(0)
    view.copy_(value)


def _set_rows(x: ShardTensor, index: Any, value: Any) -> bool:
    """A write at integer tensors that stand side by side, as `index_put`; False where that has no rule for it."""
    found = run_of_tensors(items_of(index), x.ndim)
    if found is None:
        return False
    basic, first, tensors = found
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=x.dtype, device=x.device)
    keep = all(i == slice(None) for i in basic if i is not Ellipsis)
    part = x if keep else native(torch.Tensor.__getitem__, (ShardTensor,), (x, tuple(basic)), {})
    lead = value.ndim - (part.ndim - len(tensors) + max(i.ndim for i in tensors))
    if lead > 0 and tuple(value.shape[:lead]) == (1,) * lead:  # torch drops leading dims of size 1 here
        value = value.reshape(value.shape[lead:])
    if not can_put(part, tensors, value, first):
        return False
    part.copy_(RULE_OF["index_put"](torch.index_put, (), (part, tuple(tensors), value), {"first": first}))
    return True


def _set_gathered(x: ShardTensor, index: Any, value: Any) -> None:
    """An index without a rule: on the whole tensor, then back into the shards."""
    at = tree_map(whole, index)

    def write(full: Tensor, v: Any) -> Tensor:
        full = full.clone()
        full[at] = v
        return full

    write.__name__ = "setitem"
    x.copy_(gather_call(write, (), (x, value), {}))
