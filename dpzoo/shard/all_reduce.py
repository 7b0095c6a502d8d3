"""Reductions that every rank of a group gets the result of, the same bits on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions

from dpzoo.shard import one_shot, traffic
from dpzoo.shard.process_groups import group_of
from dpzoo.shard.tracing import traceable

_OPS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
}
"""Name -> how a process group reduces, and how two of the ranks' tensors become one."""

# Reductions that a backend lacks run in another dtype that holds every value.
_REDUCED_AS = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


@traceable(lambda t, *_: t.shape)
def all_reduce(t: Tensor, group: str, op: str = "sum") -> Tensor:
    """A new tensor holding the reduction over the group."""
    pg = group_of(group)
    if pg.size() == 1 or t.numel() == 0:
        return t
    if op == "avg":
        return all_reduce(t, group, "sum") / pg.size()
    if t.dtype is torch.bool:  # a sum of truths is true when one of them is
        op = {"sum": "max", "product": "min"}.get(op, op)
    if t.dtype in _REDUCED_AS:
        return all_reduce(t.to(_REDUCED_AS[t.dtype]), group, op).to(t.dtype)
    return start_all_reduce_(t.detach().clone(memory_format=torch.contiguous_format), group, op, wait=True).wait()


def start_all_reduce_(t: Tensor, group: str, op: str = "sum", wait: bool = False) -> PendingReduction:
    """Start reducing `t`, contiguous and not empty, in place over the group.

    Args:
        wait: come back when it is done, which costs less than to wait for it at once.
    """
    pg = group_of(group)
    traffic.note(t.nbytes)
    products = t.is_complex() and op != "sum"  # a process group takes complex numbers for pairs of real ones
    if products or one_shot.serves(t.nbytes, t.device, pg):
        parts = t.new_empty((pg.size(), t.numel()))
        work = one_shot.start_gather(_bytes(t), _bytes(parts).view(pg.size(), -1), pg, wait)
        return PendingReduction(work, t, parts, op)
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = _OPS[op][0], not wait
    work = pg.allreduce([torch.view_as_real(t) if t.is_complex() else t], options)
    if wait and work is not None:
        work.wait()
    return PendingReduction(None if wait else work, t)


def _bytes(t: Tensor) -> Tensor:
    return t.view(-1).view(torch.uint8)


@dataclass
class PendingReduction:
    """A reduction under way."""

    _work: dist.Work | None
    _out: Tensor
    _parts: Tensor | None = None  # (n, numel), what each rank gave, if it is still to be reduced here
    _op: str = "sum"

    def wait(self) -> Tensor:
        """Block until it is done; the tensor that was given, which holds the result."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._parts is not None:
            self._reduce(self._parts)
            self._parts = None
        return self._out

    def _reduce(self, parts: Tensor) -> None:
        """In rank order, so that all ranks find the same bits; half precision is rounded once."""
        first, *rest = (parts.float() if parts.dtype in (torch.float16, torch.bfloat16) else parts).unbind(0)
        total, reduce = first, _OPS[self._op][1]
        for part in rest:
            total = reduce(total, part)
        self._out.view(-1).copy_(total)
