"""Rows and elements of a tensor along a *cut* dim, by index: read from the ranks that own them, or written there.

Each rank asks the owners for what its part of the index names, or sends them what is to be written; the owners run
torch's own op on their shards. The functions that are answered by this are in `remote_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.execute import same_mesh
from dpzoo.shard.kernels.remote_rows import Route, deliver, retrieve
from dpzoo.shard.partition import Sizes
from dpzoo.shard.rules.parts import global_of
from dpzoo.shard.rules.remote_layout import DeclinedError, Layout, axis_that_cuts, on_mesh, route_of, spread
from dpzoo.shard.spec import REPLICATED, Cut
from dpzoo.shard.tensor import ShardTensor

Complaint = Callable[[int], Any]


# ---------------------------------------------------------------------- rows
def take_rows(x: Tensor, dim: int, index: Tensor, complain: Complaint) -> ShardTensor:
    """`x` with the dims of `index` in the place of `dim`, cut along an axis: the rows that the index names."""
    axis = axis_that_cuts(x, dim)
    assert isinstance(x, ShardTensor)
    index = on_mesh(index, x)
    same_mesh(torch.index_select, (x, index))
    own, layout = Layout.of(x), Layout.of(index)
    for a, cut in enumerate(own.cuts):
        if a != axis and cut != REPLICATED:  # cuts the result already
            layout = layout.but(a)
    layout, known = spread(index, layout, axis, 0)
    route = _route_of_rows(index, layout, known, axis, own.sizes[axis], x.shape[dim], complain)
    rows = own.local(x).movedim(dim, 0).index_select(0, route.rows)
    found = retrieve(rows, route).unflatten(0, layout.spec(index).local_shape)
    n = index.ndim
    found = found.movedim(tuple(range(n)), tuple(range(dim, dim + n)))
    cuts: list[Cut] = []
    for a, (x_cut, i_cut) in enumerate(zip(own.cuts, layout.cuts, strict=True)):
        by_index = a == axis or x_cut == REPLICATED
        cut = i_cut if by_index else x_cut
        assert isinstance(cut, int)
        cuts.append(cut if cut == REPLICATED or (not by_index and cut < dim) else cut + (dim if by_index else n - 1))
    sizes = [layout.sizes[a] if a == axis or c == REPLICATED else own.sizes[a] for a, c in enumerate(own.cuts)]
    return global_of(found, x._spec, cuts, sizes)


def _route_of_rows(
    index: ShardTensor, layout: Layout, known: bool, axis: int, sizes: Sizes, n: int, complain: Complaint
) -> Route:
    return route_of(index, layout, known, axis, sizes, n, lambda part, _: part.flatten().long(), complain)


def write_rows(
    x: Tensor, dim: int, index: Tensor, source: Tensor, write: Callable[..., Tensor], complain: Complaint
) -> ShardTensor:
    """`write(x, dim, index, source)` with `x` cut along `dim`: rows of `source` go to the rows that the index names."""
    axis = axis_that_cuts(x, dim)
    assert isinstance(x, ShardTensor)
    index, source = on_mesh(index, x), on_mesh(source, x)
    same_mesh(torch.index_add, (x, index, source))
    own, layout, index_layout = Layout.of(x), Layout.of(source), Layout.of(index)
    here = layout.sizes[axis] if layout.cuts[axis] == dim else None  # how the rows of the source lie
    for a in range(len(own.cuts)):
        if a != axis:
            layout, index_layout = layout.but(a, own.cuts[a], own.sizes[a]), index_layout.but(a)
    index_layout, known = spread(index, index_layout, axis, 0)
    if here is not None:
        index_layout = index_layout.but(axis, 0, here)
    layout = layout.but(axis, dim, index_layout.sizes[axis])
    route = _route_of_rows(index, index_layout, known, axis, own.sizes[axis], x.shape[dim], complain)
    arrived = deliver(layout.local(source).movedim(dim, 0), route).movedim(0, dim)
    return global_of(write(own.local(x), dim, route.rows, arrived), x._spec, own.cuts, own.sizes)


# ---------------------------------------------------------------------- elements
@dataclass(frozen=True)
class Elements:
    """Elements of a tensor that is cut along `dim`, addressed by an index of as many dims (gather, scatter, ...)."""

    x: ShardTensor
    dim: int
    own: Layout
    index: ShardTensor
    layout: Layout
    route: Route

    @staticmethod
    def of(x: Tensor, dim: int, index: Tensor, complain: Complaint) -> Elements:
        """Settle the route; declines where the other dims of index and tensor are cut and cannot lie side by side."""
        axis = axis_that_cuts(x, dim)
        assert isinstance(x, ShardTensor)
        if index.ndim != x.ndim:  # torch takes a number as a vector of one
            raise DeclinedError
        index = on_mesh(index, x)
        same_mesh(torch.gather, (x, index))
        own, layout = Layout.of(x), Layout.of(index)
        for a, cut in enumerate(own.cuts):
            if a == axis:
                continue
            if cut != REPLICATED and index.shape[cut] != x.shape[cut]:  # type: ignore[index]
                raise DeclinedError
            layout = layout.but(a, cut, own.sizes[a])
        if layout.cuts[axis] != REPLICATED and list(layout.cuts).count(layout.cuts[axis]) > 1:
            layout = layout.but(axis)
        layout, known = spread(index, layout, axis, dim)
        widths = [n for d, n in enumerate(own.spec(x).local_shape) if d != dim]
        count, first = torch.Size(widths).numel(), layout.cuts[axis]

        def flat(i: Tensor, start: int) -> Tensor:
            """Row x width + column: where the elements of a part of the index lie, rows first."""
            column = torch.zeros((1,) * i.ndim, dtype=torch.int64, device=i.device)
            others = [d for d in range(i.ndim) if d != dim]
            for d, width in zip(others, widths, strict=True):
                at = start if d == first else 0
                along = torch.arange(at, at + i.shape[d], device=i.device)
                column = column * width + along.view([-1 if e == d else 1 for e in range(i.ndim)])
            return (i.long() * count + column).flatten()

        sizes = tuple(n * count for n in own.sizes[axis])
        route = route_of(index, layout, known, axis, sizes, x.shape[dim], flat, complain)
        return Elements(x, dim, own, index, layout, route)

    def values(self) -> Tensor:
        """All elements of this rank's shard, flat, rows first; differentiable."""
        return self.own.local(self.x).movedim(self.dim, 0).reshape(-1)

    def read(self) -> ShardTensor:
        """What the index names."""
        found = retrieve(self.values().index_select(0, self.route.rows), self.route)
        found = found.view(self.layout.spec(self.index).local_shape)
        return global_of(found, self.x._spec, self.layout.cuts, self.layout.sizes)

    def arrived(self, src: Tensor) -> Tensor:
        """The elements of `src` at the places of the index, where they are to be written: one for each of the rows."""
        if src.shape != self.index.shape:
            src = src[tuple(slice(n) for n in self.index.shape)]
        return deliver(self.layout.local(on_mesh(src, self.x)).reshape(-1), self.route)

    def write(self, op: Callable[[Tensor, Tensor], Tensor]) -> ShardTensor:
        """A tensor like `x`, made by `op(flat elements, rows)` on each shard."""
        shape = self.own.spec(self.x).local_shape
        out = op(self.values(), self.route.rows)
        out = out.view(shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :]).movedim(0, self.dim)
        return global_of(out, self.x._spec, self.own.cuts, self.own.sizes)
