"""view and reshape below autograd: which runs of dims merge or split, and what that asks of the cuts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.partition import Sizes, align_sizes, even_sizes, starts
from dpzoo.shard.rules.view_plan import ViewPlan, view
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec

aten = torch.ops.aten


@view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.reshape.default)
def plan_reshape(op: Any, spec: ShardTensorSpec, size: Sequence[int], *_: Any) -> ViewPlan:
    """Reshape: which layout the input needs, and how the output is then cut."""
    size = resolve_size(spec.shape, size)
    source = reshape_source(spec, size)
    cuts, sizes = _reshaped_cuts(source, size)
    local = list(size)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0:
            local[cut] = sizes[axis][spec.layout.coords[axis]]
    copies = op is aten._unsafe_view.default or source is not spec
    return ViewPlan(
        source, (lambda t: t.reshape(local)) if copies else (lambda t: _view_or_copy(t, local)), cuts, sizes
    )


def _view_or_copy(t: Tensor, size: list[int]) -> Tensor:
    try:
        return t.view(size)
    except RuntimeError:  # a shard with gaps that the global strides do not show
        return t.reshape(size)


def resolve_size(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """Fill in -1; raises as torch does when the sizes do not fit."""
    total, known = math.prod(shape), math.prod(n for n in size if n != -1)
    if -1 in size and not known and not total:
        raise RuntimeError(
            f"cannot reshape tensor of 0 elements into shape {list(size)} because the unspecified dimension size -1 "
            "can be any value and is ambiguous"
        )
    out = tuple((total // known if known else 0) if n == -1 else int(n) for n in size)
    if math.prod(out) != total or list(size).count(-1) > 1 or min(out, default=0) < 0:
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {total}")
    return out


def _groups(shape: Sequence[int], size: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of input dims and output dims with equal products, dims of size 1 left out."""
    a = [d for d, n in enumerate(shape) if n != 1]
    b = [d for d, n in enumerate(size) if n != 1]
    out = []
    while a or b:
        i, j = [a.pop(0)] if a else [], [b.pop(0)] if b else []
        p, q = math.prod(shape[d] for d in i), math.prod(size[d] for d in j)
        while p != q:
            if p < q:
                i.append(a.pop(0))
                p *= shape[i[-1]]
            else:
                j.append(b.pop(0))
                q *= size[j[-1]]
        out.append((i, j))
    return out


def reshape_source(spec: ShardTensorSpec, size: Sequence[int]) -> ShardTensorSpec:
    """The layout nearest to `spec` whose shards are still one piece after the reshape."""
    if math.prod(size) == 0:
        return spec.replicated() if tuple(size) != tuple(spec.shape) else spec
    cuts, sizes = list(spec.cuts), list(spec.sizes)
    groups = _groups(spec.shape, size)
    kept = [i[0] for i, j in groups if len(i) == len(j) == 1]  # dims that stay as they are
    ones = [d for d in spec.cut_dims if spec.shape[d] == 1]
    for dim in ones:
        axis = spec.cut_dims[dim]
        cuts[axis], sizes[axis] = REPLICATED, ()
    for i, j in groups:
        for dim in [d for d in i if d in cuts]:
            axis = cuts.index(dim)
            ranks = spec.layout.shape[axis]
            if dim != i[0]:  # rows of different outer indices would interleave
                target = _other_cut(spec, cuts, i[0], kept, ranks)
                cuts[axis] = REPLICATED if target is None else target
                sizes[axis] = () if target is None else even_sizes(spec.shape[target], ranks)
            if cuts[axis] == i[0]:
                inner_in = math.prod(spec.shape[d] for d in i[1:])
                inner_out = math.prod(size[d] for d in j[1:])
                multiple = inner_out // math.gcd(inner_in, inner_out)
                if any(b % multiple for b in starts(sizes[axis])):
                    sizes[axis] = align_sizes(sizes[axis], multiple)
    return spec.like(cuts=cuts, sizes=sizes)


def _other_cut(spec: ShardTensorSpec, cuts: list[Cut], first: int, kept: list[int], ranks: int) -> int | None:
    """What to cut instead of an inner dim of a merged group: its first dim if every rank gets a row, or the longest of
    the dims that are kept."""
    free = [(spec.shape[d], d) for d in kept if d not in cuts]
    length, spare = max(free, default=(0, None))
    if first in cuts:
        return spare
    return spare if spec.shape[first] < min(ranks, length) else first


def _reshaped_cuts(source: ShardTensorSpec, size: Sequence[int]) -> tuple[list[Cut], list[Sizes]]:
    if math.prod(size) == 0:
        return list(source.cuts), list(source.sizes)
    cuts, sizes = list(source.cuts), list(source.sizes)
    for i, j in _groups(source.shape, size):
        for axis, cut in enumerate(source.cuts):
            if i and cut == i[0]:
                inner_in = math.prod(source.shape[d] for d in i[1:])
                inner_out = math.prod(size[d] for d in j[1:])
                cuts[axis] = j[0]
                sizes[axis] = tuple(n * inner_in // inner_out for n in source.sizes[axis])
    return cuts, sizes
