"""Largest and smallest values and where they are: empty shards offer nothing, ties count over all shards.

amax, amin and the full max share a gradient evenly among equals; max and min along a dim, argmax and argmin take the
first of them. As on one device, NaN wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import fill_empty, highest, lowest, normal_dim
from dpzoo.shard.rules.reducing import Maths, Plan, Reduction, node, reduces, reduction_of
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap

aten = torch.ops.aten


def _ordered(local: Tensor) -> Tensor:
    """A tensor of a dtype that every order op takes."""
    return local.to(torch.uint8) if local.dtype is torch.bool else local


# ---------------------------------------------------------------------- values
class Extremum(Maths):
    """The extreme value over dims; `nan_is_value` says whether a NaN that won gets the gradient (full max) or not."""

    def __init__(self, largest: bool, nan_is_value: bool = False) -> None:
        self.op, self.fill = (torch.amax, lowest) if largest else (torch.amin, highest)
        self.nan_is_value = nan_is_value

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """One value of each rank, then the extreme of those."""
        if not r.axes:
            return (self.op(local, r.dims, r.keepdim),)
        filled = fill_empty(local, r.dims, self.fill(local.dtype))
        return (self.op(r.stack_now(self.op(filled, r.dims, r.keepdim)), 0),)

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """Shared evenly among the elements that are equal to the result."""
        hit = x == outs[0]
        if self.nan_is_value:
            hit = hit | (x.isnan() & outs[0].isnan())
        hit = hit.to(grads[0].dtype)
        return grads[0] * hit / add(hit)


def extremum(spec: ShardTensorSpec, dim: Any, keepdim: bool, largest: bool, nan_is_value: bool = False) -> Plan:
    """The plan of amax or amin."""
    r = reduction_of(spec, dim, keepdim)
    return node(Extremum(largest, nan_is_value), r)


@reduces("amax", aten=(aten.amax.default, aten.max.default))
def amax(spec: ShardTensorSpec, dim: Any = (), keepdim: bool = False) -> Plan | None:
    """Largest value."""
    return extremum(spec, dim, keepdim, True)


@reduces("amin", aten=(aten.amin.default, aten.min.default))
def amin(spec: ShardTensorSpec, dim: Any = (), keepdim: bool = False) -> Plan | None:
    """Smallest value."""
    return extremum(spec, dim, keepdim, False)


@reduces("aminmax", aten=(aten.aminmax.default,))
def aminmax(spec: ShardTensorSpec, *, dim: int | None = None, keepdim: bool = False) -> Plan | None:
    """Smallest and largest value."""
    low, high = (extremum(spec, dim, keepdim, largest) for largest in (False, True))
    return lambda x: torch.return_types.aminmax((low(x), high(x)))


# ---------------------------------------------------------------------- places
def _first_best(values: Tensor, indices: Tensor, largest: bool) -> tuple[Tensor, Tensor]:
    """The best of the ranks' candidates (dim 0), and among equals the lowest index."""
    best = values.amax(0) if largest else values.amin(0)
    hit = values == best
    if values.dtype.is_floating_point:
        hit = hit | (values.isnan() & best.isnan())
    first = torch.where(hit, indices, torch.iinfo(torch.int64).max).argmin(0, keepdim=True)
    return values.gather(0, first)[0], indices.gather(0, first)[0]


def _place_along(r: Reduction, local: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Extreme value and its global index along one dim, kept as a dim of size 1."""
    start = r.spec.offsets()[dim]
    filled = fill_empty(_ordered(local), (dim,), (lowest if largest else highest)(local.dtype))
    at = (torch.argmax if largest else torch.argmin)(filled, dim, keepdim=True)
    value = filled.gather(dim, at)
    # An empty shard must lose also where all others hold the filled-in value.
    index = at + start if local.shape[dim] else torch.full_like(at, torch.iinfo(torch.int64).max - 1)
    if r.axes:
        value, index = _first_best(r.stack_now(value), r.stack_now(index), largest)
    return value.to(local.dtype), index


def _place_anywhere(r: Reduction, local: Tensor, largest: bool) -> Tensor:
    """Global flat index of the extreme value."""
    filled = fill_empty(_ordered(local), r.dims, (lowest if largest else highest)(local.dtype))
    at = (torch.argmax if largest else torch.argmin)(filled)
    value = filled.flatten()[at]
    index, step, rest = torch.zeros_like(at), 1, at
    for size, total, start in zip(filled.shape[::-1], r.spec.shape[::-1], r.spec.offsets()[::-1], strict=True):
        index, rest, step = index + (rest % size + start) * step, rest // size, step * total
    if not local.numel():
        index = torch.full_like(index, torch.iinfo(torch.int64).max - 1)
    return _first_best(r.stack_now(value), r.stack_now(index), largest)[1] if r.axes else index


def _arg(spec: ShardTensorSpec, dim: int | None, keepdim: bool, largest: bool) -> Plan:
    r = reduction_of(spec, dim, keepdim)

    def run(x: ShardTensor) -> Tensor:
        local = x._local_tensor
        if not spec.shape:
            index = torch.zeros_like(local, dtype=torch.int64)
        elif dim is None:
            index = _place_anywhere(r, local, largest)
            index = index.reshape((1,) * spec.ndim) if keepdim else index
        else:
            index = r.drop(_place_along(r, local, r.dims[0], largest)[1])
        return wrap(index, r.spec_of(index))

    return run


@reduces("argmax", aten=(aten.argmax.default,))
def argmax(spec: ShardTensorSpec, dim: int | None = None, keepdim: bool = False) -> Plan | None:
    """Global index of the largest value."""
    return _arg(spec, dim, keepdim, True)


@reduces("argmin", aten=(aten.argmin.default,))
def argmin(spec: ShardTensorSpec, dim: int | None = None, keepdim: bool = False) -> Plan | None:
    """Global index of the smallest value."""
    return _arg(spec, dim, keepdim, False)


class _ExtremumAlong(Maths):
    """Value and global index along one dim; the gradient goes to that index alone."""

    def __init__(self, largest: bool) -> None:
        self.largest = largest

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """Two small gathers."""
        if not r.spec.shape:
            return local.clone(), torch.zeros_like(local, dtype=torch.int64)
        value, index = _place_along(r, local, r.dims[0], self.largest)
        return r.drop(value), r.drop(index)

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """Where the global index along the dim is that of the value."""
        if not r.spec.shape:
            return grads[0]
        return grads[0] * (_positions(r, x) == outs[1]).to(grads[0].dtype)


def _positions(r: Reduction, x: Any) -> Any:
    """Global index along the reduced dim, shaped to broadcast with `x` (a shard, or the ShardTensor)."""
    (dim,) = r.dims
    start = 0 if isinstance(x, ShardTensor) else r.spec.offsets()[dim]
    shape = [x.shape[dim] if d == dim else 1 for d in range(x.ndim)]
    return torch.arange(start, start + x.shape[dim], device=x.device).view(shape)


def _along(spec: ShardTensorSpec, dim: int, keepdim: bool, largest: bool) -> Plan:
    r = reduction_of(spec, normal_dim(dim, spec.ndim), keepdim)
    kind = torch.return_types.max if largest else torch.return_types.min
    pair = node(_ExtremumAlong(largest), r)
    return lambda x: kind(pair(x))


def _max_or_min(name: str, largest: bool, ops: tuple[Any, ...]) -> None:
    def plan(spec: ShardTensorSpec, dim: int | None = None, keepdim: bool = False) -> Plan | None:
        if dim is None:
            return extremum(spec, None, False, largest, nan_is_value=True)
        return _along(spec, dim, keepdim, largest)

    one: Callable[..., Any] = reduces(name, aten=ops)(plan)
    elementwise = torch.maximum if largest else torch.minimum

    def answer(func: Any, *args: Any, **kwargs: Any) -> Any:
        other = kwargs.get("other", args[1] if len(args) > 1 else None)
        if not isinstance(other, Tensor):
            return one(func, *args, **kwargs)
        x = args[0] if args else kwargs["input"]
        return elementwise(x, other, **({"out": kwargs["out"]} if kwargs.get("out") is not None else {}))

    handler(*spellings(name), name=name)(answer)


_max_or_min("max", True, (aten.max.dim,))
_max_or_min("min", False, (aten.min.dim,))
