"""How tensors travel: as their bytes, so that every dtype works on every backend.

On CPU a group whose ranks are all on one machine needs no messages of the process group for what goes to each other: it
leaves them in memory that all have mapped (`one_machine.py`).
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
    mail = mail_of(pg, like.device)
    pending = _by_socket(sends, lengths, like, pg, wait) if mail is None else _by_mail(sends, lengths, like, mail)
    finished(pending, wait)
    return pending


def _by_mail(sends: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor, mail: Mail) -> PendingMail:
    number, here = mail.next_number(), like.new_empty(0)
    for rank, pieces in enumerate(sends):
        if mail.of[rank] is None:
            here = torch.cat([p.detach().reshape(-1) for p in pieces]) if len(pieces) else here
        elif any(p.numel() for p in pieces):
            mail.post(rank, number, pieces)
    return PendingMail(mail, number, lengths, here)


def _by_socket(
    sends: Sequence[Sequence[Tensor]], lengths: Sequence[int], like: Tensor, pg: ProcessGroup, wait: bool
) -> PendingMessages:
    sizes = [sum(p.nbytes for p in pieces) for pieces in sends]
    arriving = [n * like.itemsize for n in lengths]
    pieces = [bytes_of(p) for to in sends for p in to]
    if not pieces:
        pieces = [torch.empty(0, dtype=torch.uint8, device=like.device)]
    sent = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    received = torch.empty(sum(lengths), dtype=like.dtype, device=like.device)
    work = start_all_to_all(received.view(torch.uint8), sent, arriving, sizes, pg, wait)
    return PendingMessages(work, sent, list(received.split(list(lengths))))


class PendingParts(Protocol):
    """An exchange under way."""

    def wait(self) -> list[Tensor]:
        """Block until it is done; the elements that each rank sent, flat."""


@dataclass
class PendingMessages:
    """An exchange of a process group."""

    _work: Pending | None
    _sent: Tensor  # kept until it is done
    _parts: list[Tensor]

    def wait(self) -> list[Tensor]:
        """See `PendingParts`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._parts


@dataclass
class PendingMail:
    """An exchange by memory."""

    _mail: Mail
    _number: int
    _lengths: Sequence[int]
    _here: Tensor  # what this rank keeps
    _parts: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """See `PendingParts`."""
        if self._parts is None:
            self._parts = [self._part(rank, n) for rank, n in enumerate(self._lengths)]
        return self._parts

    def _part(self, rank: int, length: int) -> Tensor:
        if self._mail.of[rank] is None:
            return self._here
        if not length:
            return self._here.new_empty(0)
        return self._mail.receive(rank, self._number, length * self._here.itemsize).view(self._here.dtype)
