"""The only place that communicates: plain tensors in, plain tensors out, a group by its name.

All sizes may differ per rank, and each of them is known to every rank beforehand. A group of one never communicates,
nor does a call that would move nothing anywhere: both are decided from sizes that all ranks share.
Data moves as bytes, so every dtype works on every backend.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, ProcessGroup

from dpzoo.shard import one_shot, traffic
from dpzoo.shard.all_reduce import PendingReduction, all_reduce, start_all_reduce_
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, starts
from dpzoo.shard.process_groups import device_of, group_of, group_rank, group_size
from dpzoo.shard.tracing import is_tracing, traceable

__all__ = ["PendingReduction", "all_reduce", "device_of", "group_size", "start_all_reduce_"]  # and what is defined here

# Calls go to the process group itself: torch's functions around it cost as much as a small message.
_GATHER_NOW, _EXCHANGE_NOW, _EXCHANGE_LATER = AllgatherOptions(), AllToAllOptions(), AllToAllOptions()
_GATHER_NOW.asyncOp = _EXCHANGE_NOW.asyncOp = False
_EXCHANGE_LATER.asyncOp = True


# ---------------------------------------------------------------------- movement
def _bytes(t: Tensor) -> Tensor:
    if t.is_complex() or t.is_neg():
        t = t.resolve_conj().resolve_neg()  # the bytes of a lazy conjugate are those of its base
    t = t.detach().contiguous()
    # as_strided: it may keep an odd stride where a dim has size 0 or 1, which a dtype view refuses.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def start_transport(
    sends: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor, group: str, wait: bool = False
) -> "PendingParts":
    """Start sending `sends[r]` (pieces) to rank r and receiving `lengths[r]` elements from rank r.

    Args:
        wait: come back when all is done. Either way the other ranks may do as they like.
    """
    flat = [_bytes(p) for to in sends for p in to]
    in_splits = [sum(p.nbytes for p in to) for to in sends]
    item = like.element_size()
    out_splits = [n * item for n in lengths]
    sent = (
        torch.cat(flat) if len(flat) > 1 else flat[0] if flat else torch.empty(0, dtype=torch.uint8, device=like.device)
    )
    received = torch.empty(sum(lengths), dtype=like.dtype, device=like.device)
    traffic.note(sent.numel())
    options = _EXCHANGE_NOW if wait else _EXCHANGE_LATER
    work = group_of(group).alltoall_base(received.view(torch.uint8), sent, out_splits, in_splits, options)
    if wait and work is not None:
        work.wait()
    return PendingParts(None if wait else work, sent, list(received.split(list(lengths))))


class PendingParts:
    """An exchange under way; `wait()` gives what each rank sent, flat."""

    def __init__(self, work: dist.Work | None, sent: Tensor, parts: list[Tensor]) -> None:
        self._work, self._sent, self._parts = work, sent, parts

    def wait(self) -> list[Tensor]:
        """Block until it is done."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._parts


def _transport(sends: list[list[Tensor]], lengths: Sequence[int], like: Tensor, group: str) -> list[Tensor]:
    return start_transport(sends, lengths, like, group, wait=True).wait()


@traceable(lambda t, dim, sizes, group: with_size(t.shape, dim, sum(sizes)))
def all_gather_v(t: Tensor, dim: int, sizes: Sizes, group: str) -> Tensor:
    """The whole of `dim` on every rank. Shards are padded to the longest where the backend wants equal lengths."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    if _in_equal_blocks(t, dim, sizes):
        return _gathered_blocks(t, dim, pg)
    longest, row = max(sizes), row_numel(t, dim)
    if longest * row == 0:
        return t.new_empty(with_size(t.shape, dim, sum(sizes)))
    if t.dtype.itemsize == 1 and t.dtype.is_floating_point:  # torch.cat refuses them under autocast
        return all_gather_v(t.contiguous().view(torch.uint8), dim, sizes, group).view(t.dtype)
    flat = _bytes(t)
    per = longest * row * t.element_size()
    if flat.numel() != per:
        flat = torch.cat([flat, flat.new_empty(per - flat.numel())])
    n = pg.size()
    out = t.new_empty((n, longest * row))
    _gather_equal(flat, out.view(torch.uint8), pg)
    if min(sizes) == longest:
        if math.prod(t.shape[:dim]) == 1:  # it lies in memory as it should
            return out.view(with_size(t.shape, dim, n * longest))
        rows = out.view(n, *t.shape).unbind(0)
        return torch.cat(rows, dim)
    return torch.cat([out[r, : k * row].view(with_size(t.shape, dim, k)) for r, k in enumerate(sizes)], dim)


def _in_equal_blocks(t: Tensor, dim: int, sizes: Sizes) -> bool:
    """Does each rank's part of `dim` lie in one piece, as long as the others', in a dtype that every backend takes?"""
    return (
        t.dtype in _AS_THEY_ARE
        and sizes.count(sizes[0]) == len(sizes)
        and math.prod(t.shape[:dim]) == 1
        and t.numel() > 0
        and not t.is_neg()
    )


_AS_THEY_ARE = frozenset((torch.float32, torch.float64))


def _gathered_blocks(t: Tensor, dim: int, pg: ProcessGroup) -> Tensor:
    """All blocks as they arrive: nothing is packed, padded or copied."""
    n = pg.size()
    flat = t.detach().contiguous().view(-1)
    out = flat.new_empty((n, flat.numel()))
    _gather_equal(flat, out, pg)
    return out.view(with_size(t.shape, dim, n * t.shape[dim]))


def _gather_equal(mine: Tensor, out: Tensor, pg: ProcessGroup) -> None:
    """Fill `out` (n, numel) with what each rank has as `mine` (numel,)."""
    traffic.note(mine.nbytes)
    if one_shot.serves(mine.nbytes, mine.device, pg):
        one_shot.start_gather(mine.view(torch.uint8), out.view(torch.uint8), pg, wait=True)
        return
    work = pg._allgather_base(out.view(-1), mine, _GATHER_NOW)
    if work is not None:
        work.wait()


@traceable(lambda *call: _all_to_all_shape(*call))
def all_to_all_v(t: Tensor, split_dim: int, split_sizes: Sizes, cat_dim: int, cat_sizes: Sizes, group: str) -> Tensor:
    """Move the cut from `cat_dim` to `split_dim`: rank r keeps its part of `split_dim` and all of `cat_dim`."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    me = pg.rank()
    parts = t.split(split_sizes, split_dim)
    shape = with_size(t.shape, split_dim, split_sizes[me])
    row = math.prod(shape[:cat_dim]) * math.prod(shape[cat_dim + 1 :])
    lengths = [n * row if r != me else 0 for r, n in enumerate(cat_sizes)]
    sends = [[p] if r != me else [] for r, p in enumerate(parts)]
    received = _transport(sends, lengths, t, group)
    pieces = [parts[me] if r == me else received[r].view(with_size(shape, cat_dim, n)) for r, n in enumerate(cat_sizes)]
    return torch.cat(pieces, cat_dim)


@traceable(lambda t, dim, sizes, group, op: with_size(t.shape, dim, sizes[group_rank(group)]))
def reduce_scatter_v(t: Tensor, dim: int, sizes: Sizes, group: str, op: str = "sum") -> Tensor:
    """Reduce over the group and keep this rank's piece of `dim`."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    if op not in ("sum", "avg") or t.dtype is torch.bool:
        return all_reduce(t, group, op).narrow(dim, starts(sizes)[pg.rank()], sizes[pg.rank()]).contiguous()
    me = pg.rank()
    if op == "sum" and _in_equal_blocks(t, dim, sizes):
        return _summed_blocks(t, dim, pg)
    parts = t.split(sizes, dim)
    mine = parts[me]
    received = _transport(
        [[p] if r != me else [] for r, p in enumerate(parts)],
        [mine.numel() if r != me else 0 for r in range(pg.size())],
        t,
        group,
    )
    pieces = [mine if r == me else received[r].view(mine.shape) for r in range(pg.size())]
    if t.dtype in (torch.float16, torch.bfloat16):
        pieces[0] = pieces[0].float()
    total = pieces[0] + pieces[1]  # in rank order, so that the sum does not depend on who adds it
    for piece in pieces[2:]:
        total += piece
    return (total / pg.size() if op == "avg" else total).to(t.dtype)


def _summed_blocks(t: Tensor, dim: int, pg: ProcessGroup) -> Tensor:
    """Block r of every rank, added up on rank r; one message that is neither packed nor taken apart."""
    n, sent = pg.size(), t.detach().contiguous()
    received = sent.new_empty((n, *with_size(t.shape, dim, t.shape[dim] // n)))
    traffic.note(sent.nbytes // n * (n - 1))
    work = pg.alltoall_base(received, sent.view(received.shape), [], [], _EXCHANGE_NOW)
    if work is not None:
        work.wait()
    return received.sum(0)


@traceable(lambda t, *_: t.shape)
def broadcast(t: Tensor, source: int, group: str) -> Tensor:
    """The tensor of group rank `source` on every rank; `t` gives shape and dtype elsewhere."""
    pg = group_of(group)
    if pg.size() == 1 or t.numel() == 0:
        return t
    flat = _bytes(t).clone()
    traffic.note(flat.numel() if pg.rank() == source else 0)
    dist.broadcast(flat, group=pg, group_src=source)
    return flat.view(t.dtype).view(t.shape)


def send(t: Tensor, to: int, device: torch.device) -> None:
    """Send a tensor to a global rank, staged on `device`; blocks until it has left."""
    dist.send(_bytes(t.detach().to(device)), dst=to)


def receive(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
    """What the global rank `source` sends."""
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.recv(_bytes(received), src=source)
    return received


@traceable(lambda t, shape, *_: shape)
def shifted(t: Tensor, shape: Sequence[int], group: str, step: int = 1) -> Tensor:
    """`shift`, waited for."""
    return shift(t, shape, group, step).wait()


def shift(t: Tensor, shape: Sequence[int], group: str, step: int = 1) -> "PendingShift":
    """Start sending `t` to rank + step and receiving a tensor of `shape` from rank - step (both modulo the group)."""
    if is_tracing():
        return PendingShift(shifted(t, tuple(shape), group, step), [], [])
    pg = group_of(group)
    n, me = pg.size(), pg.rank()
    received = torch.empty(tuple(shape), dtype=t.dtype, device=t.device)
    ops = []
    to, source = dist.get_global_rank(pg, (me + step) % n), dist.get_global_rank(pg, (me - step) % n)
    traffic.note(t.nbytes)
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


def gather_objects(value: Any, group: str) -> list[Any]:
    """One picklable value of every rank, in group order. Slow: for checks and set-up only."""
    pg = group_of(group)
    found: list[Any] = [None] * pg.size()
    dist.all_gather_object(found, value, group=pg)
    return found


def gather_over_mesh(value: Any, layout: MeshLayout) -> list[Any]:
    """One picklable value of every rank of a mesh, in the order of `layout.ranks`; an exchange per axis."""
    found = [value]
    for axis in reversed(layout.axes):  # the last axis first, so that the first ends up outermost
        if layout.shape[axis] > 1:
            found = [v for part in gather_objects(found, layout.groups[axis]) for v in part]
    return found


# ---------------------------------------------------------------------- integers
def with_size(shape: Sequence[int], dim: int, n: int) -> list[int]:
    """`shape` with another size of one dim."""
    return [*shape[:dim], n, *shape[dim + 1 :]]


def _all_to_all_shape(
    t: Tensor, split_dim: int, split_sizes: Sizes, cat_dim: int, cat_sizes: Sizes, group: str
) -> list[int]:
    return with_size(with_size(t.shape, split_dim, split_sizes[group_rank(group)]), cat_dim, sum(cat_sizes))


def row_numel(t: Tensor, dim: int) -> int:
    """Number of elements of one row of `dim`."""
    return math.prod(t.shape[:dim]) * math.prod(t.shape[dim + 1 :])
