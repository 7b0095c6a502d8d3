"""Sleeping until another process has written: Linux's futex, which the C library has no function for (x86-64)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

_SYSCALL, _WAIT, _WAKE = 202, 0, 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=1)
def _syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None).syscall
    function.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    return function


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the 4 bytes at an address of shared memory are `seen`, till `wake` or for some time."""
    time = _Time(int(seconds), int(seconds % 1 * 1e9))
    _syscall()(_SYSCALL, address, _WAIT, seen, ctypes.addressof(time))


def wake(address: int) -> None:
    """Wake all who sleep at an address."""
    _syscall()(_SYSCALL, address, _WAKE, 2**31 - 1, None)
