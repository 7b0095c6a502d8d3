"""Neighborhood attention along a cut dim that borrows keys and values and copies none: inner queries first, ends later.

The queries of a shard whose windows lie inside of it attend to its keys where they are, while those of the neighbours
travel; the queries at either end attend to a slab of what has arrived and a few rows of the shard. Backward takes the
ends first, so that gradients go home while the inner ones are computed. Where no window lies inside (a narrow shard) a
rank joins all rows; the messages are the same, so that each rank decides this for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dpzoo.ops import neighborhood_blocks as blocks
from dpzoo.ops.neighborhood import gradients_differentiably
from dpzoo.ops.neighborhood_blocks import Geometry, Gradients
from dpzoo.ops.neighborhood_window import Axis, block_widths
from dpzoo.shard.exchange import Wanted, foreign, joined, parted, start_exchange, start_return
from dpzoo.shard.local_bridges import fetch_each, send_home
from dpzoo.shard.partition import Interval, Sizes, overlap, own_intervals


@dataclass(frozen=True)
class Part:
    """Neighbouring queries of a shard, `[start, end)` along the cut dim, and the interval of keys that they see."""

    queries: Interval
    keys: Interval


@dataclass(frozen=True)
class Halo:
    """What travels along one cut dim, and what a rank does with it. All positions are global.

    Attributes:
        wanted: per rank the interval of keys and values that its queries see.
        own: this rank's rows.
        inner: queries that see own keys alone, if there are any.
        ends: the other queries.
    """

    dim: int
    sizes: Sizes
    group: str
    wanted: Wanted
    me: int
    own: Interval
    inner: Part | None
    ends: tuple[Part, ...]

    @property
    def sees(self) -> Interval:
        """The keys that this rank's queries see."""
        return self.wanted[self.me][0] if self.wanted[self.me] else (self.own[0], self.own[0])

    @cached_property
    def foreign(self) -> Wanted:
        """Per rank what it wants of others."""
        return foreign(self.wanted, self.sizes)


@lru_cache(maxsize=4096)
def halo_of(dim: int, sizes: Sizes, group: str, me: int, axes: tuple[Axis, ...], grid: tuple[int, ...]) -> Halo:
    """The halo of rank `me` along tensor dim `dim`; `grid` are the spatial sizes of its shard."""
    axis, intervals = axes[dim - 1], own_intervals(sizes)
    reach = [axis.reach(*interval) for interval in intervals]
    wanted = tuple((r,) if r[0] < r[1] else () for r in reach)
    lo, hi = own = intervals[me]
    # Whole blocks, so that no block is torn.
    step = block_widths(axes, grid)[dim - 1] * axis.dilation
    first = next((a for a in range(lo, hi, step) if axis.reach(a, hi)[0] >= lo), hi)
    last = next((b for b in (hi, *reversed(range(first, hi, step))) if axis.reach(lo, b)[1] <= hi), first)
    inner = Part((first, last), own) if first < last else None
    outer = ((lo, first), (last, hi)) if inner else (own,)
    ends = tuple(Part(q, axis.reach(*q)) for q in outer if q[0] < q[1])
    return Halo(dim, sizes, group, wanted, me, own, inner, ends)


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, at: Geometry, halo: Halo) -> tuple[Tensor, Tensor]:
    """Attention of a shard's queries and its log-sum-exp; differentiable, also twice. All ranks take part.

    Args:
        at: where queries and keys lie, the own ones along the cut dim.
    """
    found: tuple[Tensor, Tensor] = _Attend.apply(q, k, v, table, at, halo)
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, at: Geometry, halo: Halo
    ) -> tuple[Tensor, Tensor]:
        travel = (halo.dim, halo.sizes, halo.foreign, halo.group)
        pending = start_exchange([k, v], *travel, wait=halo.inner is None)
        out, lse = blocks.empty_results(q, v)

        def compute(part: Part, k: Tensor, v: Tensor) -> None:
            o, sums, queries = (_queries(t, part, halo) for t in (out, lse, q))
            blocks.forward_into(o, sums, queries, k, v, table, _moved(at, part, halo))

        if halo.inner is not None:
            compute(halo.inner, k, v)
        keys, values = (_sides(pieces, t, halo) for pieces, t in zip(pending.wait(), (k, v), strict=True))
        for part in halo.ends:
            compute(part, _slab(k, keys, part, halo), _slab(v, values, part, halo))
        ctx.at, ctx.halo = at, halo
        ctx.save_for_backward(q, k, v, table, out, lse, *keys, *values)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        q, k, v, table, out, lse, *sides = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(g, (q, k, v, table), ctx.needs_input_grad[:4], ctx.at, ctx.halo), None, None
        into = Gradients.of(q, k, v, table if ctx.needs_input_grad[3] else None)
        _backward(into, _Given(g, q, k, v, table, out, lse, sides[:2], sides[2:]), ctx.at, ctx.halo)
        return *into.in_dtype_of(k, v, table), None, None


@dataclass(frozen=True)
class _Given:
    """What backward reads; `keys`, `values`: the rows that were borrowed, before and after the own ones."""

    g: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None
    out: Tensor
    lse: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]


def _backward(into: Gradients, given: _Given, at: Geometry, halo: Halo) -> None:
    def compute(part: Part, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor) -> None:
        here = Gradients(_queries(into.q, part, halo), dk, dv, into.table)
        g, q, out, lse = (_queries(t, part, halo) for t in (given.g, given.q, given.out, given.lse))
        blocks.backward_into(here, g, q, k, v, given.table, out, lse, _moved(at, part, halo))

    of_keys, of_values = ([into.k.new_zeros(t.shape) for t in sides] for sides in (given.keys, given.values))
    for part in halo.ends:
        k, v = _slab(given.k, given.keys, part, halo), _slab(given.v, given.values, part, halo)
        dk, dv = into.k.new_zeros(k.shape), into.v.new_zeros(v.shape)
        compute(part, k, v, dk, dv)
        _add_slab(dk, into.k, of_keys, part, halo)
        _add_slab(dv, into.v, of_values, part, halo)
    home = [torch.cat(sides, halo.dim).to(given.k.dtype) for sides in (of_keys, of_values)]
    back = start_return(home, halo.dim, halo.sizes, halo.foreign, halo.group, wait=halo.inner is None)
    if halo.inner is not None:
        compute(halo.inner, given.k, given.v, into.k, into.v)
    back.add_to([into.k, into.v])


def _again(
    g: Tensor, tensors: Sequence[Any], needed: Sequence[bool], at: Geometry, halo: Halo
) -> tuple[Tensor | None, ...]:
    """For second derivatives: the same of differentiable parts."""
    q, k, v, table = tensors
    journey = (halo.dim, halo.sizes, halo.wanted, halo.group)
    at = _starting(at, halo.dim, halo.own[0], halo.sees[0])
    dq, dk, dv, dtable = gradients_differentiably(g, (q, *fetch_each((k, v), *journey), table), needed, at)
    return dq, None if dk is None else send_home(dk, *journey), None if dv is None else send_home(dv, *journey), dtable


# ---------------------------------------------------------------------- rows
def _queries(t: Tensor, part: Part, halo: Halo) -> Tensor:
    lo, hi = part.queries
    return t.narrow(halo.dim, lo - halo.own[0], hi - lo)


def _moved(at: Geometry, part: Part, halo: Halo) -> Geometry:
    return _starting(at, halo.dim, part.queries[0], part.keys[0])


def _starting(at: Geometry, dim: int, q_start: int, k_start: int) -> Geometry:
    def put(starts: tuple[int, ...], start: int) -> tuple[int, ...]:
        return (*starts[: dim - 1], start, *starts[dim:])

    return replace(at, q_start=put(at.q_start, q_start), k_start=put(at.k_start, k_start))


def _sides(pieces: Sequence[Tensor], like: Tensor, halo: Halo) -> tuple[Tensor, Tensor]:
    """Borrowed rows before and after the own ones."""
    before, after = parted(pieces, halo.dim, halo.own[0] - halo.sees[0])
    return joined(before, like, halo.dim), joined(after, like, halo.dim)


def _slab(own: Tensor, sides: Sequence[Tensor], part: Part, halo: Halo) -> Tensor:
    """The keys, or values, that the queries of a part see."""
    return joined([rows for _, rows in _within(part.keys, own, sides, halo)], own, halo.dim)


def _add_slab(slab: Tensor, own: Tensor, sides: Sequence[Tensor], part: Part, halo: Halo) -> None:
    """Add the rows of a slab where they come from."""
    for (lo, hi), rows in _within(part.keys, own, sides, halo):
        rows.add_(slab.narrow(halo.dim, lo - part.keys[0], hi - lo))


def _within(interval: Interval, own: Tensor, sides: Sequence[Tensor], halo: Halo) -> Iterator[tuple[Interval, Tensor]]:
    """The rows of an interval, own and borrowed ones, and where they lie."""
    first, last = halo.own
    before, after = (s.shape[halo.dim] for s in sides)
    places = ((first - before, first), (first, last), (last, last + after))
    for place, rows in zip(places, (sides[0], own, sides[1]), strict=True):
        if o := overlap(place, interval):
            yield o, rows.narrow(halo.dim, o[0] - place[0], o[1] - o[0])
