"""Cut a tensor into slabs that are small enough to pass through memory one after the other."""

import math
from collections.abc import Iterator, Sequence

from dpzoo.weights.source import Slab

# Small enough that what the allocator keeps of several pieces does not count, large enough for disks and networks.
PIECE_BYTES = 4 << 20


def pieces(bounds: Sequence[tuple[int, int]], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[Slab]:
    """Slabs that together are the box ``bounds`` ((start, stop) per dim), each of at most ``limit`` bytes.

    They follow one another in memory order, so that a file is read forward. An empty box has none; a scalar has one.
    """
    sizes = [b - a for a, b in bounds]
    if 0 in sizes:
        return
    dim, row = 0, math.prod(sizes) * itemsize
    while dim < len(sizes) and row > limit:
        row //= sizes[dim]
        dim += 1
    if not dim:
        yield tuple(slice(a, b) for a, b in bounds)
        return
    step = max(1, limit // row)  # rows of dim - 1, the last dim that is cut, in a piece
    yield from _walk(list(bounds), dim - 1, step, ())


def _walk(bounds: list[tuple[int, int]], cut: int, step: int, outer: Slab) -> Iterator[Slab]:
    first, last = bounds[len(outer)]
    if len(outer) == cut:
        rest = tuple(slice(a, b) for a, b in bounds[cut + 1 :])
        for a in range(first, last, step):
            yield (*outer, slice(a, min(a + step, last)), *rest)
        return
    for a in range(first, last):
        yield from _walk(bounds, cut, step, (*outer, slice(a, a + 1)))
