"""Which samples of an entry are run, and in which layouts: integers and strings only, the same in every process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.utils._pytree import tree_leaves

from tests.conformance.catalog import Entry, Sample

LAYOUTS = ("even", "uneven", "empty")


@dataclass(frozen=True)
class Case:
    """One sample with one layout.  ``alike``: tensors of the first tensor's shape are sharded as it is."""

    entry: str
    sample: int
    dim: int
    layout: str
    alike: bool
    sizes: tuple[int, ...]

    @property
    def key(self) -> str:
        """``op|variant|sample|dim|layout|ranks``."""
        layout = self.layout + ("+alike" if self.alike else "")
        return f"{self.entry}|{self.sample}|{self.dim}|{layout}|{len(self.sizes)}"

    def chosen(self, every: int) -> bool:
        """Whether the case is in the deterministic subset of one case in ``every``."""
        return crc32(self.key.encode()) % every == 0


def sizes_for(layout: str, size: int, ranks: int, parity: int) -> tuple[int, ...] | None:
    """How ``size`` rows are cut over the ranks, or None where the layout does not exist.

    ``parity`` turns the uneven and empty layouts around, so that the large shard is not always the first.
    """
    if layout == "even":
        return tuple(size // ranks + (r < size % ranks) for r in range(ranks)) if size >= ranks else None
    if layout == "uneven":
        if size <= ranks:
            return None
        small = max(1, size // (3 * ranks))
        sizes = [small] * (ranks - 1)
        sizes.append(size - sum(sizes))
        balanced = size // ranks
        if max(sizes) - balanced <= (size % ranks > 0):
            return None
        return tuple(sizes if parity % 2 else sizes[::-1])
    sizes = [size // 2, *[0] * (ranks - 2), size - size // 2] if ranks > 2 else [size, 0]
    return tuple(sizes[::-1] if parity % 2 else sizes)


def shardable(tensor: Any) -> bool:
    """Whether a leaf of the arguments can be cut along a dim."""
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.ndim > 0


def primary(sample: Sample) -> torch.Tensor | None:
    """The first tensor of the arguments that has a dim: the one that is always sharded."""
    return next((leaf for leaf in tree_leaves((sample.args, sample.kwargs)) if shardable(leaf)), None)


def _signature(sample: Sample) -> tuple[Any, ...]:
    def describe(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return ("tensor", leaf.ndim, leaf.numel() == 0, leaf.requires_grad)
        return (type(leaf).__name__, leaf if isinstance(leaf, (bool, str, type(None))) else "")

    leaves = tuple(describe(leaf) for leaf in tree_leaves(sample.args))
    return leaves, tuple((name, describe(value)) for name, value in sorted(sample.kwargs.items()))


def select_samples(samples: list[Sample], limit: int) -> list[int]:
    """At most ``limit`` indices: first one of each kind of call, then the others, evenly spread.

    Samples without a shardable tensor are left out: there is nothing to shard.
    """
    usable = [i for i, sample in enumerate(samples) if primary(sample) is not None]
    if len(usable) <= limit:
        return usable
    kinds: dict[tuple[Any, ...], int] = {}
    for i in usable:
        kinds.setdefault(_signature(samples[i]), i)
    firsts = _spread(list(kinds.values()), limit)
    rest = [i for i in usable if i not in set(firsts)]
    return sorted(firsts + _spread(rest, limit - len(firsts)))


def _spread(indices: list[int], count: int) -> list[int]:
    if count >= len(indices):
        return indices
    return [indices[i * len(indices) // count] for i in range(count)]


def cases_of(entry: Entry, samples: list[Sample], limit: int, ranks: int, layouts: tuple[str, ...]) -> Iterator[Case]:
    """All cases of an entry on ``ranks`` ranks, in a fixed order."""
    for index in select_samples(samples, limit):
        first = primary(samples[index])
        assert first is not None
        leaves = tree_leaves((samples[index].args, samples[index].kwargs))
        has_alike = any(t is not first and shardable(t) and t.shape == first.shape for t in leaves)
        for dim in range(first.ndim):
            for layout in layouts:
                sizes = sizes_for(layout, first.shape[dim], ranks, index + dim)
                if sizes is None:
                    continue
                yield Case(entry.key, index, dim, layout, False, sizes)
                if has_alike:
                    yield Case(entry.key, index, dim, layout, True, sizes)
