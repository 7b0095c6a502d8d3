"""Choosing by a boolean mask, `x[mask]`, masked_select and nonzero, along a cut dim: shards of known, uneven sizes.

Each rank chooses from its own rows; then the ranks tell each other how many, one number each, since every layout
carries all sizes. That is possible where the first dim is the only one of the mask that is cut, because the result
keeps its order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.partition import Sizes
from dpzoo.shard.registry import spellings
from dpzoo.shard.rules.parts import global_of
from dpzoo.shard.rules.precedence import put_before
from dpzoo.shard.rules.remote_layout import DeclinedError, Layout, on_mesh
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing


def choose(x: Tensor, mask: Tensor) -> ShardTensor:
    """`x[mask]` for a mask of the leading dims of `x`. Differentiable by `x`."""
    if mask.dtype is not torch.bool or not 0 < mask.ndim <= x.ndim or mask.shape != x.shape[: mask.ndim]:
        raise DeclinedError
    like = next((t for t in (x, mask) if isinstance(t, ShardTensor)), None)
    if like is None or is_tracing():
        raise DeclinedError
    x, mask = on_mesh(x, like), on_mesh(mask, like)
    same_mesh(torch.Tensor.__getitem__, (x, mask))
    layout, axis = _by_first_dim(Layout.of(x), Layout.of(mask), mask.ndim)
    rows = _of_first_dim(layout, axis)
    local = layout.local(x)[rows.local(mask)]
    cuts: list[Cut] = [
        0 if a == axis else c if c == REPLICATED else int(c) - mask.ndim + 1 for a, c in enumerate(layout.cuts)
    ]
    return global_of(local, x._spec, cuts, layout.but(axis, 0, _told(len(local), x._spec, axis)).sizes)


def _by_first_dim(x: Layout, mask: Layout, ndim: int) -> tuple[Layout, int]:
    """A layout of `x` that cuts only the first of the mask's dims, and the axis that does."""
    owner = next((t for t in (x, mask) if 0 in t.cuts), None)
    if owner is None:
        raise DeclinedError
    axis = owner.cuts.index(0)
    for a in range(len(x.cuts)):
        if a == axis:
            x = x.but(a, 0, owner.sizes[a])
        elif x.cuts[a] != REPLICATED and x.cuts[a] in range(ndim):
            raise DeclinedError
    return x, axis


def _of_first_dim(layout: Layout, axis: int) -> Layout:
    for a in range(len(layout.cuts)):
        if a != axis:
            layout = layout.but(a)
    return layout


def _told(count: int, spec: ShardTensorSpec, axis: int) -> Sizes:
    """How many rows each rank of an axis has chosen."""
    n = spec.layout.shape[axis]
    mine = torch.tensor([count], device=spec.layout.device_type)
    return tuple(comm.all_gather_v(mine, 0, (1,) * n, spec.layout.groups[axis]).tolist())


def indices_of_true(x: Tensor) -> ShardTensor:
    """`torch.nonzero(x)`: (n, ndim), in row-major order."""
    if not isinstance(x, ShardTensor) or x.ndim == 0 or is_tracing():
        raise DeclinedError
    layout, axis = _by_first_dim(Layout.of(x), Layout.of(x), x.ndim)
    found = layout.local(x.detach()).nonzero()  # type: ignore[arg-type]
    first = sum(layout.sizes[axis][: x._spec.layout.coords[axis]])
    found[:, 0] += first
    sizes = _told(len(found), x._spec, axis)
    out = Layout((REPLICATED,) * len(layout.cuts), ((),) * len(layout.cuts)).but(axis, 0, sizes)
    return global_of(found, x._spec, out.cuts, out.sizes)


def _is_mask(x: Any, index: Any = None, *_: Any) -> bool:
    mask = index[0] if index.__class__ is tuple and len(index) == 1 else index
    return isinstance(mask, Tensor) and mask.dtype is torch.bool


def _getitem(input: Tensor, index: Any) -> Any:
    mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(mask, Tensor):
        raise DeclinedError
    return choose(input, mask)


def _masked_select(input: Tensor, mask: Tensor) -> Any:
    if input.shape != mask.shape:
        raise DeclinedError
    return choose(input, mask)


def _nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    found = indices_of_true(input)
    return found.unbind(1) if as_tuple else found


def _where(condition: Tensor) -> Any:
    return _nonzero(condition, as_tuple=True)


def install() -> None:
    """Put these answers before those of all rules; called once, after all rules are registered."""
    put_before("getitem by a mask", (torch.Tensor.__getitem__,), _getitem, when=_is_mask)
    put_before("masked_select", spellings("masked_select"), _masked_select)
    put_before("nonzero", spellings("nonzero"), _nonzero)
    put_before("where of a condition", spellings("where"), _where, when=lambda *args: len(args) < 2)
