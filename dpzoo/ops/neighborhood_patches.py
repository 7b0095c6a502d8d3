"""The blocks of a grid in patches: blocks with the same mask that lie regularly, so that one view holds them all.

Along a dim the blocks with one mask follow each other without a gap, in each dilation group; the groups are neighbours.
Where they are not of one size, or begin elsewhere, there are some patches more. Integers only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dpzoo.ops.neighborhood_window import Axis, Block, block_widths, blocks_of

CALL_COST = 10  # a call more costs about as much time as adding up the gradients of its keys in 10 parts more

Job = tuple[Block, ...]  # one block per dim


@dataclass(frozen=True)
class View:
    """A view that holds all blocks of a patch.

    Attributes:
        size, stride: (B, *counts, *size of a block, ...).
        start: of the first element, from where the tensor begins.
        stacked: the size with the blocks in one dim, and with the positions of a block: (B * blocks, positions, ...).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stacked: tuple[int, ...]


@dataclass(frozen=True)
class Patch:
    """Blocks with the same mask that lie regularly in the grid.

    Attributes:
        first: the first of them.
        counts, steps: how many there are and how far apart. Two numbers per dim: of the dilation groups, and of the
            blocks of each group.
    """

    first: Job
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    @cached_property
    def overlaps(self) -> tuple[int, ...]:
        """By `counts`: of how many neighbouring blocks one key can be. Dilation groups share none."""
        blocks = zip(self.first, self.steps[1::2], strict=True)
        return tuple(n for b, step in blocks for n in (1, -(-b.num_keys * b.keys[2] // step)))

    @cached_property
    def apart(self) -> tuple[tuple[slice, ...], ...]:
        """The patch in parts, each an index into `counts`: the blocks of a part have no key in common."""
        pairs = zip(self.counts, self.overlaps, strict=True)
        return tuple(itertools.product(*([slice(i, None, n) for i in range(min(count, n))] for count, n in pairs)))

    @cached_property
    def _views(self) -> dict[object, View]:
        return {}

    def view_of(self, shape: tuple[int, ...], stride: tuple[int, ...], which: str) -> View:
        """How the blocks' "queries" or "keys" lie in a tensor (B, *grid, ...) of this shape and stride."""
        key = (which, shape, stride)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._view_of(shape, stride, [getattr(block, which) for block in self.first])
        return view

    def _view_of(self, shape: Sequence[int], stride: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> View:
        ndim = len(spans)
        grid, others = stride[1 : 1 + ndim], stride[1 + ndim :]
        between = [step * grid[i // 2] for i, step in enumerate(self.steps)]
        inside = [step * s for (_, _, step), s in zip(spans, grid, strict=True)]
        start = sum(first * s for (first, _, _), s in zip(spans, grid, strict=True))
        sizes, each = [len(range(*span)) for span in spans], shape[1 + ndim :]
        stacked = (shape[0] * math.prod(self.counts), math.prod(sizes), *each)
        return View((shape[0], *self.counts, *sizes, *each), (stride[0], *between, *inside, *others), start, stacked)

    def cut(self, room: int) -> Iterator[Patch]:
        """In patches that have at most `room` blocks each."""
        sizes = self._cut_sizes(room)
        for start in itertools.product(*(range(0, n, size) for n, size in zip(self.counts, sizes, strict=True))):
            by = [i * step for i, step in zip(start, self.steps, strict=True)]
            first = tuple(b.moved(g + s) for b, g, s in zip(self.first, by[::2], by[1::2], strict=True))
            counts = (min(size, n - i) for i, n, size in zip(start, self.counts, sizes, strict=True))
            yield Patch(first, tuple(counts), self.steps)

    def _cut_sizes(self, room: int) -> tuple[int, ...]:
        """The counts of such patches, so that there are few, and few parts with no key in common."""
        if math.prod(self.counts) <= room:
            return self.counts
        # Even cuts: the sizes that any number of patches gives.
        choices = [sorted({-(-n // patches) for patches in range(1, n + 1)}) for n in self.counts]

        def cost(sizes: Sequence[int]) -> int:
            patches = math.prod(-(-n // size) for n, size in zip(self.counts, sizes, strict=True))
            return patches * (CALL_COST + math.prod(map(min, sizes, self.overlaps)))

        return min((sizes for sizes in itertools.product(*choices) if math.prod(sizes) <= room), key=cost)


@lru_cache(maxsize=256)
def alike_patches(
    axes: tuple[Axis, ...],
    q_start: tuple[int, ...],
    q_sizes: tuple[int, ...],
    k_start: tuple[int, ...],
    most_keys: int,
    most_scores: int,
) -> tuple[tuple[Patch, ...], ...]:
    """All blocks of the local queries; those with the same mask together.

    Args:
        most_keys, most_scores: of a patch, unless it is a single block.
    """
    widths = block_widths(axes, q_sizes)
    lines = [_alike_lines(*part) for part in zip(axes, q_start, q_sizes, k_start, widths, strict=True)]
    found = []
    for alike in itertools.product(*lines):
        first = [patches[0].first[0] for patches in alike]
        keys, queries = (math.prod(b.num_keys for b in first), math.prod(b.num_queries for b in first))
        room = max(1, min(most_keys // keys, most_scores // (keys * queries)))
        found.append(tuple(part for each in itertools.product(*alike) for part in _crossed(each).cut(room)))
    return tuple(found)


def _alike_lines(axis: Axis, q_start: int, q_size: int, k_start: int, width: int) -> list[list[Patch]]:
    """Along one dim the patches of every mask: mostly one, some where the dilation groups are not of one size."""
    alike: dict[object, list[Block]] = {}
    for block in blocks_of(axis, q_start, q_size, k_start, width):
        alike.setdefault((block.windows, block.shift), []).append(block)
    return [list(_regular(blocks, width * axis.dilation)) for blocks in alike.values()]


def _regular(blocks: Sequence[Block], step: int) -> Iterator[Patch]:
    """Blocks of one dim as patches: runs of blocks that are `step` apart, then equal runs that are neighbours."""
    numbered = itertools.groupby(enumerate(blocks), lambda at: at[1].queries[0] - at[0] * step)
    runs = sorted(([block for _, block in run] for _, run in numbered), key=lambda run: run[0].queries[0])
    alike = itertools.groupby(enumerate(runs), lambda at: (at[1][0].queries[0] - at[0], len(at[1])))
    for (_, count), neighbours in alike:
        (_, (first, *_)), *others = neighbours
        yield Patch((first,), (1 + len(others), count), (1, step))


def _crossed(lines: Sequence[Patch]) -> Patch:
    """The patch of one in each dim."""
    first, counts, steps = zip(*((p.first, p.counts, p.steps) for p in lines), strict=True)
    return Patch(sum(first, ()), sum(counts, ()), sum(steps, ()))
