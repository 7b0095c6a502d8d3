"""Which keys a query sees in neighborhood attention, along one dim. Integers only.

A dim of `n` positions with dilation `d` falls apart into `d` groups (positions g, g + d, g + 2 d, ...) that do not see
each other. Inside a group, with coordinates 0 <= j < m:

- queries form groups of `stride` that share one window, that of their leader (the centre of the group, right of it when
  `stride` is even; the last one when causal);
- the window has `kernel` keys around the leader (an even kernel has one more on the left). At a border of the domain it
  is shifted, never padded, so every query sees exactly `kernel` keys;
- a causal window ends at the query and is not shifted, so the first queries see fewer keys.

Papers: Hassani et al. 2023 (arXiv:2204.07143), Hassani & Shi 2022 (dilation, arXiv:2209.15001), Hassani et al. 2025
(stride, arXiv:2504.16922). The rule is that of NATTEN >= 0.20.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

COPY_COST = 30  # copying one key and value into a block costs about as much as 30 queries that attend to it
MAX_QUERIES = 1024  # of one block


@dataclass(frozen=True)
class Axis:
    """One spatial dim of the domain: its size and the window's parameters."""

    n: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def group_size(self, group: int) -> int:
        """Positions of a dilation group."""
        return len(range(group, self.n, self.dilation))

    def window(self, j: int, m: int) -> tuple[int, int]:
        """First key and one past the last key that query `j` of a group of `m` sees, in the group's coordinates."""
        first = j - j % self.stride
        if self.causal:
            leader = min(first + self.stride - 1, m - 1)
            return max(leader - self.kernel + 1, 0), j + 1
        leader = min(first + self.stride // 2, m - 1)
        start = min(max(leader - self.kernel // 2, 0), m - self.kernel)
        return start, start + self.kernel

    def reach(self, lo: int, hi: int) -> tuple[int, int]:
        """The smallest interval of positions that holds every key which the queries in `[lo, hi)` see."""
        if lo >= hi:
            return lo, lo
        d = self.dilation
        heads = [(i // d, i % d) for i in range(lo, min(hi, lo + d))]
        tails = [(i // d, i % d) for i in range(max(lo, hi - d), hi)]
        first = min(self.window(j, self.group_size(g))[0] * d + g for j, g in heads)
        last = max((self.window(j, self.group_size(g))[1] - 1) * d + g for j, g in tails)
        return first, last + 1


@dataclass(frozen=True)
class Block:
    """Neighbouring queries of one dilation group, with the union of their windows.

    Attributes:
        queries, keys: where they lie in the local tensors (start, stop, step).
        windows: per query its first key and one past its last, counted from the first key of the union.
        shift: coordinate of the first key minus that of the first query.
    """

    queries: tuple[int, int, int]
    keys: tuple[int, int, int]
    windows: tuple[tuple[int, int], ...]
    shift: int

    @property
    def num_queries(self) -> int:
        """Queries of the block."""
        return len(self.windows)

    @cached_property
    def num_keys(self) -> int:
        """Keys in the union."""
        return max(end for _, end in self.windows)

    def moved(self, by: int) -> Block:
        """The same block `by` positions further on."""
        (q, q_end, step), (k, k_end, _) = self.queries, self.keys
        return replace(self, queries=(q + by, q_end + by, step), keys=(k + by, k_end + by, step))


@lru_cache(maxsize=4096)
def blocks_of(axis: Axis, q_start: int, q_size: int, k_start: int, width: int) -> tuple[Block, ...]:
    """The local queries `[q_start, q_start + q_size)` of one dim in blocks of at most `width`.

    Args:
        k_start: position of the first local key; the local keys hold `axis.reach(...)` of the queries.
    """
    found = []
    d = axis.dilation
    for group in range(d):
        m = axis.group_size(group)
        first = -(-(q_start - group) // d)
        last = -(-(q_start + q_size - group) // d)
        for a in range(first, last, width):
            b = min(a + width, last)
            windows = [axis.window(j, m) for j in range(a, b)]
            base, end = windows[0][0], windows[-1][1]
            found.append(
                Block(
                    (a * d + group - q_start, (b - 1) * d + group - q_start + 1, d),
                    (base * d + group - k_start, (end - 1) * d + group - k_start + 1, d),
                    tuple((s - base, e - base) for s, e in windows),
                    base - a,
                )
            )
    return tuple(found)


@lru_cache(maxsize=1024)
def block_widths(axes: tuple[Axis, ...], q_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Queries per block along each dim: wide blocks attend to keys in vain, narrow ones copy each key many times."""
    choices = []
    for axis, size in zip(axes, q_sizes, strict=True):
        longest = max(1, -(-size // axis.dilation))
        powers = [2**i for i in range(longest.bit_length())]
        widths = {min(longest, -(-w // axis.stride) * axis.stride) for w in powers} | {min(longest, MAX_QUERIES)}
        choices.append(sorted(widths))

    def cost(widths: Sequence[int]) -> tuple[float, int]:
        queries = math.prod(widths)
        keys = math.prod(min(w + a.kernel + a.stride - 2, a.group_size(0)) for w, a in zip(widths, axes, strict=True))
        return keys * (1 + COPY_COST / queries), -queries

    fitting = [w for w in itertools.product(*choices) if math.prod(w) <= MAX_QUERIES]
    return min(fitting, key=cost)
