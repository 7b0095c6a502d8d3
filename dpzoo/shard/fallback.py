"""Ops without a rule: gather, compute, say so once. Never wrong, only not domain-parallel.

`strict()` turns the warning into `MissingShardPatch`, raised on every rank before anything is sent.
"""

from __future__ import annotations

import operator
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
from dpzoo.shard.moved_view import copied_view
from dpzoo.shard.op_names import INPLACE_OPERATORS, VIEW_NAMES
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec, stride_like
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import RandomOps, is_tracing

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
            f"{op_name(func)}{where()} has no rule for {operands_text(args, kwargs)}: it would gather {nbytes:,} bytes "
            "on every rank. Move the cut to another dim with redistribute(), register a handler with "
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
    if kwargs.get("out") is not None:
        return _gathered_out(func, args, kwargs)
    if args and is_inplace(func):
        if isinstance(args[0], Tensor):
            return _in_place(func, types, args, kwargs)
        if isinstance(args[0], (list, tuple)):
            return refuse(func, types, args, kwargs)  # it would write into the gathered copies
    leaves, tree = tree_flatten((args, kwargs))
    sharded = [t for t in leaves if isinstance(t, ShardTensor)]
    _note(func, args, kwargs, sharded)
    args, kwargs = tree_unflatten([whole(t) for t in leaves], tree)
    out = _deterministic(func, args, kwargs)
    if not sharded:
        return out
    out = tree_map_only(Tensor, lambda t: _rewrap(t, sharded), out)
    if getattr(func, "__name__", "") in VIEW_NAMES:
        tree_map_only(Tensor, lambda t: copied_view(t, sharded[0]), out)
    return out


def is_inplace(func: Any) -> bool:
    """Whether a function writes its first argument, by torch's rule of naming."""
    name = getattr(func, "__name__", "") or ""
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__int__", "__index__", "__invert__")
    return name.endswith("_") or func in _INPLACE_OPERATORS


_INPLACE_OPERATORS = frozenset(getattr(operator, name) for name in INPLACE_OPERATORS)


def _deterministic(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func` on whole tensors; raise if it drew random numbers, which are not the same on every rank."""
    if is_tracing():
        watch = RandomOps()
        with watch:
            out = func(*args, **kwargs)
        drew = bool(watch.seen)
    else:
        before = _random_states()
        out = func(*args, **kwargs)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(), strict=True))
    if drew:
        raise MissingShardPatch(
            f"{op_name(func)}{where()} draws random numbers and has no rule: they would differ between the ranks. Draw "
            "them with an op that has a rule (rand_like, bernoulli, dropout), or register a handler with "
            "ShardTensor.register_function_handler"
        )
    return out


def _random_states() -> list[Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _gathered_out(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A gathered call with `out=`: torch writes, and checks, whole tensors; then each shard takes its part."""
    targets, tree = tree_flatten(kwargs["out"])
    leaves, call = tree_flatten((args, {k: v for k, v in kwargs.items() if k != "out"}))
    _note(func, args, kwargs, [t for t in leaves if isinstance(t, ShardTensor)])
    full = [whole(t).detach().clone() if isinstance(t, ShardTensor) else t for t in targets]
    args, others = tree_unflatten([whole(t) for t in leaves], call)
    _deterministic(func, args, {**others, "out": tree_unflatten(full, tree)})
    for target, value in zip(targets, full, strict=True):
        if isinstance(target, ShardTensor):
            _check_out(func, target, value)
            target.copy_(replicate(value, target))
    return kwargs["out"]


def into_out(
    answer: Callable[..., Any], func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A call with `out=`: the answer without it, copied; raises where torch raises."""
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    leaves, _ = tree_flatten((args, kwargs, out))
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
        raise RuntimeError(
            f"{op_name(func)}(): functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad."
        )
    result = answer(func, types, args, kwargs)
    pairs = [(out, result)] if isinstance(out, Tensor) else list(zip(out, result, strict=True))
    for target, value in pairs:
        _check_out(func, target, value)
    for target, value in pairs:
        if not isinstance(target, ShardTensor):
            value = whole(value)
            if target.numel() == 0 and target.shape != value.shape:
                target.resize_(value.shape)
        target.copy_(value)
    return out


def _check_out(func: Callable[..., Any], target: Tensor, value: Tensor) -> None:
    exact = getattr(func, "__name__", "") in ("complex", "polar")  # torch casts into every other out
    if not torch.can_cast(value.dtype, target.dtype) or (exact and value.dtype is not target.dtype):
        raise RuntimeError(
            f"result type {value.dtype} can't be cast to the desired output type {target.dtype} ({op_name(func)})"
        )
    resizable = not isinstance(target, ShardTensor) and target.numel() == 0
    if tuple(target.shape) != tuple(value.shape) and not resizable:
        raise ShardError(
            f"{op_name(func)}{where()}: out has shape {tuple(target.shape)}, the result {tuple(value.shape)}; pass an "
            "out of the right shape, or take the result"
        )


def _note(func: Any, args: Any, kwargs: Any, sharded: list[ShardTensor]) -> None:
    nbytes = sum(t.numel() * t.dtype.itemsize for t in sharded if not t._spec.is_replicated)
    if nbytes and any(n > 1 for t in sharded for n in t._spec.layout.shape):
        note_gather(func, args, kwargs, nbytes)


def whole(t: Any) -> Any:
    """The whole tensor, plain, of anything sharded; everything else as it is. Differentiable."""
    if isinstance(t, ShardTensor):
        return to_shard(t, t._spec.replicated())
    return t.full_tensor() if isinstance(t, DTensor) else t


def replicate(t: Tensor, layout_of: ShardTensor) -> ShardTensor:
    """A plain tensor, the same on every rank, as a ShardTensor on the mesh of another."""
    return from_shard(t, _replicated_spec(t, layout_of))


def _replicated_spec(t: Tensor, like: ShardTensor) -> ShardTensorSpec:
    layout = like._spec.layout
    n = len(layout.shape)
    return ShardTensorSpec.make(layout, (REPLICATED,) * n, ((),) * n, t.shape, t.dtype, stride_like(t.shape, t))


def _rewrap(t: Tensor, sharded: list[ShardTensor]) -> Tensor:
    """Back into a ShardTensor, cut like an operand of the same shape where there is one (that costs nothing)."""
    if isinstance(t, ShardTensor) or t.layout is not torch.strided:  # a sparse result stays plain, whole on every rank
        return t
    out = replicate(t, sharded[0])
    for s in sharded:
        if s.shape == out.shape and not s._spec.is_partial:
            return relayout(out, s._spec)
    return out


def _in_place(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An in-place op without a rule: on the gathered tensor, then copied back into the shards."""
    target = args[0]
    leaves, tree = tree_flatten((args[1:], kwargs))
    _note(func, args, kwargs, [t for t in (target, *leaves) if isinstance(t, ShardTensor)])
    rest, kwargs = tree_unflatten([whole(t) for t in leaves], tree)
    if not isinstance(target, ShardTensor):
        return _deterministic(func, (target, *rest), kwargs)
    full = whole(target).clone()
    _deterministic(func, (full, *rest), kwargs)
    if full.shape != target.shape or full.dtype is not target.dtype:
        raise ShardError(
            f"{op_name(func)}{where()} changes the shape or dtype of {target._spec.describe()} in place: use the "
            "out-of-place form"
        )
    target.copy_(replicate(full, target))
    return target


def refuse(func: Callable[..., Any], types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that gathering would falsify, or that has no meaning on shards."""
    raise MissingShardPatch(
        f"{op_name(func)}{where()} cannot run on {operands_text(args, kwargs)}: take full_tensor() or to_local() "
        "first, or register a handler with ShardTensor.register_function_handler"
    )
