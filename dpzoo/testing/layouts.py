"""Ways to cut n rows over ranks, as integers: the shapes that a rule has to survive."""

from __future__ import annotations

from collections.abc import Sequence

LAYOUTS = ("even", "uneven", "tiny", "empty", "empty_first", "empty_last")
"""Named layouts; see `layout_sizes`."""

_WEIGHTS = (3, 6, 1, 4)


def layout_sizes(n: int, ranks: int, layout: str, turn: int = 0) -> tuple[int, ...]:
    """How many of `n` rows each of `ranks` ranks holds.

    even: as `torch.chunk` cuts. uneven: no two neighbours alike where n allows, none empty where n allows.
    tiny: the middle rank has one row. empty, empty_first, empty_last: the middle, first or last rank has none.
    On one rank every layout is `(n,)`. `turn` rotates the sizes over the ranks, to misalign a second tensor.

    Raises:
        ValueError: n is negative, ranks is not positive, or the layout has no such name.
    """
    if n < 0 or ranks < 1:
        raise ValueError(f"layout_sizes: n={n} must be >= 0 and ranks={ranks} must be >= 1")
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; choose one of {', '.join(LAYOUTS)}")
    if ranks == 1:
        return (n,)
    sizes = _cut(n, ranks, layout)
    turn %= ranks
    return sizes[turn:] + sizes[:turn]


def check_sizes(n: int, ranks: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`sizes` as a tuple, after checking that they are a cut of `n` over `ranks`; raises `ValueError` otherwise."""
    sizes = tuple(sizes)
    if len(sizes) != ranks or sum(sizes) != n or min(sizes) < 0:
        raise ValueError(f"sizes {sizes} are not a cut of {n} rows over {ranks} ranks: they sum to {sum(sizes)}")
    return sizes


def _cut(n: int, ranks: int, layout: str) -> tuple[int, ...]:
    if layout == "even":
        step = -(-n // ranks) if n else 0
        return tuple(max(0, min(step, n - rank * step)) for rank in range(ranks))
    if layout == "uneven":
        return _by_weight(n, [_WEIGHTS[rank % len(_WEIGHTS)] for rank in range(ranks)])
    if layout == "tiny":
        return _with_one(min(1, n), ranks // 2, n, ranks)
    place = {"empty": ranks // 2, "empty_first": 0, "empty_last": ranks - 1}[layout]
    return _with_one(0, place, n, ranks)


def _with_one(size: int, place: int, n: int, ranks: int) -> tuple[int, ...]:
    """`size` rows on rank `place`, the others cut unevenly over the rest."""
    others = list(_by_weight(n - size, [_WEIGHTS[rank % len(_WEIGHTS)] for rank in range(ranks - 1)]))
    others.insert(place, size)
    return tuple(others)


def _by_weight(n: int, weights: Sequence[int]) -> tuple[int, ...]:
    """One row each as far as they go, the rest in proportion to `weights`; rounding goes to the heaviest."""
    parts = len(weights)
    sizes = [1 if rank < n else 0 for rank in range(parts)]
    rest = n - sum(sizes)
    total = sum(weights)
    sizes = [size + rest * weight // total for size, weight in zip(sizes, weights, strict=True)]
    sizes[max(range(parts), key=lambda rank: weights[rank])] += n - sum(sizes)
    return tuple(sizes)
