"""Views below autograd that keep every element: of the same shape, with dims renumbered, added, dropped, expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.dispatch_door import on
from dpzoo.shard.rules.parts import whole_values
from dpzoo.shard.rules.view_plan import ViewPlan, renumber, view, without_cut
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move

aten = torch.ops.aten


# ---------------------------------------------------------------------- same shape
@view(
    aten.alias.default,
    aten.detach.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.view_as_real.default,
    aten.lift_fresh.default,
)
def _same(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    return ViewPlan(spec, op, spec.cuts, spec.sizes)


@view(aten.view_as_complex.default)
def _as_complex(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    source = without_cut(spec, spec.ndim - 1)
    return ViewPlan(source, lambda t: op(_tidy(t)), source.cuts, source.sizes)


def _tidy(t: Tensor) -> Tensor:
    """An empty shard may have any strides, where the op insists on those of the other ranks."""
    return t if t.numel() else t.new_empty(t.shape)


@view(aten.view.dtype)
def _view_dtype(op: Any, spec: ShardTensorSpec, dtype: torch.dtype) -> ViewPlan:
    source = spec if dtype.itemsize == spec.dtype.itemsize else without_cut(spec, spec.ndim - 1)
    return ViewPlan(source, lambda t: _tidy(t).view(dtype), source.cuts, source.sizes)


# ---------------------------------------------------------------------- renumbered dims
@view(aten.permute.default)
def _permute(op: Any, spec: ShardTensorSpec, dims: Sequence[int]) -> ViewPlan:
    order = [d % spec.ndim for d in dims]
    return ViewPlan(spec, lambda t: t.permute(order), renumber(spec, order.index), spec.sizes)


@view(aten.transpose.int)
def _transpose(op: Any, spec: ShardTensorSpec, a: int, b: int) -> ViewPlan:
    order = list(range(spec.ndim))
    if order:
        a, b = a % spec.ndim, b % spec.ndim
        order[a], order[b] = order[b], order[a]
    return _permute(op, spec, order)


@view(aten.t.default)
def _t(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    if spec.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {spec.ndim}D")
    return _permute(op, spec, list(range(spec.ndim))[::-1])


@view(aten.unsqueeze.default)
def _unsqueeze(op: Any, spec: ShardTensorSpec, dim: int) -> ViewPlan:
    dim %= spec.ndim + 1
    return ViewPlan(spec, lambda t: t.unsqueeze(dim), renumber(spec, lambda c: c + (c >= dim)), spec.sizes)


@view(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: Any, spec: ShardTensorSpec, dims: Any = None) -> ViewPlan:
    asked = range(spec.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % max(spec.ndim, 1) for d in asked if spec.ndim and spec.shape[d] == 1})
    source = without_cut(spec, *gone)
    return ViewPlan(
        source,
        lambda t: aten.squeeze.dims(t, gone),
        renumber(source, lambda c: c - sum(g < c for g in gone)),
        source.sizes,
    )


@view(aten.expand.default)
def _expand(op: Any, spec: ShardTensorSpec, size: Sequence[int], *, implicit: bool = False) -> ViewPlan:
    lead = len(size) - spec.ndim
    full = [spec.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    grown = [d for d in range(spec.ndim) if spec.shape[d] == 1 and full[d + lead] != 1]
    source = without_cut(spec, *grown)
    local = list(full)
    for d in source.cut_dims:
        if full[d + lead] != spec.shape[d]:
            raise RuntimeError(
                f"The expanded size of the tensor ({full[d + lead]}) must match the existing size ({spec.shape[d]}) at "
                f"non-singleton dimension {d + lead}.  Target sizes: {list(size)}.  Tensor sizes: {list(spec.shape)}"
            )
        local[d + lead] = source.local_shape[d]
    return ViewPlan(source, lambda t: t.expand(local), renumber(source, lambda c: c + lead), source.sizes)


@view(aten.unfold.default)
def _unfold(op: Any, spec: ShardTensorSpec, dim: int, size: int, step: int) -> ViewPlan:
    source = without_cut(spec, dim % max(spec.ndim, 1))
    return ViewPlan(source, lambda t: t.unfold(dim, size, step), source.cuts, source.sizes)


@on(aten.unfold_backward.default)
def _unfold_backward(op: Any, g: ShardTensor, shape: Sequence[int], dim: int, size: int, step: int) -> ShardTensor:
    dim %= max(len(shape), 1)
    source = without_cut(whole_values(g._spec), dim, len(shape))
    out = source.like(shape=shape) if shape else source.like(shape=(), cuts=(REPLICATED,) * len(source.cuts))
    local = op(move(g._local_tensor, g._spec, source), out.local_shape, dim, size, step)
    return wrap(local, out.for_local(local))
