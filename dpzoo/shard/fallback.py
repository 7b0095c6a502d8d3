"""Ops without a rule: gather, compute, say so once. Never wrong, only not domain-parallel.

`strict()` turns the warning into `MissingShardPatch`, raised on every rank before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dpzoo.shard.bridges import from_shard, relayout, to_shard
from dpzoo.shard.diagnose import op_name, operands_text, where
from dpzoo.shard.errors import GatherWarning, MissingShardPatch, ShardError
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor

_strict = False
_said: set[tuple[str, str]] = set()


@contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Inside the block, an op that would have to gather a sharded tensor raises `MissingShardPatch` instead."""
    global _strict
    before, _strict = _strict, enabled
    try:
        yield
    finally:
        _strict = before


def reset_warnings() -> None:
    """Let every gather be reported again."""
    _said.clear()


def note_gather(func: Any, args: Any, kwargs: Any, nbytes: int) -> None:
    """Report that `func` gathers `nbytes`; once per op and place in the model."""
    if _strict:
        raise MissingShardPatch(
            f"{op_name(func)}{where()} has no rule for {operands_text(args, kwargs)}: it would gather {nbytes:,} bytes on "
            "every rank. Move the cut to another dim with redistribute(), register a handler with "
            "ShardTensor.register_function_handler, or leave strict mode"
        )
    key = (op_name(func), where())
    if key in _said:
        return
    _said.add(key)
    warnings.warn(
        f"{key[0]}{key[1]} has no rule for {operands_text(args, kwargs)}: gathering {nbytes:,} bytes on every rank "
        "(right, but not domain-parallel; dpzoo.shard.strict() makes this an error)",
        GatherWarning,
        stacklevel=4,
    )


def gather_call(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `func` on gathered tensors, the same on every rank; differentiable."""
    name = getattr(func, "__name__", "")
    target = args[0] if args else None
    if isinstance(kwargs.get("out"), Tensor):
        out = kwargs.pop("out")
        out.copy_(func(*args, **kwargs))
        return out
    in_place = (
        (name.endswith("_")
        and not name.endswith("__"))
        or (name.startswith("__i")
        and name not in ("__int__", "__index__", "__invert__"))
    )
    if in_place and isinstance(target, ShardTensor):
        return _in_place(func, types, args, kwargs)
    leaves, tree = tree_flatten((args, kwargs))
    sharded = [t for t in leaves if isinstance(t, ShardTensor)]
    _note(func, args, kwargs, sharded)
    args, kwargs = tree_unflatten([_whole(t) for t in leaves], tree)
    out = func(*args, **kwargs)
    if not sharded:
        return out
    return tree_map_only(Tensor, lambda t: _rewrap(t, sharded), out)


def _note(func: Any, args: Any, kwargs: Any, sharded: list[ShardTensor]) -> None:
    nbytes = sum(t.numel() * t.dtype.itemsize for t in sharded if not t._spec.is_replicated)
    if nbytes and any(n > 1 for t in sharded for n in t._spec.layout.shape):
        note_gather(func, args, kwargs, nbytes)


def _whole(t: Any) -> Any:
    if isinstance(t, ShardTensor):
        return to_shard(t, t._spec.replicated())
    return t.full_tensor() if isinstance(t, DTensor) else t


def replicate(t: Tensor, layout_of: ShardTensor) -> ShardTensor:
    """A plain tensor, the same on every rank, as a ShardTensor on the mesh of another."""
    return from_shard(t, _replicated_spec(t, layout_of))


def _replicated_spec(t: Tensor, like: ShardTensor) -> ShardTensorSpec:
    from dpzoo.shard.spec import REPLICATED, stride_like

    layout = like._spec.layout
    n = len(layout.shape)
    return ShardTensorSpec.make(layout, (REPLICATED,) * n, ((),) * n, t.shape, t.dtype, stride_like(t.shape, t))


def _rewrap(t: Tensor, sharded: list[ShardTensor]) -> Tensor:
    """Back into a ShardTensor, cut like an operand of the same shape where there is one (that costs nothing)."""
    if isinstance(t, ShardTensor):
        return t
    out = replicate(t, sharded[0])
    for s in sharded:
        if s.shape == out.shape and not s._spec.is_partial:
            return relayout(out, s._spec)
    return out


def _in_place(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An in-place op without a rule: on the gathered tensor, then copied back into the shards."""
    target, shape = args[0], args[0].shape
    leaves, tree = tree_flatten((args[1:], kwargs))
    _note(func, args, kwargs, [t for t in (target, *leaves) if isinstance(t, ShardTensor)])
    rest, kwargs = tree_unflatten([_whole(t) for t in leaves], tree)
    full = _whole(target).clone()
    func(full, *rest, **kwargs)
    if full.shape != shape or full.dtype is not target.dtype:
        raise ShardError(
            f"{op_name(func)}{where()} changes the shape or dtype of {target._spec.describe()} in place: use the out-of-place form"
        )
    target.copy_(replicate(full, target))
    return target


def refuse(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that gathering would falsify, or that has no meaning on shards."""
    raise MissingShardPatch(
        f"{op_name(func)}{where()} cannot run on {operands_text(args, kwargs)}: take full_tensor() or to_local() first, or "
        "register a handler with ShardTensor.register_function_handler"
    )


def no_grad_whole(t: ShardTensor) -> Tensor:
    """The global tensor, outside of autograd."""
    with torch.no_grad():
        return to_shard(t, t._spec.replicated())
