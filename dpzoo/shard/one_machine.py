"""Messages between ranks that all run on one machine: left in memory, told by words there (CPU; see `outbox.py`).

The ranks of a group find out together, at their first message, whether each can read the memory of all the others. Then
nothing of what they send each other passes a socket, and no thread has to be woken but the one that waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from dpzoo.shard.outbox import Inbox, Outbox, outbox

SLOTS = 1024  # messages to one rank that may be under way at once
NAP = 0.1  # seconds after which a waiting rank looks whether the sender is still there


@dataclass
class Mail:
    """The messages of one group, numbered; each rank counts alike.

    A message is told by two words in a line of slots, which every rank has for every other: where it lies, and then one
    more than its number; minus that when it has been received.

    Attributes:
        me: this rank.
        own: where it leaves its messages.
        of: the outboxes of all ranks; None for this one.
        told: per rank the word with which the line for it begins, in `own`.
        heard: per rank the word with which the line for this rank begins, in that rank's outbox.
        timeout: seconds to wait for a message.
        begun: per rank the word, in its outbox, that says how many exchanges it has begun.
    """

    me: int
    own: Outbox
    of: tuple[Inbox | None, ...]
    told: tuple[int, ...]
    heard: tuple[int, ...]
    timeout: float
    begun: tuple[int, ...]
    _count: int = 0

    def next_number(self) -> int:
        """The number of the exchange that begins now."""
        self._count += 1
        self.own.words[self.begun[self.me]] = self._count
        return self._count - 1

    def post(self, rank: int, number: int, pieces: Sequence[Tensor]) -> None:
        """Send pieces of one dtype, in a row, to another rank."""
        slot, words = self.told[rank] + 2 * (number % SLOTS), self.own.words
        if words[slot] > 0:
            self._clear(rank, slot, number - SLOTS)
        words[slot + 1] = self.own.put(pieces)
        words[slot] = number + 1
        self.own.wake(slot)

    def _clear(self, rank: int, slot: int, old: int) -> None:
        """Wait until the old message of a slot has been received, or is lost: an error left it far behind."""
        end, words, box = time.monotonic() + self.timeout, self.own.words, self.of[rank]
        assert box is not None
        while words[slot] > 0 and box.words[self.begun[rank]] <= old + SLOTS // 2:
            if time.monotonic() > end or box.has_ended():
                raise dist.DistBackendError(
                    f"rank {rank} has not received a message within {self.timeout:.0f} s; {SLOTS} are under way"
                )
            time.sleep(0.001)
        if words[slot] > 0:
            self.own.discard(words[slot + 1])

    def receive(self, rank: int, number: int, nbytes: int) -> Tensor:
        """The bytes that another rank sends; blocks until they are there.

        Raises:
            DistBackendError: they do not come within the group's timeout, or the rank's process has ended.
        """
        box = self.of[rank]
        assert box is not None
        slot, words = self.heard[rank] + 2 * (number % SLOTS), box.words
        if abs(words[slot]) > number + 1:
            raise dist.DistBackendError(f"message {number} of rank {rank} is lost: {SLOTS} others have come since")
        if words[slot] != number + 1:
            self._wait_for(rank, box, slot, number + 1)
        at = words[slot + 1]
        words[slot] = -number - 1
        return box.letter(at, nbytes)

    def _wait_for(self, rank: int, box: Inbox, slot: int, wanted: int) -> None:
        end, words = time.monotonic() + self.timeout, box.words
        while (seen := words[slot]) != wanted:
            box.sleep(slot, seen, NAP)
            ended = box.has_ended()
            if words[slot] != wanted and (ended or time.monotonic() > end):
                why = f"its process, {box.pid}, has ended" if ended else f"nothing came within {self.timeout:.0f} s"
                raise dist.DistBackendError(f"waiting for a message of rank {rank} of this group: {why}")


def mail_of(pg: ProcessGroup, device: torch.device) -> Mail | None:
    """How the ranks of the group reach each other by memory, if they do; asked by all of them at the same time."""
    if device.type != "cpu":
        return None
    try:
        return _MAIL[pg]
    except KeyError:
        mail = _MAIL[pg] = _meet(pg, device) if pg._get_backend(device).name() == "gloo" else None
        return mail


_MAIL: WeakKeyDictionary[ProcessGroup, Mail | None] = WeakKeyDictionary()


def _meet(pg: ProcessGroup, device: torch.device) -> Mail | None:
    """Exchange addresses, and whether each can read all."""
    n, me, own = pg.size(), pg.rank(), outbox()
    lines = own.reserve(16 * SLOTS * n + 8) // 8 if own is not None else 0
    addresses = _gathered([os.getpid(), own.fd, own.token, lines] if own is not None else [0, -1, 0, 0], pg)
    of = tuple(None if r == me else _inbox(*a[:3]) for r, a in enumerate(addresses))
    reads_all = all(box is not None for r, box in enumerate(of) if r != me)
    all_read = all(all(row) for row in _gathered([int(reads_all)], pg))
    if own is None or not all_read:
        return None
    begins, line = [a[3] for a in addresses], 2 * SLOTS
    timeout = pg._get_backend(device).options._timeout.total_seconds()
    told, heard = tuple(begins[me] + line * r for r in range(n)), tuple(b + line * me for b in begins)
    return Mail(me, own, of, told, heard, timeout, tuple(b + line * n for b in begins))


def _inbox(*address: int) -> Inbox | None:
    """The outbox at an address; groups of the same processes share it."""
    box = _INBOXES.get(address)
    if box is None:
        try:
            box = _INBOXES[address] = Inbox(*address)
        except (AttributeError, OSError, ValueError):
            return None
    return box


_INBOXES: WeakValueDictionary[tuple[int, ...], Inbox] = WeakValueDictionary()


def _gathered(row: list[int], pg: ProcessGroup) -> list[list[int]]:
    """A row of integers of every rank, in a message that no counter of collectives sees."""
    mine: Tensor = torch.tensor(row)
    out = [torch.empty_like(mine) for _ in range(pg.size())]
    backend: Any = pg._get_backend(mine.device)
    backend.allgather([out], [mine]).wait()
    return [t.tolist() for t in out]
