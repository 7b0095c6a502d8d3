"""A counter of what the collectives send: for tests that hold a rule to the bytes its arithmetic promises."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Traffic:
    """What this rank handed to the backend.

    Attributes:
        calls: collectives this rank took part in (a group of one, or one that moves nothing anywhere, makes none).
        nbytes: bytes for other ranks. A reduction, a broadcast or a gather counts its payload once, however the
            backend passes it on.
    """

    calls: int = 0
    nbytes: int = 0


_open: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives inside the block, on this rank; counters nest."""
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open[:] = [t for t in _open if t is not traffic]


def note(nbytes: int) -> None:
    """One more collective, with so many bytes from this rank."""
    for traffic in _open:
        traffic.calls += 1
        traffic.nbytes += nbytes
