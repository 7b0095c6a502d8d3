"""Diagonals below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpzoo.shard.dispatch_door import on
from dpzoo.shard.partition import Sizes, cut_at, starts
from dpzoo.shard.rules.parts import whole_values
from dpzoo.shard.rules.view_parts import recall, remember
from dpzoo.shard.rules.view_plan import ViewPlan, renumber, view, without_cut
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move

aten = torch.ops.aten


def _diagonal_sizes(sizes: Sizes, lo: int, hi: int) -> Sizes:
    """How many diagonal elements each shard of a cut dim has: those at places `lo` to `hi` of that dim."""
    return cut_at(sizes, lo, max(lo, hi))


@view(aten.diagonal.default)
def _diagonal(op: Any, spec: ShardTensorSpec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ViewPlan:
    """Where one of the two dims is cut, so is the diagonal: each shard holds the part that passes through it."""
    a, b = dim1 % spec.ndim, dim2 % spec.ndim
    source = without_cut(spec, b) if spec.axis_of(a) is not None else spec
    cuts, sizes = list(renumber(source, lambda c: c - (c > a) - (c > b))), list(source.sizes)
    cut = a if source.axis_of(a) is not None else b
    axis, local_offset = source.axis_of(cut), offset
    if axis is not None:
        start = source.local_start(axis)
        local_offset += start if cut == a else -start
        other, lead = (spec.shape[b], -offset) if cut == a else (spec.shape[a], offset)
        sizes[axis] = _diagonal_sizes(source.sizes[axis], max(0, lead), min(spec.shape[cut], other + lead))
        cuts[axis] = spec.ndim - 2
        remember(source, cut, ("diagonal", offset, a, b, sizes[axis]))
    return ViewPlan(source, lambda t: t.diagonal(local_offset, a, b), cuts, sizes)


@on(aten.diagonal_backward.default)
def _diagonal_backward(op: Any, g: ShardTensor, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> ShardTensor:
    a, b = dim1 % len(shape), dim2 % len(shape)
    spec = whole_values(g._spec)
    last, cut, known = g.ndim - 1, None, None
    axis = spec.axis_of(last)
    if axis is not None:
        for dim in (a, b):
            found = recall(spec.layout, axis, shape, dim, ("diagonal", offset, a, b, spec.sizes[axis]))
            cut, known = (dim, found) if found is not None and known is None else (cut, known)
        if known is None:
            spec = without_cut(spec, last)
    small, large = sorted((a, b))
    cuts, sizes = list(renumber(spec, lambda c: (c + (c >= small)) + (c + (c >= small) >= large))), list(spec.sizes)
    local_offset = offset
    if axis is not None and cut is not None and known is not None:
        cuts[axis], sizes[axis] = cut, known
        start = starts(known)[spec.layout.coords[axis]]
        local_offset += start if cut == a else -start
    out = spec.like(cuts=cuts, sizes=sizes, shape=shape)
    local = g._local_tensor.new_zeros(out.local_shape)
    local.diagonal(local_offset, a, b).copy_(move(g._local_tensor, g._spec, spec))
    return wrap(local, out)
