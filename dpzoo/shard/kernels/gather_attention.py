"""Attention with keys and values gathered: one message each way, the quickest while they are small.

Shapes: see `attention_method.py`.
"""

from __future__ import annotations

from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.kernels.attention_method import KEEP_BYTES, Gradients, as_dtype, packed, parted
from dpzoo.shard.kernels.attention_parts import Rules, attend, attend_backward
from dpzoo.shard.kernels.zigzag import Sequence
from dpzoo.shard.partition import Sizes


class GatherAttention:
    """Queries and keys cut over one group; with `balanced`, queries lie in zigzag during the call."""

    def __init__(self, q_sizes: Sizes, kv_sizes: Sizes, group: str, balanced: bool = False) -> None:
        self.group, self.me, self.kv_sizes = group, comm.group_rank(group), kv_sizes
        self.queries, self.columns = Sequence(q_sizes, group, balanced), ((0, sum(kv_sizes)),)

    def _whole(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, in memory token by token: of one batch entry the parts lie there as they arrive."""
        kv = comm.all_gather_v(packed(k.transpose(1, 2), v.transpose(1, 2)), 1, self.kv_sizes, self.group)
        return parted(kv.transpose(1, 2), k.shape[-1])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Method.forward`; keeps the output and log-sum-exp, and what was gathered if it is small."""
        (keys, values), rows = self._whole(k, v), self.queries.held[self.me]
        out, lse = attend(self.queries.enter(q), keys, values, rows, self.columns, rules, mask)
        small = keys.nbytes + values.nbytes <= KEEP_BYTES
        return self.queries.leave(out), (out, lse, keys, values) if small else (out, lse)

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
        """See `Method.backward`."""
        out, lse, *whole = kept
        keys, values = whole or self._whole(k, v)
        q, g, rows = self.queries.enter(q), self.queries.enter(g), self.queries.held[self.me]
        dq, dk, dv, dmask = attend_backward(
            g, q, keys, values, out, lse, rows, self.columns, rules, mask, mask_grad
        )  # fmt: skip
        share = as_dtype(packed(dk.transpose(1, 2), dv.transpose(1, 2)), k.dtype)
        own = comm.reduce_scatter_v(share, 1, self.kv_sizes, self.group)
        dk, dv = parted(own.transpose(1, 2), k.shape[-1])
        return self.queries.leave(as_dtype(dq, q.dtype)), dk, dv, dmask
