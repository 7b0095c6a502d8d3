"""How tensors travel: as their bytes, so that every dtype works on every backend.

On CPU a large message to a rank of the same machine is left in memory that both have mapped (`one_machine.py`); what is
sent then is where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, ProcessGroup

from dpzoo.shard.one_machine import Mail, mail_of

# Calls go to the process group itself: torch's functions around it cost as much as a small message.
_NOW, _LATER = AllToAllOptions(), AllToAllOptions()
_NOW.asyncOp, _LATER.asyncOp = False, True
_WHERE = 16  # bytes that say where a message lies; a multiple of every element's size


class Pending(Protocol):
    """Something under way; a process group's work is one."""

    def wait(self) -> object:
        """Block until it is done."""


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a tensor, row-major: its own memory where that is how it lies."""
    if t.is_complex() or t.is_neg():
        t = t.resolve_conj().resolve_neg()  # the bytes of a lazy conjugate are those of its base
    t = t.detach().contiguous()
    # as_strided: it may keep an odd stride where a dim has size 0 or 1, which a dtype view refuses.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def start_all_to_all(
    received: Tensor, sent: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], pg: ProcessGroup, wait: bool
) -> Pending | None:
    """Start to send `in_splits[r]` rows of `sent` to rank r, and to receive `out_splits[r]` from it; see `finished`."""
    options = _NOW if wait else _LATER
    return finished(pg.alltoall_base(received, sent, list(out_splits), list(in_splits), options), wait)


def finished(work: Pending | None, wait: bool) -> Pending | None:
    """With `wait`, come back when the work is done; what is left to wait for, if anything."""
    if wait and work is not None:
        work.wait()
    return None if wait else work


def start_parts(
    sends: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor, pg: ProcessGroup, wait: bool
) -> PendingParts:
    """Start to send `sends[r]` (pieces) to rank r, and to receive `lengths[r]` elements from it.

    All ranks of the group call this at the same time.

    Args:
        like: a tensor of the dtype and on the device of what travels.
        wait: come back when it is done.
    """
    device, mail = like.device, mail_of(pg, like.device)
    lengths = [n * like.itemsize for n in lengths]
    sizes = [sum(p.nbytes for p in pieces) for pieces in sends]
    if mail is not None and mail.own is not None and any(mail.sends(r, n) for r, n in enumerate(sizes)):
        sends = [[_where(mail.own.put(p))] if mail.sends(r, sizes[r]) else p for r, p in enumerate(sends)]
        sizes = [_WHERE if mail.sends(r, n) else n for r, n in enumerate(sizes)]
    arriving = [_WHERE if mail is not None and mail.receives(r, n) else n for r, n in enumerate(lengths)]
    pieces = [bytes_of(p) for to in sends for p in to]
    sent = pieces[0] if len(pieces) == 1 else _joined(pieces, device)
    arrived = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
    work = start_all_to_all(arrived, sent, arriving, sizes, pg, wait)
    parts = list(arrived.split(arriving))
    return PendingParts(work, sent, parts, lengths, mail, like.dtype)


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8, device=device)


def _where(at: int) -> Tensor:
    return torch.tensor([at, 0])


@dataclass
class PendingParts:
    """An exchange under way."""

    _work: Pending | None
    _sent: Tensor | None  # to be kept until it is done
    _parts: list[Tensor]
    _lengths: Sequence[int]  # in bytes
    _mail: Mail | None
    _dtype: torch.dtype

    def wait(self) -> list[Tensor]:
        """Block until it is done; the elements that each rank sent, flat."""
        if self._sent is not None:
            if self._work is not None:
                self._work.wait()
            self._parts = [self._opened(r, part).view(self._dtype) for r, part in enumerate(self._parts)]
            self._work = self._sent = None
        return self._parts

    def _opened(self, rank: int, part: Tensor) -> Tensor:
        nbytes = self._lengths[rank]
        inbox = self._mail.of[rank] if self._mail is not None and self._mail.receives(rank, nbytes) else None
        return part if inbox is None else inbox.letter(int(part.view(torch.int64)[0]), nbytes)
