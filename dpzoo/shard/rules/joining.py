"""cat, stack and their relatives, also along the cut dim and with plain or replicated parts among sharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import plain_to_shard, to_shard
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.fallback import gather_call, replicate
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.factories import cut_along, plan_cat
from dpzoo.shard.rules.parts import global_of, normal_dim, whole_values
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


@rule(*spellings("stack"))
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Dims | None:
    """A new dim; the tensors are brought to one layout."""
    if len({tuple(t.shape) for t in tensors}) != 1:
        return None
    n = tensors[0].ndim
    at = normal_dim(dim, n + 1)
    labels = tuple(range(n))
    return Dims(
        [labels] * len(tensors),
        [(*labels[:at], "new", *labels[at:])],
        lambda *ts: torch.stack(ts, at),
        whole=frozenset(["new"]),
    )


@rule(name="cat")
def _cat_whole(tensors: Sequence[Tensor], dim: int = 0) -> Dims | None:
    """Joined along a dim that nobody cuts."""
    d = normal_dim(dim, tensors[0].ndim)
    labels = tuple(range(tensors[0].ndim))
    return Dims([(*labels[:d], f"part{i}", *labels[d + 1 :]) for i in range(len(tensors))],
                [(*labels[:d], "all", *labels[d + 1 :])], lambda *ts: torch.cat(ts, d),
                whole=frozenset(["all", *(f"part{i}" for i in range(len(tensors)))]))  # fmt: skip


@handler(*spellings("cat", "concat", "concatenate"), name="cat along a cut dim")
def cat(func: Any, tensors: Sequence[Tensor], dim: int = 0, *, axis: int | None = None, out: Any = None) -> Any:
    """Concatenate; along a cut dim the shards grow where they are and borders move as little as possible."""
    dim = dim if axis is None else axis
    tensors = list(tensors)
    if out is not None or len({t.ndim for t in tensors if tuple(t.shape) != (0,)}) > 1:
        return gather_call(func, (), (tensors, dim), {} if out is None else {"out": out})
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    like = next(t for t in tensors if isinstance(t, ShardTensor))
    tensors = [t for t in tensors if tuple(t.shape) != (0,)] or [like]
    if not any(isinstance(t, ShardTensor) for t in tensors):  # what was sharded holds nothing
        return replicate(torch.cat(tensors, dim).to(dtype), like)
    d = normal_dim(dim, tensors[0].ndim)
    layout = same_mesh(func, tensors)
    specs = [whole_values(t._spec) for t in tensors if isinstance(t, ShardTensor)]
    axis_cut = next((a for s in specs if (a := s.axis_of(d)) is not None), None)
    if axis_cut is None:
        return RULE_OF["cat"](func, (), ([t.to(dtype) for t in tensors], d), {})
    base = next(s for s in specs if s.axis_of(d) is not None)
    parts = [
        cut_along(t, axis_cut, layout.shape[axis_cut])
        if isinstance(t, ShardTensor) and t._spec.axis_of(d) == axis_cut
        else None
        for t in tensors
    ]
    sizes, wanted = plan_cat(
        [t.shape[d] if p is None else p for p, t in zip(parts, tensors, strict=True)], layout.shape[axis_cut]
    )
    pieces = [
        _piece(t.to(dtype), base, d, axis_cut, own, tuple((w,) for w in want))
        for t, own, want in zip(tensors, parts, wanted, strict=True)
    ]
    out_sizes = list(base.sizes)
    out_sizes[axis_cut] = sizes
    return global_of(torch.cat(pieces, d), base, base.cuts, out_sizes)


def _piece(t: Tensor, base: ShardTensorSpec, dim: int, axis: int, own: Any, wanted: Any) -> Tensor:
    """What one operand contributes to this rank's shard of the result."""
    cuts, sizes = list(base.cuts), list(base.sizes)
    if own is None:
        cuts[axis], sizes[axis] = REPLICATED, ()
    else:
        sizes[axis] = own
    spec = ShardTensorSpec.make(base.layout, cuts, sizes, t.shape, t.dtype)
    split = tuple(a for a in base.layout.axes if cuts[a] == REPLICATED and base.cuts[a] != REPLICATED)
    local = to_shard(t, spec, split) if isinstance(t, ShardTensor) else plain_to_shard(t, spec, split)
    if own is None:
        ((lo, hi),) = wanted[base.layout.coords[axis]]
        return local.narrow(dim, lo, hi - lo)
    return fetch(local, dim, own, wanted, base.layout.groups[axis])


@handler(*spellings("hstack", "vstack", "dstack", "row_stack", "column_stack"), name="hstack")
def stacks(func: Any, tensors: Sequence[Tensor], *, out: Any = None) -> Any:
    """NumPy-style joins, as cat."""
    name = {"row_stack": "vstack"}.get(func.__name__, func.__name__)
    if name == "column_stack":
        tensors = [t.reshape(t.numel(), 1) if t.ndim <= 1 else t for t in tensors]
        result = torch.cat(tensors, 1)
    else:
        least = {"hstack": torch.atleast_1d, "vstack": torch.atleast_2d, "dstack": torch.atleast_3d}[name]
        tensors = [least(t) for t in tensors]
        result = torch.cat(tensors, {"hstack": int(tensors[0].ndim > 1), "vstack": 0, "dstack": 2}[name])
    if out is not None:
        out.copy_(result)
        return out
    return result
