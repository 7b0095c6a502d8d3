"""Ulysses attention (Jacobs et al. 2023, arXiv:2309.14509): heads instead of tokens are cut while the scores are made.

One exchange brings each rank its heads of all queries, keys and values, a second one brings the output back. Every rank
has the same work under a causal mask and for shards of any length. Heads need not divide by the ranks: they are cut as
evenly as they go. Where batch entries are cut instead (dim 0), everything is the same.

Shapes: see `attention_method.py`; here the mask has all rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.kernels.attention_method import KEEP_BYTES, Gradients
from dpzoo.shard.kernels.attention_parts import Rules, attend, attend_backward
from dpzoo.shard.kernels.together import all_to_all_together
from dpzoo.shard.partition import Sizes, even_sizes, starts


class UlyssesAttention:
    """Queries and keys cut over one group; `dim` (1: heads, 0: batch) is cut instead during the call.

    Args:
        heads: length of `dim` in keys and values, on this rank.
        group_of_heads: how many query heads a key head serves.
    """

    def __init__(self, q_sizes: Sizes, kv_sizes: Sizes, group: str, dim: int, heads: int, group_of_heads: int) -> None:
        self.q_sizes, self.kv_sizes, self.group, self.dim = q_sizes, kv_sizes, group, dim
        me = comm.group_rank(group)
        self.kv_heads = even_sizes(heads, len(kv_sizes))
        times = group_of_heads if dim == 1 else 1
        self.q_heads = tuple(times * n for n in self.kv_heads)
        self.at, self.mine = starts(self.q_heads)[me], self.q_heads[me]
        self.rows, self.columns = ((0, sum(q_sizes)),), ((0, sum(kv_sizes)),)

    def _to_heads(self, ts: Sequence[Tensor], queries: Sequence[bool]) -> list[Tensor]:
        heads = [self.q_heads if q else self.kv_heads for q in queries]
        sizes = [self.q_sizes if q else self.kv_sizes for q in queries]
        return all_to_all_together(ts, self.dim, heads, 2, sizes, self.group)

    def _to_tokens(self, ts: Sequence[Tensor], queries: Sequence[bool]) -> list[Tensor]:
        heads = [self.q_heads if q else self.kv_heads for q in queries]
        sizes = [self.q_sizes if q else self.kv_sizes for q in queries]
        return all_to_all_together(ts, 2, sizes, self.dim, heads, self.group)

    def _received_bytes(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        """What a rank receives on average: all ranks of the group have to decide alike."""
        shares = ((q, self.rows), (k, self.columns), (v, self.columns))
        elements = sum(t.shape[0] * t.shape[1] * t.shape[3] * at[0][1] for t, at in shares)
        return elements * q.element_size() // len(self.q_sizes)

    def _own(self, mask: Tensor | None, rules: Rules) -> tuple[Tensor | None, Rules]:
        """What concerns this rank's heads."""
        if mask is not None and mask.shape[self.dim] > 1:
            mask = mask.narrow(self.dim, self.at, self.mine)
        if rules.dropout is not None:
            rules = Rules(rules.scale, rules.causal, rules.dropout.of_heads(self.dim, self.at, self.mine))
        return mask, rules

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Method.forward`; keeps output and log-sum-exp of this rank's heads, and what it received if small."""
        keeps = self._received_bytes(q, k, v) <= KEEP_BYTES
        q, k, v = received = self._to_heads((q, k, v), (True, False, False))
        mask, rules = self._own(mask, rules)
        out, lse = attend(q, k, v, self.rows, self.columns, rules, mask)
        (home,) = self._to_tokens((out,), (True,))
        return home, (out, lse, *received) if keeps else (out, lse)

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
        """See `Method.backward`; the gradient of the mask has zeros for the heads of other ranks."""
        out, lse, *received = kept
        if received:
            (g,) = self._to_heads((g,), (True,))
            q, k, v = received
        else:
            g, q, k, v = self._to_heads((g, q, k, v), (True, True, False, False))
        own, rules = self._own(mask, rules)
        *found, dmask = attend_backward(
            g, q, k, v, out, lse, self.rows, self.columns, rules, own, mask_grad
        )  # fmt: skip
        dq, dk, dv = self._to_tokens([t.to(q.dtype) for t in found], (True, False, False))
        if dmask is not None and mask is not None and dmask.shape != mask.shape:
            whole = dmask.new_zeros(mask.shape)
            whole.narrow(self.dim, self.at, self.mine).copy_(dmask)
            dmask = whole
        return dq, dk, dv, dmask
