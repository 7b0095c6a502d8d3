"""Dropout of attention weights that does not depend on how queries, keys and heads are cut.

Whether a weight is kept follows from its place in the global (..., queries, keys) matrix, so that any rank can find it
again, in any block, also in the backward pass; nothing of the size of the matrix is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpzoo.shard import random
from dpzoo.shard.partition import Interval


@dataclass(frozen=True)
class Dropout:
    """Which weights are kept.

    Attributes:
        key: of the draw, the same on every rank.
        p: probability of being dropped.
        lead: global flat index of the leading dims (batch, heads) of this rank's part; shape (b, h).
        queries, keys: global lengths.
    """

    key: random.Key
    p: float
    lead: Tensor
    queries: int
    keys: int

    def factors(self, rows: Interval, columns: Interval, like: Tensor) -> Tensor:
        """Factors of a rectangle of the global matrix; see `factors_at`."""
        device = like.device
        return self.factors_at(torch.arange(*rows, device=device), torch.arange(*columns, device=device), like)

    def factors_at(self, rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
        """0 or 1 / (1 - p) for global rows and columns, in the dtype of `like`; shape (*lead, rows, columns)."""
        index = (self.lead[..., None, None] * self.queries + rows.unsqueeze(-1)) * self.keys + columns
        kept = random.chance_at(self.key, index, 1.0 - self.p)
        return kept.to(like.dtype) * (0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p))

    def of_heads(self, dim: int, at: int, n: int) -> Dropout:
        """For some of the heads (dim 1) or batch entries (dim 0) only."""
        return replace(self, lead=self.lead.narrow(dim, at, n))
