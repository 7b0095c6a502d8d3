"""The only place that communicates: plain tensors in, plain tensors out, a group by its name.

All sizes may differ per rank, and each of them is known to every rank beforehand. A group of one never communicates,
nor does a call that would move nothing anywhere: both are decided from sizes that all ranks share.
Data moves as bytes, so every dtype works on every backend.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, _resolve_process_group

from dpzoo.shard.partition import Interval, Sizes, overlap, own_intervals, starts

Wanted = tuple[tuple[Interval, ...], ...]  # per rank: the intervals it wants, in order

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def group_of(name: str) -> ProcessGroup:
    """The process group with this name."""
    return _resolve_process_group(name)


def group_size(name: str) -> int:
    """Number of ranks of the group."""
    return group_of(name).size()


def group_rank(name: str) -> int:
    """This rank's number inside the group."""
    return group_of(name).rank()


# ---------------------------------------------------------------------- reductions
def all_reduce(t: Tensor, group: str, op: str = "sum") -> Tensor:
    """A new tensor holding the reduction over the group, the same bits on every rank."""
    pg = group_of(group)
    if pg.size() == 1 or t.numel() == 0:
        return t
    if op == "avg":
        return all_reduce(t, group, "sum") / pg.size()
    if t.dtype is torch.bool:
        return all_reduce(t.to(torch.uint8), group, {"sum": "max", "product": "min"}.get(op, op)).to(torch.bool)
    out = t.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(torch.view_as_real(out) if out.is_complex() else out, _OPS[op], group=pg)
    return out


def all_reduce_async_(flat: Tensor, group: str) -> dist.Work:
    """Start summing `flat` in place over the group; wait on what comes back before reading it."""
    work = dist.all_reduce(
        torch.view_as_real(flat) if flat.is_complex() else flat, group=group_of(group), async_op=True
    )
    assert work is not None
    return work


# ---------------------------------------------------------------------- movement
def _bytes(t: Tensor) -> Tensor:
    t = t.detach().contiguous()  # may keep an odd stride where a dim has size 0 or 1, which a dtype view refuses
    return t.as_strided((t.numel(),), (1,), t.storage_offset()).view(torch.uint8)


def _transport(sends: list[list[Tensor]], lengths: Sequence[int], like: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Send `sends[r]` (pieces) to rank r; receive `lengths[r]` elements from rank r, flat."""
    item = like.element_size()
    pieces = [[_bytes(p) for p in to] for to in sends]
    in_splits = [sum(p.numel() for p in to) for to in pieces]
    out_splits = [n * item for n in lengths]
    flat = [p for to in pieces for p in to]
    sent = (
        torch.cat(flat) if len(flat) > 1 else flat[0] if flat else torch.empty(0, dtype=torch.uint8, device=like.device)
    )
    received = torch.empty(sum(out_splits), dtype=torch.uint8, device=like.device)
    dist.all_to_all_single(received, sent, out_splits, in_splits, group=group)
    return [part.view(like.dtype) for part in received.split(out_splits)]


def exchange(t: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Tensor:
    """Rank r receives the concatenation of the global intervals `wanted[r]` of `dim`, wherever they live.

    Args:
        t: this rank's shard; `sizes` says how `dim` is cut over the group.
        wanted: per rank its intervals, inside `[0, sum(sizes))`; known to all ranks.
    """
    pg = group_of(group)
    own, me = own_intervals(sizes), pg.rank()
    if all(w == (o,) for w, o in zip(wanted, own, strict=True)):
        return t
    sends = [
        [_rows(t, dim, o, own[me]) for w in wanted[r] if (o := overlap(own[me], w))] if r != me else []
        for r in range(len(own))
    ]
    row = _row_numel(t, dim)
    lengths = [_common(own[r], wanted[me]) * row if r != me else 0 for r in range(len(own))]
    received = _transport(sends, lengths, t, pg) if _any_traffic(own, wanted) else [t.new_empty(0)] * len(own)
    at, pieces = [0] * len(own), []
    for w in wanted[me]:
        for r in range(len(own)):
            o = overlap(own[r], w)
            if o is None:
                continue
            if r == me:
                pieces.append(_rows(t, dim, o, own[me]))
            else:
                n = (o[1] - o[0]) * row
                pieces.append(received[r].narrow(0, at[r], n).view(_with(t.shape, dim, o[1] - o[0])))
                at[r] += n
    if not pieces:
        return t.new_empty(_with(t.shape, dim, 0))
    return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, dim)


def exchange_back(g: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Tensor:
    """The transpose of `exchange`: each piece of `g` goes home and is added there."""
    pg = group_of(group)
    own, me = own_intervals(sizes), pg.rank()
    row = _row_numel(g, dim)
    out = g.new_zeros(_with(g.shape, dim, sizes[me]))
    sends: list[list[Tensor]] = [[] for _ in own]
    base = 0
    for w in wanted[me]:
        for r in range(len(own)):
            o = overlap(own[r], w)
            if o is None:
                continue
            piece = g.narrow(dim, base + o[0] - w[0], o[1] - o[0])
            if r == me:
                _rows(out, dim, o, own[me]).add_(piece)
            else:
                sends[r].append(piece)
        base += w[1] - w[0]
    lengths = [_common(own[me], wanted[r]) * row if r != me else 0 for r in range(len(own))]
    if not _any_traffic(own, wanted):
        return out
    received = _transport(sends, lengths, g, pg)
    for r in range(len(own)):
        at = 0
        for w in wanted[r] if r != me else ():
            if o := overlap(own[me], w):
                n = (o[1] - o[0]) * row
                _rows(out, dim, o, own[me]).add_(received[r].narrow(0, at, n).view(_with(g.shape, dim, o[1] - o[0])))
                at += n
    return out


def all_gather_v(t: Tensor, dim: int, sizes: Sizes, group: str) -> Tensor:
    """The whole of `dim` on every rank. Shards are padded to the longest where the backend wants equal lengths."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    longest, row = max(sizes), _row_numel(t, dim)
    if longest * row == 0:
        return t.new_empty(_with(t.shape, dim, sum(sizes)))
    flat = _bytes(t)
    per = longest * row * t.element_size()
    if flat.numel() != per:
        flat = torch.cat([flat, flat.new_empty(per - flat.numel())])
    out = torch.empty(per * pg.size(), dtype=torch.uint8, device=t.device)
    dist.all_gather_into_tensor(out, flat, group=pg)
    item = t.element_size() * row
    parts = [out.narrow(0, r * per, n * item).view(t.dtype).view(_with(t.shape, dim, n)) for r, n in enumerate(sizes)]
    return torch.cat(parts, dim)


def all_to_all_v(t: Tensor, split_dim: int, split_sizes: Sizes, cat_dim: int, cat_sizes: Sizes, group: str) -> Tensor:
    """Move the cut from `cat_dim` to `split_dim`: rank r keeps its part of `split_dim` and all of `cat_dim`."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    me = pg.rank()
    parts = t.split(split_sizes, split_dim)
    shape = _with(t.shape, split_dim, split_sizes[me])
    row = math.prod(shape[:cat_dim]) * math.prod(shape[cat_dim + 1 :])
    lengths = [n * row if r != me else 0 for r, n in enumerate(cat_sizes)]
    sends = [[p] if r != me else [] for r, p in enumerate(parts)]
    received = _transport(sends, lengths, t, pg)
    pieces = [parts[me] if r == me else received[r].view(_with(shape, cat_dim, n)) for r, n in enumerate(cat_sizes)]
    return torch.cat(pieces, cat_dim)


def reduce_scatter_v(t: Tensor, dim: int, sizes: Sizes, group: str, op: str = "sum") -> Tensor:
    """Reduce over the group and keep this rank's piece of `dim`."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    if op not in ("sum", "avg") or t.dtype is torch.bool:
        return all_reduce(t, group, op).narrow(dim, starts(sizes)[pg.rank()], sizes[pg.rank()]).contiguous()
    me = pg.rank()
    parts = t.split(sizes, dim)
    mine = parts[me]
    received = _transport(
        [[p] if r != me else [] for r, p in enumerate(parts)],
        [mine.numel() if r != me else 0 for r in range(pg.size())],
        t,
        pg,
    )
    total: Tensor | None = None
    for r in range(pg.size()):  # rank order, so that the sum does not depend on who adds it
        piece = mine if r == me else received[r].view(mine.shape)
        total = piece.clone() if total is None else total.add_(piece)
    assert total is not None
    return total / pg.size() if op == "avg" else total


def broadcast(t: Tensor, source: int, group: str) -> Tensor:
    """The tensor of group rank `source` on every rank; `t` gives shape and dtype elsewhere."""
    pg = group_of(group)
    if pg.size() == 1 or t.numel() == 0:
        return t
    flat = _bytes(t).clone()
    dist.broadcast(flat, group=pg, group_src=source)
    return flat.view(t.dtype).view(t.shape)


def scatter_v(
    t: Tensor | None,
    dim: int,
    sizes: Sizes,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str,
    source: int,
    group: str,
) -> Tensor:
    """Group rank `source` holds the whole of `shape` and sends each rank its piece of `dim`; nobody else holds more."""
    pg = group_of(group)
    me = pg.rank()
    if me == source:
        assert t is not None
        parts = t.split(sizes, dim)
        for r, part in enumerate(parts):
            if r != me and part.numel():
                dist.send(_bytes(part), group=pg, group_dst=r)
        return parts[me].contiguous()
    received = torch.empty(_with(shape, dim, sizes[me]), dtype=dtype, device=device)
    if received.numel():
        dist.recv(received.view(-1).view(torch.uint8), group=pg, group_src=source)
    return received


def shift(t: Tensor, shape: Sequence[int], group: str, step: int = 1) -> "PendingShift":
    """Start sending `t` to rank + step and receiving a tensor of `shape` from rank - step (both modulo the group)."""
    pg = group_of(group)
    n, me = pg.size(), pg.rank()
    received = torch.empty(tuple(shape), dtype=t.dtype, device=t.device)
    ops = []
    to, source = dist.get_global_rank(pg, (me + step) % n), dist.get_global_rank(pg, (me - step) % n)
    if t.numel():
        ops.append(dist.P2POp(dist.isend, _bytes(t), to, pg))
    if received.numel():
        ops.append(dist.P2POp(dist.irecv, received.view(-1).view(torch.uint8), source, pg))
    return PendingShift(received, dist.batch_isend_irecv(ops) if ops else [], [op.tensor for op in ops])


class PendingShift:
    """A ring step under way; `wait()` gives the received tensor."""

    def __init__(self, received: Tensor, works: list[dist.Work], keep: list[Tensor]) -> None:
        self._received, self._works, self._keep = received, works, keep

    def wait(self) -> Tensor:
        """Block until both directions are done."""
        for work in self._works:
            work.wait()
        return self._received


def gather_objects(value: object, group: str) -> list[object]:
    """One picklable value of every rank, in group order. Slow: for checks and set-up only."""
    pg = group_of(group)
    found: list[object] = [None] * pg.size()
    dist.all_gather_object(found, value, group=pg)
    return found


# ---------------------------------------------------------------------- integers
def _with(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [*shape[:dim], n, *shape[dim + 1 :]]


def _row_numel(t: Tensor, dim: int) -> int:
    return math.prod(t.shape[:dim]) * math.prod(t.shape[dim + 1 :])


def _rows(t: Tensor, dim: int, interval: Interval, own: Interval) -> Tensor:
    return t.narrow(dim, interval[0] - own[0], interval[1] - interval[0])


def _common(own: Interval, wanted: tuple[Interval, ...]) -> int:
    return sum(o[1] - o[0] for w in wanted if (o := overlap(own, w)))


def _any_traffic(own: tuple[Interval, ...], wanted: Wanted) -> bool:
    return any(_common(own[s], wanted[r]) for r in range(len(own)) for s in range(len(own)) if s != r)
