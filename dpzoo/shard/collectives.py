"""The only place that communicates: plain tensors in, plain tensors out, a group by its name.

All sizes may differ per rank, and each of them is known to every rank beforehand. A group of one never communicates,
nor does a call that would move nothing anywhere: both are decided from sizes that all ranks share.
Data moves as bytes, so every dtype works on every backend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from dpzoo.shard import traffic
from dpzoo.shard.all_gather import PendingGather, all_gather_v, equal_blocks, start_all_gather_v
from dpzoo.shard.all_reduce import PendingReduction, all_reduce, start_all_reduce_
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.one_machine import mail_of
from dpzoo.shard.partition import Sizes, starts, with_size
from dpzoo.shard.process_groups import device_of, group_of, group_rank, group_size
from dpzoo.shard.tracing import is_tracing, traceable
from dpzoo.shard.wire import PendingParts, bytes_of, start_all_to_all, start_parts

__all__ = [  # and what is defined here
    "PendingGather",
    "PendingReduction",
    "all_gather_v",
    "all_reduce",
    "device_of",
    "group_size",
    "start_all_gather_v",
    "start_all_reduce_",
]


# ---------------------------------------------------------------------- movement
def start_transport(
    sends: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor, group: str, wait: bool = False
) -> PendingParts:
    """Start sending `sends[r]` (pieces) to rank r and receiving `lengths[r]` elements from rank r.

    Args:
        wait: come back when all is done. Either way the other ranks may do as they like.
    """
    traffic.note(sum(p.nbytes for to in sends for p in to))
    return start_parts(sends, lengths, like, group_of(group), wait)


def _transport(sends: list[list[Tensor]], lengths: Sequence[int], like: Tensor, group: str) -> list[Tensor]:
    return start_transport(sends, lengths, like, group, wait=True).wait()


@traceable(lambda *call: _all_to_all_shape(*call))
def all_to_all_v(t: Tensor, split_dim: int, split_sizes: Sizes, cat_dim: int, cat_sizes: Sizes, group: str) -> Tensor:
    """Move the cut from `cat_dim` to `split_dim`: rank r keeps its part of `split_dim` and all of `cat_dim`."""
    pg = group_of(group)
    if pg.size() == 1:
        return t
    me = pg.rank()
    parts = t.detach().split(split_sizes, split_dim)
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
    if op == "sum" and equal_blocks(t, dim, sizes) and mail_of(pg, t.device) is None:
        return _summed_blocks(t, dim, pg)
    parts = t.detach().split(sizes, dim)
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
    start_all_to_all(received, sent.view(received.shape), [], [], pg, wait=True)
    return received.sum(0)


@traceable(lambda t, *_: t.shape)
def broadcast(t: Tensor, source: int, group: str) -> Tensor:
    """The tensor of group rank `source` on every rank; `t` gives shape and dtype elsewhere."""
    pg = group_of(group)
    if pg.size() == 1 or t.numel() == 0:
        return t
    flat = bytes_of(t).clone()
    traffic.note(flat.numel() if pg.rank() == source else 0)
    dist.broadcast(flat, group=pg, group_src=source)
    return flat.view(t.dtype).view(t.shape)


def send(t: Tensor, to: int, device: torch.device) -> None:
    """Send a tensor to a global rank, staged on `device`; blocks until it has left."""
    dist.send(bytes_of(t.detach().to(device)), dst=to)


def receive(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Tensor:
    """What the global rank `source` sends."""
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    dist.recv(bytes_of(received), src=source)
    return received


@traceable(lambda t, shape, *_: shape)
def shifted(t: Tensor, shape: Sequence[int], group: str, step: int = 1) -> Tensor:
    """`shift`, waited for."""
    return shift(t, shape, group, step).wait()


def shift(t: Tensor, shape: Sequence[int], group: str, step: int = 1) -> "PendingShift":
    """Start sending `t` to rank + step and receiving a tensor of `shape` from rank - step (both modulo the group)."""
    if is_tracing():
        return PendingShift(None, 0, (), shifted(t, tuple(shape), group, step))
    pg = group_of(group)
    n, me = pg.size(), pg.rank()
    to, source = (me + step) % n, (me - step) % n
    traffic.note(t.nbytes)
    sends = [[t] if r == to else [] for r in range(n)]
    lengths = [math.prod(shape) if r == source else 0 for r in range(n)]
    return PendingShift(start_parts(sends, lengths, t, pg, wait=False), source, tuple(shape))


@dataclass
class PendingShift:
    """A ring step under way."""

    _parts: PendingParts | None
    _source: int
    _shape: tuple[int, ...]
    _received: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until both directions are done; the received tensor."""
        if self._received is None:
            assert self._parts is not None
            self._received = self._parts.wait()[self._source].view(self._shape)
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
def _all_to_all_shape(
    t: Tensor, split_dim: int, split_sizes: Sizes, cat_dim: int, cat_sizes: Sizes, group: str
) -> list[int]:
    return with_size(with_size(t.shape, split_dim, split_sizes[group_rank(group)]), cat_dim, sum(cat_sizes))
