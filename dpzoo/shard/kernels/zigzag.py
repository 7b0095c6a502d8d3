"""Equal work for every rank under a causal mask: rank r takes the r-th chunk from the front and the r-th from the back.

With contiguous shards the first rank sees few keys and the last one all of them. The sequence is cut into twice as many
chunks as there are ranks, and each rank holds a short and a long one for the duration of the call (the layout of Liu
and Abbeel's causal ring in Llama 3 context parallelism, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from torch import Tensor

from dpzoo.shard.exchange import Wanted, exchange, exchange_back
from dpzoo.shard.partition import Sizes, even_sizes, own_intervals


def contiguous(sizes: Sizes) -> Wanted:
    """Every rank has the one interval of its shard."""
    return tuple((i,) for i in own_intervals(sizes))


def zigzag(total: int, ranks: int) -> Wanted:
    """The two intervals of each rank."""
    chunks = own_intervals(even_sizes(total, 2 * ranks))
    return tuple((chunks[r], chunks[-1 - r]) for r in range(ranks))


class Sequence:
    """One sequence dim: how it is cut, and how it lies during the call."""

    def __init__(self, sizes: Sizes, group: str, balanced: bool) -> None:
        self.sizes, self.group, self.balanced = sizes, group, balanced
        self.held = zigzag(sum(sizes), len(sizes)) if balanced else contiguous(sizes)
        self.lengths = tuple(sum(hi - lo for lo, hi in intervals) for intervals in self.held)

    def enter(self, t: Tensor) -> Tensor:
        """This rank's rows (dim 2) during the call, given its shard."""
        return exchange(t, 2, self.sizes, self.held, self.group) if self.balanced else t

    def leave(self, t: Tensor) -> Tensor:
        """The shard, given the rows held during the call."""
        return exchange_back(t, 2, self.sizes, self.held, self.group) if self.balanced else t
