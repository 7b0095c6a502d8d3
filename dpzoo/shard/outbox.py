"""Memory in which a process leaves messages for the others of its machine, which use them where they lie.

A socket copies a message into the kernel and out of it and wakes threads for every piece: 0.8 ms of processor time a MB
and rank, 0.4 ms for the shortest message. The memory is a file without a name that others map as soon as they know of
it (`memfd`, Linux), as large as the machine's memory but holding only what has been written. It grows to what is under
way at once and is used again; it ends with its process, and with those that have mapped it.

That a message is there, and that it has been read, is said by words of the same memory. This relies on a processor on
which other cores see reads and writes in the order in which they were done, so others than x86 go without.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

from dpzoo.shard import futex

FRONT = 64  # bytes in front of a message; the first is 1 until it has been read
PAGE = 4096


class _Memory:
    """A mapped file.

    Attributes:
        words: its content as integers of 8 bytes.
    """

    def __init__(self, fd: int, length: int) -> None:
        self._map = mmap.mmap(fd, length)
        self.words = memoryview(self._map).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def wake(self, word: int) -> None:
        """Wake those who sleep at a word."""
        futex.wake(self._address + 8 * word)

    def sleep(self, word: int, seen: int, seconds: float) -> None:
        """Until somebody wakes those who sleep at a word, or some time is over; not if the word is not `seen`."""
        futex.wait(self._address + 8 * word, seen & 0xFFFFFFFF, seconds)

    def discard(self, at: int) -> None:
        """Nobody reads the message that lies at `at` any more: its place is free."""
        self._map[at] = 0


class Outbox(_Memory):
    """The messages of this process that others have not read yet."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dpzoo-outbox")
        length = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self.fd, length)
        super().__init__(self.fd, length)
        with torch.inference_mode(False):  # it is written outside of that mode, too
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.words[0] = self.token = secrets.randbits(62)
        self._end, self._lock = PAGE, Lock()
        self._under_way: list[tuple[int, int]] = []  # where, and how much room it takes
        self._free: dict[int, list[int]] = {}

    def reserve(self, nbytes: int) -> int:
        """Where `nbytes` lie, all 0, that are for one use ever."""
        with self._lock:
            return self._new_room(-(-nbytes // PAGE) * PAGE)

    def put(self, pieces: Sequence[Tensor]) -> int:
        """Leave a message, pieces of one dtype in a row; where it lies.

        Raises:
            MemoryError: more is under way than the machine's memory holds.
        """
        nbytes = sum(p.nbytes for p in pieces)
        with self._lock:
            at = self._room(nbytes)
            self._map[at] = 1
        place = self._bytes.narrow(0, at + FRONT, nbytes).view(pieces[0].dtype)
        for part, piece in zip(place.split([p.numel() for p in pieces]), pieces, strict=True):
            part.view(piece.shape).copy_(piece.detach())
        return at

    def _room(self, nbytes: int) -> int:
        """A place for a message: one whose message has been read, or a new one. Rooms are powers of two."""
        waiting = []
        for at, room in self._under_way:
            if self._map[at]:
                waiting.append((at, room))
            else:
                self._free.setdefault(room, []).append(at)
        room = max(PAGE, 1 << (nbytes + FRONT - 1).bit_length())
        free = self._free.get(room)
        at = free.pop() if free else self._new_room(room)
        self._under_way = [*waiting, (at, room)]
        return at

    def _new_room(self, room: int) -> int:
        at, end = self._end, self._end + room
        if end > len(self._map):
            raise MemoryError(f"messages of {end / 2**30:.1f} GiB are under way to ranks of this machine")
        self._end = end
        return at


class Inbox(_Memory):
    """The outbox of another process of this machine.

    Raises:
        OSError: there is no such process here, or its memory may not be seen; also if it is another's.
    """

    def __init__(self, pid: int, fd: int, token: int) -> None:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            super().__init__(file.fileno(), 0)
        if self.words[0] != token:
            raise OSError(f"descriptor {fd} of process {pid} is not an outbox, or one of another machine")
        self.pid, self._process = pid, os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._process)

    def letter(self, at: int, nbytes: int) -> Tensor:
        """The message that lies at `at`, there: its place is free again when nothing uses this tensor any more."""
        place = (ctypes.c_char * nbytes).from_buffer(self._map, at + FRONT)
        weakref.finalize(place, self.discard, at).atexit = False
        return torch.frombuffer(place, dtype=torch.uint8)

    def has_ended(self) -> bool:
        """Whether that process is no more; what it had sent is here nevertheless."""
        asking = select.poll()  # of this call alone: threads may ask at the same time
        asking.register(self._process, select.POLLIN)
        return bool(asking.poll(0))


def outbox() -> Outbox | None:
    """That of this process; None where there can be none, or `DPZOO_SHARED_MEMORY=0` says that none is wanted."""
    return _outbox(os.getpid())


@lru_cache(maxsize=1)
def _outbox(pid: int) -> Outbox | None:
    """One a process: a forked one must not write into that of its parent."""
    if platform.machine() in ("x86_64", "AMD64") and os.environ.get("DPZOO_SHARED_MEMORY") != "0":
        with suppress(AttributeError, OSError, ValueError):  # another system than Linux, or one that does not allow it
            return Outbox()
    return None
