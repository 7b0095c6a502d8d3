"""The whole of a cut dim on every rank, from shards of any sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ProcessGroup

from dpzoo.shard import one_shot, traffic
from dpzoo.shard.partition import Sizes, row_numel, with_size
from dpzoo.shard.process_groups import group_of
from dpzoo.shard.tracing import traceable
from dpzoo.shard.wire import Pending, bytes_of, finished

_AS_THEY_ARE = frozenset((torch.float32, torch.float64))
_NOW, _LATER = AllgatherOptions(), AllgatherOptions()
_NOW.asyncOp, _LATER.asyncOp = False, True


@traceable(lambda t, dim, sizes, group: with_size(t.shape, dim, sum(sizes)))
def all_gather_v(t: Tensor, dim: int, sizes: Sizes, group: str) -> Tensor:
    """The whole of `dim` on every rank."""
    return start_all_gather_v(t, dim, sizes, group, wait=True).wait()


def start_all_gather_v(t: Tensor, dim: int, sizes: Sizes, group: str, wait: bool = False) -> PendingGather:
    """Start `all_gather_v`. Shards are padded to the longest where the backend wants equal lengths.

    Args:
        wait: come back when it is done, which costs less than to wait for it at once.
    """
    pg = group_of(group)
    shape = with_size(t.shape, dim, sum(sizes))
    if pg.size() == 1:
        return PendingGather(None, t, lambda whole: whole)
    if equal_blocks(t, dim, sizes):  # nothing is packed, padded or copied
        return _start(t.detach().contiguous().view(-1), pg, lambda out: out.view(shape), wait)
    longest, row = max(sizes), row_numel(t.shape, dim)
    if longest * row == 0:
        return PendingGather(None, t.new_empty(shape), lambda whole: whole)
    flat = bytes_of(t)
    per = longest * row * t.element_size()
    if flat.numel() != per:
        flat = torch.cat([flat, flat.new_empty(per - flat.numel())])
    return _start(flat, pg, lambda out: _joined(out, t, dim, sizes), wait)


def equal_blocks(t: Tensor, dim: int, sizes: Sizes) -> bool:
    """Does each rank's part of `dim` lie in one piece, as long as the others', in a dtype that every backend takes?"""
    return (
        t.dtype in _AS_THEY_ARE
        and sizes.count(sizes[0]) == len(sizes)
        and math.prod(t.shape[:dim]) == 1
        and t.numel() > 0
        and not t.is_neg()
    )


@dataclass
class PendingGather:
    """A gather under way."""

    _work: Pending | None
    _out: Tensor  # (n, numel), what each rank gave
    _arrange: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """Block until it is done; the whole."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._arrange(self._out)


def _start(mine: Tensor, pg: ProcessGroup, arrange: Callable[[Tensor], Tensor], wait: bool) -> PendingGather:
    out = mine.new_empty((pg.size(), mine.numel()))
    traffic.note(mine.nbytes)
    if one_shot.serves(mine.nbytes, mine.device, pg):
        work = one_shot.start_gather(mine, out, pg, wait)
    else:
        work = finished(pg._allgather_base(out.view(-1), mine, _NOW if wait else _LATER), wait)
    return PendingGather(work, out, arrange)


def _joined(out: Tensor, like: Tensor, dim: int, sizes: Sizes) -> Tensor:
    """The shards of all ranks, each at the beginning of a row of bytes, joined along `dim`."""
    # torch.cat refuses short floats under autocast
    rows = out if like.dtype.itemsize == 1 else out.view(like.dtype)
    if min(sizes) == max(sizes) and math.prod(like.shape[:dim]) == 1:  # it lies in memory as it should
        whole = rows.view(with_size(like.shape, dim, sum(sizes)))
    else:
        row = row_numel(like.shape, dim)
        whole = torch.cat([rows[r, : k * row].view(with_size(like.shape, dim, k)) for r, k in enumerate(sizes)], dim)
    return whole.view(like.dtype) if like.dtype.itemsize == 1 else whole
