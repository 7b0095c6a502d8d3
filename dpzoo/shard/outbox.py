"""Memory in which a process leaves messages for the others of its machine, which copy them out themselves.

A socket copies a message into the kernel and out of it, in pieces, and wakes threads for them: 0.8 ms of processor time
a MB and rank, here 0.2. The memory is a file without a name that others map as soon as they know of it (`memfd`,
Linux), as large as the machine's memory but holding only what has been written. It grows to what is under way at once
and is used again; it ends with its process, and with those that have mapped it.

Where a message lies travels in a message of its own, see `wire.py`. That it has been read is said by a byte in front
of it: this relies on a processor on which other cores see reads and writes in the order in which they were done, so
others than x86 go without.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

FRONT = 64  # bytes in front of a message; the first is 1 until it has been read
PAGE = 4096


class Outbox:
    """The messages of this process that others have not read yet."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dpzoo-outbox")
        length = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self.fd, length)
        self._memory = mmap.mmap(self.fd, length)
        with torch.inference_mode(False):  # it is written outside of that mode, too
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.token = secrets.randbits(62)
        self._memory[:8] = self.token.to_bytes(8, sys.byteorder)
        self._end, self._lock = PAGE, Lock()
        self._under_way: list[tuple[int, int]] = []  # where, and how much room it takes
        self._free: dict[int, list[int]] = {}

    def put(self, pieces: Sequence[Tensor]) -> int:
        """Leave a message, pieces of one dtype in a row; where it lies.

        Raises:
            MemoryError: more is under way than the machine's memory holds.
        """
        nbytes = sum(p.nbytes for p in pieces)
        with self._lock:
            at = self._room(nbytes)
            self._memory[at] = 1
        place = self._bytes.narrow(0, at + FRONT, nbytes).view(pieces[0].dtype)
        for part, piece in zip(place.split([p.numel() for p in pieces]), pieces, strict=True):
            part.view(piece.shape).copy_(piece.detach())
        return at

    def _room(self, nbytes: int) -> int:
        """A place for a message: one whose message has been read, or a new one. Rooms are powers of two."""
        waiting = []
        for at, room in self._under_way:
            if self._memory[at]:
                waiting.append((at, room))
            else:
                self._free.setdefault(room, []).append(at)
        room = max(PAGE, 1 << (nbytes + FRONT - 1).bit_length())
        free = self._free.get(room)
        if free:
            at = free.pop()
        else:
            at, self._end = self._end, self._end + room
            if self._end > len(self._memory):
                raise MemoryError(f"messages of {self._end / 2**30:.1f} GiB are under way to ranks of this machine")
        self._under_way = [*waiting, (at, room)]
        return at


class Inbox:
    """The outbox of another process of this machine.

    Raises:
        OSError: there is no such process here, or its memory may not be seen; also if it is another's.
    """

    def __init__(self, pid: int, fd: int, token: int) -> None:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        if int.from_bytes(self._memory[:8], sys.byteorder) != token:
            raise OSError(f"descriptor {fd} of process {pid} is not an outbox, or one of another machine")

    def letter(self, at: int, nbytes: int) -> Tensor:
        """The message that lies at `at`, there: its place is free again when nothing uses this tensor any more."""
        place = (ctypes.c_char * nbytes).from_buffer(self._memory, at + FRONT)
        weakref.finalize(place, self._memory.__setitem__, at, 0).atexit = False
        return torch.frombuffer(place, dtype=torch.uint8)


def outbox() -> Outbox | None:
    """That of this process; None where there can be none, or `DPZOO_SHARED_MEMORY=0` says that none is wanted."""
    return _outbox(os.getpid())


@lru_cache(maxsize=1)
def _outbox(pid: int) -> Outbox | None:
    """One a process: a forked one must not write into that of its parent."""
    if platform.machine() not in ("x86_64", "AMD64") or os.environ.get("DPZOO_SHARED_MEMORY") == "0":
        return None
    try:
        return Outbox()
    except (AttributeError, OSError, ValueError):  # another system than Linux, or one that does not allow it
        return None
