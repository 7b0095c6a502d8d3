"""Reductions that every rank of a group gets the result of, the same bits on all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions

from dpzoo.shard import one_shot, traffic
from dpzoo.shard.one_shot import PendingPartsOfAll
from dpzoo.shard.process_groups import group_of
from dpzoo.shard.tracing import traceable
from dpzoo.shard.wire import Pending, finished

_OPS: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[..., Tensor]]] = {
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
    return _start(t.detach().contiguous(), False, group, op, wait=True).wait()


def start_all_reduce_(t: Tensor, group: str, op: str = "sum", wait: bool = False) -> PendingReduction:
    """Start reducing `t`, contiguous and not empty, in place over the group.

    Args:
        wait: come back when it is done, which costs less than to wait for it at once.
    """
    return _start(t, True, group, op, wait)


def _start(t: Tensor, in_place: bool, group: str, op: str, wait: bool) -> PendingReduction:
    pg = group_of(group)
    traffic.note(t.nbytes)
    products = t.is_complex() and op != "sum"  # a process group takes complex numbers for pairs of real ones
    if products or one_shot.serves(t.nbytes, t.device, pg):
        parts = one_shot.start_parts_of_all(t.view(-1), pg, wait)
        return PendingReduction(None, t if in_place else torch.empty_like(t), parts, op)
    out = t if in_place else t.clone()
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = _OPS[op][0], not wait
    work = pg.allreduce([torch.view_as_real(out) if out.is_complex() else out], options)
    return PendingReduction(finished(work, wait), out)


@dataclass
class PendingReduction:
    """A reduction under way."""

    _work: Pending | None
    _out: Tensor
    _parts: PendingPartsOfAll | None = None  # what each rank gives, if it is to be reduced here
    _op: str = "sum"

    def wait(self) -> Tensor:
        """Block until it is done; the result."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._parts is not None:
            self._reduce(*self._parts.wait())
            self._parts = None
        return self._out

    def _reduce(self, first: Tensor, *rest: Tensor) -> None:
        """In rank order, so that all ranks find the same bits; half precision is rounded once."""
        reduce, out = _OPS[self._op][1], self._out.view(-1)
        if len(rest) == 1:
            reduce(first, rest[0], out=out)
            return
        total = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first
        for part in rest:
            total = reduce(total, part)
        out.copy_(total)
