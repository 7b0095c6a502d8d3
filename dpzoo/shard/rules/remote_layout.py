"""Layouts of an index and of what it is applied to, for reading and writing along a cut dim (`remote_rows`).

Along the axis that cuts the indexed dim every rank asks for its own part of the index: its shard, or, of an index
that all ranks hold, an even part. Along the other axes index and tensor lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import replicate
from dpzoo.shard.kernels.remote_rows import Route, route_by_asking, route_by_knowing
from dpzoo.shard.partition import Sizes, even_sizes, starts
from dpzoo.shard.rules.parts import cut_axes, whole_values
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing


class DeclinedError(Exception):
    """The call is for whoever answered the function before."""


@dataclass(frozen=True)
class Layout:
    """Cuts and sizes per mesh axis."""

    cuts: tuple[Cut, ...]
    sizes: tuple[Sizes, ...]

    @staticmethod
    def of(t: ShardTensor) -> Layout:
        """Of a tensor, partial sums added up."""
        spec = whole_values(t._spec)
        return Layout(spec.cuts, spec.sizes)

    def but(self, axis: int, cut: Cut = REPLICATED, sizes: Sizes = ()) -> Layout:
        """This layout with what one axis cuts replaced, by nothing if not told."""
        cuts, all_sizes = list(self.cuts), list(self.sizes)
        cuts[axis], all_sizes[axis] = cut, sizes
        return Layout(tuple(cuts), tuple(all_sizes))

    def spec(self, t: ShardTensor) -> ShardTensorSpec:
        """The spec of `t` in this layout."""
        return t._spec.like(cuts=self.cuts, sizes=self.sizes)

    def local(self, t: ShardTensor) -> Tensor:
        """The shard of `t` in this layout; differentiable."""
        return to_shard(t, self.spec(t))


def on_mesh(t: Tensor, like: ShardTensor) -> ShardTensor:
    """A plain tensor as one that every rank holds."""
    return t if isinstance(t, ShardTensor) else replicate(t, like)


def axis_that_cuts(x: Tensor, dim: int) -> int:
    """The axis of several ranks that cuts `dim`; declines the call if there is none, or under a tracer."""
    if not isinstance(x, ShardTensor) or is_tracing():
        raise DeclinedError
    axes = cut_axes(whole_values(x._spec), (dim,))
    if not axes:
        raise DeclinedError
    return axes[0]


def spread(t: ShardTensor, layout: Layout, axis: int, dim: int) -> tuple[Layout, bool]:
    """`layout` with a cut by `axis`, of `dim` if there is none yet; and if there was none: all ranks know all of it."""
    if layout.cuts[axis] != REPLICATED:
        return layout, False
    for other, cut in enumerate(layout.cuts):
        if cut == dim:
            layout = layout.but(other)
    return layout.but(axis, dim, even_sizes(t.shape[dim], t._spec.layout.shape[axis])), True


def route_of(
    index: ShardTensor,
    layout: Layout,
    known: bool,
    axis: int,
    sizes: Sizes,
    n: int,
    flat: Callable[[Tensor, int], Tensor],
    complain: Callable[[int], Any],
) -> Route:
    """Who asks whom for what, given an index laid out as `layout`.

    Args:
        known: along `axis` all ranks hold the whole index.
        sizes: how the rows are cut along `axis`; `n` is the number of valid index values.
        flat: rows from a part of the index and where it starts along the dim that `axis` cuts.
        complain: raises for a value that is no valid index; called on every rank of the mesh.
    """
    mesh = index._spec.layout
    cut, parts = layout.cuts[axis], layout.sizes[axis]
    assert isinstance(cut, int)
    local = (layout.but(axis) if known else layout).local(index).detach()
    wrong = _agreed(local[(local < 0) | (local >= n)][:1], index, layout, axis)
    if not known:
        rows = flat(local, starts(parts)[mesh.coords[axis]])
        return route_by_asking(rows, sizes, mesh.groups[axis], wrong, complain)
    if wrong:
        complain(wrong[0])
    pieces = [flat(part, at) for part, at in zip(local.split(parts, cut), starts(parts), strict=False)]
    return route_by_knowing(pieces, sizes, mesh.groups[axis])


def _agreed(wrong: Tensor, index: ShardTensor, layout: Layout, axis: int) -> list[int]:
    """A wrong value that this rank or one along the other axes that cut the index has found."""
    others = [a for a, c in enumerate(layout.cuts) if a != axis and c != REPLICATED and index._spec.layout.shape[a] > 1]
    if not others:
        return [int(v) for v in wrong]
    lowest = torch.iinfo(torch.int64).min
    found = wrong.amax() if len(wrong) else torch.full((), lowest, device=wrong.device)
    for a in others:
        found = comm.all_reduce(found, index._spec.layout.groups[a], "max")
    return [] if int(found) == lowest else [int(found)]
