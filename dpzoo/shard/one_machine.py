"""Which ranks of a group leave large messages for each other in memory, because they run on one machine.

Found out once a group, by all of its ranks together: each says where its outbox is, tries those of the others, and
tells what it can read, so that sender and receiver of every message know which way it goes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ProcessGroup

from dpzoo.shard.outbox import Inbox, Outbox, outbox

LARGE = 2**17  # bytes of a message that goes by memory


@dataclass(frozen=True)
class Mail:
    """The way by memory inside a group.

    Attributes:
        own: where this rank leaves its messages, if it can.
        of: per rank its outbox, if it can be read here.
        readers: per rank whether it can read the own one.
    """

    own: Outbox | None
    of: tuple[Inbox | None, ...]
    readers: tuple[bool, ...]

    def sends(self, rank: int, nbytes: int) -> bool:
        """Does a message of this size to `rank` go by memory?"""
        return nbytes >= LARGE and self.readers[rank]

    def receives(self, rank: int, nbytes: int) -> bool:
        """Does a message of this size from `rank` come by memory?"""
        return nbytes >= LARGE and self.of[rank] is not None


def mail_of(pg: ProcessGroup, device: torch.device) -> Mail | None:
    """How ranks of the group reach each other by memory, if any do; asked by all of them at the same time."""
    if device.type != "cpu":
        return None
    if pg not in _MAIL:
        _MAIL[pg] = _meet(pg) if pg._get_backend(device).name() == "gloo" else None
    return _MAIL[pg]


_MAIL: WeakKeyDictionary[ProcessGroup, Mail | None] = WeakKeyDictionary()


def _meet(pg: ProcessGroup) -> Mail | None:
    me, own = pg.rank(), outbox()
    address = [0, -1, 0] if own is None else [os.getpid(), own.fd, own.token]
    of = tuple(None if r == me or a[1] < 0 else _inbox(*a) for r, a in enumerate(_gathered(address, pg)))
    readable = _gathered([int(box is not None) for box in of], pg)
    if not any(map(any, readable)):
        return None
    return Mail(own, of, tuple(bool(row[me]) for row in readable))


def _inbox(*address: int) -> Inbox | None:
    """The outbox at an address; groups of the same processes share it."""
    box = _INBOXES.get(address)
    if box is None:
        try:
            box = _INBOXES[address] = Inbox(*address)
        except (OSError, ValueError):
            return None
    return box


_INBOXES: WeakValueDictionary[tuple[int, ...], Inbox] = WeakValueDictionary()


def _gathered(row: list[int], pg: ProcessGroup) -> list[list[int]]:
    """A row of integers of every rank."""
    mine: Tensor = torch.tensor(row)
    out = mine.new_empty(pg.size() * len(row))
    pg._allgather_base(out, mine, AllgatherOptions()).wait()
    found: list[list[int]] = out.view(pg.size(), -1).tolist()
    return found
