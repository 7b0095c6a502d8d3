"""Rows of a cut dim change hands: any global intervals go to any rank, and their gradients go home.

Both ways can be started and waited for later, so that a rank computes while rows travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpzoo.shard.collectives import PendingParts, group_rank, start_transport
from dpzoo.shard.partition import Interval, Sizes, overlap, own_intervals, row_numel, with_size
from dpzoo.shard.tracing import traceable

Wanted = tuple[tuple[Interval, ...], ...]  # per rank: the intervals it wants, in order


@traceable(lambda *call: _exchanged_shape(*call))
def exchange(
    t: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str, pad: tuple[int, int] = (0, 0), fill: float = 0.0
) -> Tensor:
    """Rank r receives the concatenation of the global intervals `wanted[r]` of `dim`, wherever they live.

    Args:
        t: this rank's shard; `sizes` says how `dim` is cut over the group.
        wanted: per rank its intervals, inside `[0, sum(sizes))`; known to all ranks.
        pad, fill: rows of a constant to put before and after, on this rank.
    """
    if _is_own(wanted, sizes):
        return joined([t], t, dim, pad, fill)
    return joined(start_exchange([t], dim, sizes, wanted, group, wait=True).wait()[0], t, dim, pad, fill)


def exchange_each(ts: Sequence[Tensor], dim: int, sizes: Sizes, wanted: Wanted, group: str) -> list[Tensor]:
    """`exchange` of several tensors of one dtype, cut alike, in one message to each rank; not to be traced."""
    if _is_own(wanted, sizes):
        return list(ts)
    pieces = start_exchange(ts, dim, sizes, wanted, group, wait=True).wait()
    return [joined(of_one, t, dim) for of_one, t in zip(pieces, ts, strict=True)]


def start_exchange(
    ts: Sequence[Tensor], dim: int, sizes: Sizes, wanted: Wanted, group: str, wait: bool = False
) -> PendingRows:
    """Start an exchange of tensors of one dtype, cut alike; nothing is sent where nobody wants rows of another rank."""
    own, me = own_intervals(sizes), group_rank(group)
    sends = [
        [_rows(t, dim, o, own[me]) for t in ts for w in wanted[r] if (o := overlap(own[me], w))] if r != me else []
        for r in range(len(own))
    ]
    row = sum(row_numel(t.shape, dim) for t in ts)
    lengths = [_common(own[r], wanted[me]) * row if r != me else 0 for r in range(len(own))]
    parts = start_transport(sends, lengths, ts[0], group, wait) if _any_traffic(own, wanted) else None
    return PendingRows(parts, ts, dim, own, wanted[me], me)


class PendingRows:
    """Rows on their way; `wait()` gives them in pieces, in order: views of the shards, and what arrived."""

    def __init__(
        self,
        parts: PendingParts | None,
        ts: Sequence[Tensor],
        dim: int,
        own: tuple[Interval, ...],
        wanted: Sequence[Interval],
        me: int,
    ) -> None:
        self._parts, self._ts, self._dim, self._own, self._wanted, self._me = parts, ts, dim, own, wanted, me

    def wait(self) -> list[list[Tensor]]:
        """Block until they are here; the pieces of each tensor."""
        received = self._parts.wait() if self._parts is not None else [self._ts[0].new_empty(0)] * len(self._own)
        at = [0] * len(self._own)
        return [self._pieces(t, received, at) for t in self._ts]

    def _pieces(self, t: Tensor, received: Sequence[Tensor], at: list[int]) -> list[Tensor]:
        dim, own = self._dim, self._own
        row, pieces = row_numel(t.shape, dim), []
        for w in self._wanted:
            for r in range(len(own)):
                o = overlap(own[r], w)
                if o is None:
                    continue
                if r == self._me:
                    pieces.append(_rows(t, dim, o, own[r]))
                else:
                    n = (o[1] - o[0]) * row
                    pieces.append(received[r].narrow(0, at[r], n).view(with_size(t.shape, dim, o[1] - o[0])))
                    at[r] += n
        return pieces


def parted(pieces: Sequence[Tensor], dim: int, rows: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The pieces that hold the first `rows` rows together, and the others."""
    count = 0
    while rows > 0:
        rows -= pieces[count].shape[dim]
        count += 1
    return pieces[:count], pieces[count:]


def joined(
    pieces: Sequence[Tensor], like: Tensor, dim: int, pad: tuple[int, int] = (0, 0), fill: float = 0.0
) -> Tensor:
    """Join pieces, with rows of a constant around them, in the memory order of `like`; a lone piece is handed on."""
    before, after = (like.new_full(with_size(like.shape, dim, n), fill) if n else None for n in pad)
    parts = [*([before] if before is not None else []), *pieces, *([after] if after is not None else [])]
    if not parts:
        return like.new_empty(with_size(like.shape, dim, 0))
    if _is_row_major(like):
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if len(parts) == 1 and pieces and parts[0].stride() == like.stride():
        return parts[0]
    out, at = _empty_like_order(with_size(like.shape, dim, sum(p.shape[dim] for p in parts)), like), 0
    for p in parts:
        out.narrow(dim, at, p.shape[dim]).copy_(p)
        at += p.shape[dim]
    return out


def _is_row_major(t: Tensor) -> bool:
    """True unless the dims lie in memory in another order (channels_last); what arrives is always row-major."""
    strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1]
    return 0 in strides or strides == sorted(strides, reverse=True)


def _empty_like_order(shape: Sequence[int], like: Tensor) -> Tensor:
    """A dense tensor whose dims lie in memory as those of `like`."""
    strides = like.stride()
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    return like.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


@traceable(lambda g, dim, sizes, wanted, group: with_size(g.shape, dim, sizes[group_rank(group)]))
def exchange_back(g: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Tensor:
    """The transpose of `exchange`: each piece of `g` goes home and is added there."""
    return exchange_back_each([g], dim, sizes, wanted, group)[0]


def exchange_back_each(gs: Sequence[Tensor], dim: int, sizes: Sizes, wanted: Wanted, group: str) -> list[Tensor]:
    """The transpose of `exchange_each`."""
    me = group_rank(group)
    own = own_intervals(sizes)[me]
    home = start_return(gs, dim, sizes, wanted, group, wait=True)
    out = [_own_rows(g, dim, own, wanted[me]) for g in gs]
    home.add_to(out)
    return out


def _own_rows(g: Tensor, dim: int, own: Interval, wanted: Sequence[Interval]) -> Tensor:
    """What `g`, rows `wanted`, holds of the rows `own`: in memory of its own, 0 where it has none."""
    shape = with_size(g.shape, dim, own[1] - own[0])
    out = g.new_empty(shape) if _is_row_major(g) else _empty_like_order(shape, g)
    found, base = [], 0
    for w in wanted:
        if o := overlap(own, w):
            found.append((o, g.narrow(dim, base + o[0] - w[0], o[1] - o[0])))
        base += w[1] - w[0]
    if [o for o, _ in found] == [own]:
        return out.copy_(found[0][1])
    out.zero_()
    for o, rows in found:
        _rows(out, dim, o, own).add_(rows)
    return out


def start_return(
    gs: Sequence[Tensor], dim: int, sizes: Sizes, wanted: Wanted, group: str, wait: bool = False
) -> PendingReturn:
    """Start sending home the rows of each of `gs` that belong to other ranks (rows `wanted[me]`, in order)."""
    own, me = own_intervals(sizes), group_rank(group)
    sends: list[list[Tensor]] = [[] for _ in own]
    for g in gs:
        base = 0
        for w in wanted[me]:
            for r in range(len(own)):
                o = overlap(own[r], w) if r != me else None
                if o is not None:
                    sends[r].append(g.narrow(dim, base + o[0] - w[0], o[1] - o[0]))
            base += w[1] - w[0]
    row = sum(row_numel(g.shape, dim) for g in gs)
    lengths = [_common(own[me], wanted[r]) * row if r != me else 0 for r in range(len(own))]
    parts = start_transport(sends, lengths, gs[0], group, wait) if _any_traffic(own, wanted) else None
    return PendingReturn(parts, dim, own, wanted, me)


class PendingReturn:
    """Gradients on their way home."""

    def __init__(
        self, parts: PendingParts | None, dim: int, own: tuple[Interval, ...], wanted: Wanted, me: int
    ) -> None:
        self._parts, self._dim, self._own, self._wanted, self._me = parts, dim, own, wanted, me

    def add_to(self, outs: Sequence[Tensor]) -> None:
        """Wait, and add what other ranks sent to this rank's rows of each tensor."""
        if self._parts is None:
            return
        own, dim = self._own[self._me], self._dim
        for r, received in enumerate(self._parts.wait()):
            at = 0
            for out in outs if r != self._me else ():
                for w in self._wanted[r]:
                    if o := overlap(own, w):
                        n = (o[1] - o[0]) * row_numel(out.shape, dim)
                        rows = received.narrow(0, at, n).view(with_size(out.shape, dim, o[1] - o[0]))
                        _rows(out, dim, o, own).add_(rows)
                        at += n


# ---------------------------------------------------------------------- integers
def foreign(wanted: Wanted, sizes: Sizes) -> Wanted:
    """What each rank wants of others: its intervals without the rows that it has."""
    return tuple(
        tuple(part for w in mine for part in ((w[0], min(w[1], o[0])), (max(w[0], o[1]), w[1])) if part[0] < part[1])
        for mine, o in zip(wanted, own_intervals(sizes), strict=True)
    )


def _is_own(wanted: Wanted, sizes: Sizes) -> bool:
    """Does every rank want just what it has?"""
    return all(w == (o,) for w, o in zip(wanted, own_intervals(sizes), strict=True))


def _exchanged_shape(
    t: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str, pad: tuple[int, int], fill: float
) -> list[int]:
    return with_size(t.shape, dim, sum(pad) + sum(hi - lo for lo, hi in wanted[group_rank(group)]))


def _rows(t: Tensor, dim: int, interval: Interval, own: Interval) -> Tensor:
    return t.narrow(dim, interval[0] - own[0], interval[1] - interval[0])


def _common(own: Interval, wanted: tuple[Interval, ...]) -> int:
    return sum(o[1] - o[0] for w in wanted if (o := overlap(own, w)))


def _any_traffic(own: tuple[Interval, ...], wanted: Wanted) -> bool:
    return any(_common(own[s], wanted[r]) for r in range(len(own)) for s in range(len(own)) if s != r)
