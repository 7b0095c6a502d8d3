"""Which rows of a cloud a sample holds, and which of them are this rank's. Integers only.

A sub-sample is a function of the seed, never of the number of ranks: position `i` of the drawn cloud is the same row of
the file for any cut. A rank computes only the positions that it owns.

* `"window"`: a contiguous window at a random start. Uniform only if the rows of the file were shuffled once; then each
  rank reads one piece of the file.
* `"strata"`: the file is cut into as many strata as points are wanted and one row is taken from each, at random. Right
  for any order of rows, spreads well along a space-filling curve; a rank reads the strata that it owns.

Both start at a random row and wrap around, which makes every row equally likely.
"""

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from dpzoo.datapipes.errors import DataError

Kind = Literal["window", "strata", "all"]


@dataclass(frozen=True)
class Draw:
    """`points` of `total` rows, chosen by `key`."""

    total: int
    points: int
    kind: Kind
    key: int

    def __post_init__(self) -> None:
        if not 0 <= self.points <= self.total:
            raise DataError(
                f"asked for {self.points} of {self.total} rows; ask for fewer, or for all of them with points=None"
            )

    def intervals(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Row intervals of the file (two where it wraps) that hold the drawn positions `[lo, hi)`, in their order."""
        if hi <= lo:
            return []
        first, last = self._start + self._edge(lo), self._start + self._edge(hi)
        if first >= self.total:
            return [(first - self.total, last - self.total)]
        return [(first, min(last, self.total)), *([(0, last - self.total)] if last > self.total else [])]

    def rows(self, lo: int, hi: int) -> np.ndarray:
        """The rows at positions `[lo, hi)`, ascending within each interval of `intervals`."""
        if self.kind != "strata":
            return np.concatenate([np.arange(a, b) for a, b in self.intervals(lo, hi)] or [np.arange(0)])
        # int64 holds the product for up to 3e9 rows and points.
        edges = np.arange(lo, hi + 1, dtype=np.int64) * self.total // max(self.points, 1)
        width = (edges[1:] - edges[:-1]).astype(np.uint64)
        noise = _mixed(np.arange(lo, hi, dtype=np.uint64) + np.uint64(self.key))
        return (self._start + edges[:-1] + (noise % width).astype(np.int64)) % self.total

    @property
    def _start(self) -> int:
        return self.key % self.total if self.points < self.total else 0

    def _edge(self, position: int) -> int:
        return position * self.total // self.points if self.kind == "strata" else position


def make_draw(total: int, points: int | None, kind: Kind, *words: object) -> Draw:
    """The draw of `points` (None: all) rows that the words (seed, epoch, car, cloud) stand for."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return Draw(total, total if points is None else points, "all" if points is None else kind, _uint63(digest))


def shard_sizes(points: int, ranks: int, weights: tuple[float, ...] | None = None) -> tuple[int, ...]:
    """How many points each rank holds: equal to within one, or in proportion to `weights`.

    >>> shard_sizes(10, 3), shard_sizes(10, 3, (2, 1, 1))
    ((4, 3, 3), (5, 2, 3))
    """
    if weights is None:
        base, extra = divmod(points, ranks)
        return tuple(base + (rank < extra) for rank in range(ranks))
    if len(weights) != ranks or min(weights) < 0 or not sum(weights) > 0:
        raise DataError(f"{ranks} ranks need as many weights >= 0 with a positive sum, got {weights}")
    borders = [round(points * float(share)) for share in np.cumsum((0.0, *weights)) / sum(weights)]
    return tuple(hi - lo for lo, hi in pairwise(borders))


def _uint63(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") >> 1


def _mixed(z: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea and Flood 2014) on uint64, which wraps."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
