"""Attention of queries that every rank holds (latents, class tokens) to keys that are cut: each rank sees its own keys.

The parts are joined by their log-sum-exp with two small sums over the ranks, so that all of them hold the same bits;
keys and values never move. The gradient of the queries is a sum over the ranks, left to the caller; those of keys and
values are complete where they are.

Shapes: see `attention_method.py`; q is the same on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.kernels.attention_block import NEVER, wide
from dpzoo.shard.kernels.attention_method import Gradients
from dpzoo.shard.kernels.attention_parts import Rules, attend, attend_backward
from dpzoo.shard.partition import Interval, Sizes, own_intervals


class SplitKeys:
    """Keys cut over one group, which all ranks meet with the queries of the global interval `rows`."""

    def __init__(self, rows: Interval, kv_sizes: Sizes, group: str) -> None:
        self.group, self.rows = group, (rows,)
        self.columns = (own_intervals(kv_sizes)[comm.group_rank(group)],)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Method.forward`; keeps the output and log-sum-exp over all ranks."""
        out, lse = attend(q, k, v, self.rows, self.columns, rules, mask, self.columns[0][0])
        highest = comm.all_reduce(lse.contiguous(), self.group, "max")
        weight = (lse - highest.masked_fill(highest == NEVER, 0.0)).exp().unsqueeze(-1)
        total = comm.all_reduce(torch.cat((wide(out) * weight, weight), -1), self.group)
        sums = total[..., -1:]
        out = (total[..., :-1] / sums.masked_fill(sums == 0.0, 1.0)).to(q.dtype)
        return out, (out, highest + sums.squeeze(-1).log())

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        kept: tuple[Tensor, ...],
        rules: Rules,
        mask_grad: bool,
    ) -> Gradients:
        """See `Method.backward`; the gradient of q is what this rank's keys add."""
        out, lse = kept
        at = self.columns[0][0]
        return attend_backward(g, q, k, v, out, lse, self.rows, self.columns, rules, mask, mask_grad, at)
