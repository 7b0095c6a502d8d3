"""Integer arithmetic on the pieces of one dim: sizes, offsets and intervals. No tensors, no ranks of the world.

`sizes[i]` is the length of the piece of mesh coordinate `i`; pieces follow each other without gap or overlap.
An interval is a half-open pair `(lo, hi)` of global indices.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

Interval = tuple[int, int]
Sizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def starts(sizes: Sizes) -> Sizes:
    """First global index of each piece, and the total at the end."""
    return (0, *accumulate(sizes))


@lru_cache(maxsize=4096)
def chunk_sizes(total: int, parts: int) -> Sizes:
    """Sizes of `torch.chunk`: equal pieces of `ceil(total / parts)`, the last ones shorter or empty.

    >>> chunk_sizes(9, 4)
    (3, 3, 3, 0)
    """
    width = -(-total // parts) if parts else 0
    return tuple(max(0, min(width, total - i * width)) for i in range(parts))


@lru_cache(maxsize=4096)
def even_sizes(total: int, parts: int) -> Sizes:
    """Sizes that differ by at most one, the longer ones first.

    >>> even_sizes(9, 4)
    (3, 2, 2, 2)
    """
    base, extra = divmod(total, parts)
    return tuple(base + (i < extra) for i in range(parts))


def overlap(a: Interval, b: Interval) -> Interval | None:
    """The common part of two intervals, or None when it is empty."""
    lo, hi = max(a[0], b[0]), min(a[1], b[1])
    return (lo, hi) if lo < hi else None


def own_intervals(sizes: Sizes) -> tuple[Interval, ...]:
    """The interval that each piece covers."""
    at = starts(sizes)
    return tuple(zip(at, at[1:], strict=False))


def cut_at(sizes: Sizes, lo: int, hi: int, step: int = 1) -> Sizes:
    """How many of the indices `lo, lo + step, ... < hi` fall into each piece."""
    return tuple(len(local_range(interval, lo, hi, step)) for interval in own_intervals(sizes))


def local_range(own: Interval, lo: int, hi: int, step: int = 1) -> range:
    """The indices of `range(lo, hi, step)` inside `own`, counted from the start of `own`."""
    first = lo if own[0] <= lo else lo + -(-(own[0] - lo) // step) * step
    return range(first - own[0], max(first - own[0], min(hi, own[1]) - own[0]), step)


def align_sizes(sizes: Sizes, multiple: int) -> Sizes:
    """Move every border to the nearest multiple of `multiple` (the total must be one): where an un-flatten fits."""
    total = sum(sizes)
    borders = [min(total, round(b / multiple) * multiple) for b in starts(sizes)[1:-1]]
    borders = [0, *borders, total]
    return tuple(hi - lo for lo, hi in zip(borders, borders[1:], strict=False))


def moved(src: Sizes, dst: Sizes) -> int:
    """Number of indices that change owner between two cuts of the same dim."""
    kept = sum(o[1] - o[0] for a, b in zip(own_intervals(src), own_intervals(dst), strict=True) if (o := overlap(a, b)))
    return sum(src) - kept


def contiguous_stride(shape: Sequence[int]) -> Sizes:
    """Row-major strides of `shape`, as torch gives them (sizes of zero count as one)."""
    stride, out = 1, []
    for n in reversed(shape):
        out.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(out))


def with_size(shape: Sequence[int], dim: int, n: int) -> list[int]:
    """`shape` with another size of one dim."""
    return [*shape[:dim], n, *shape[dim + 1 :]]


def row_numel(shape: Sequence[int], dim: int) -> int:
    """Number of elements of one row of `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
