"""Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889) for shards of any length.

Keys and values go once around the ring; each rank attends to the block it holds while the next one travels. Blocks
are merged by their log-sum-exp in float32 or better. The backward pass sends the blocks around again, their gradients
one step behind, and uses the global log-sum-exp, so that it is exact.

Shapes: q (..., n, d), k (..., m, d), v (..., m, e); n and m differ per rank and may be 0. Leading dims of k and v may
be 1 where those of q are not: what travels is not expanded.
"""

from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.partition import Sizes, starts


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, q_sizes: Sizes, kv_sizes: Sizes, group: str, causal: bool, scale: float
) -> Tensor:
    """softmax(q k^T * scale) v over the keys of all ranks; differentiable.

    Args:
        q_sizes, kv_sizes: lengths of the query and key shards of every rank of the group.
        causal: query i sees keys j <= i, by global index.
    """
    return _RingAttention.apply(q, k, v, q_sizes, kv_sizes, group, causal, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_sizes: Sizes,
        kv_sizes: Sizes,
        group: str,
        causal: bool,
        scale: float,
    ) -> Tensor:
        ring = _Ring(q_sizes, kv_sizes, group, causal, scale)
        out, lse = ring.forward(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return (*ctx.ring.backward(g, q, k, v, out, lse), None, None, None, None, None)


class _Ring:
    """Who holds which keys at which step."""

    def __init__(self, q_sizes: Sizes, kv_sizes: Sizes, group: str, causal: bool, scale: float) -> None:
        self.group, self.causal, self.scale, self.kv_sizes = group, causal, scale, kv_sizes
        self.n, self.me = comm.group_size(group), comm.group_rank(group)
        self.q_at, self.kv_at = starts(q_sizes)[self.me], starts(kv_sizes)

    def owner(self, step: int) -> int:
        """Whose block this rank holds at a step."""
        return (self.me - step) % self.n

    def _next_shape(self, t: Tensor, step: int) -> tuple[int, ...]:
        return (*t.shape[:-2], self.kv_sizes[self.owner(step)], t.shape[-1])

    def _sees(self, q: Tensor, owner: int) -> bool:
        """False where a causal mask hides the whole block (or one side is empty): nothing to compute."""
        if not q.shape[-2] or not self.kv_sizes[owner]:
            return False
        return not self.causal or self.kv_at[owner] < self.q_at + q.shape[-2]

    def _scores(self, q: Tensor, k: Tensor, owner: int) -> Tensor:
        s = _wide(q) @ _wide(k).transpose(-1, -2) * self.scale
        if self.causal and self.kv_at[owner] + k.shape[-2] > self.q_at:
            rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1) + self.q_at
            columns = torch.arange(k.shape[-2], device=q.device) + self.kv_at[owner]
            s = s.masked_fill(columns > rows, float("-inf"))
        return s

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of this rank's queries."""
        out = _wide(q).new_zeros((*q.shape[:-1], v.shape[-1]))
        lse = _wide(q).new_full(q.shape[:-1], float("-inf"))
        for step in range(self.n):
            last = step == self.n - 1
            pending = None if last else [comm.shift(t, self._next_shape(t, step + 1), self.group) for t in (k, v)]
            owner = self.owner(step)
            if self._sees(q, owner):
                scores = self._scores(q, k, owner)
                block_lse = torch.logsumexp(scores, -1)
                finite = torch.where(block_lse.isinf(), 0.0, block_lse)
                out, lse = merge(out, lse, (scores - finite.unsqueeze(-1)).exp() @ _wide(v), block_lse)
            if pending is not None:
                k, v = (p.wait() for p in pending)
        return out, lse

    def backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; those of k and v travel with their block until they are home."""
        g = _wide(g)
        delta = (g * out).sum(-1, keepdim=True)
        finite = torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1)
        dq = torch.zeros_like(_wide(q))
        home: list[Any] | None = None
        for step in range(self.n):
            last = step == self.n - 1
            pending = None if last else [comm.shift(t, self._next_shape(t, step + 1), self.group) for t in (k, v)]
            owner = self.owner(step)
            dk, dv = torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
            if self._sees(q, owner):
                p = (self._scores(q, k, owner) - finite).exp()
                ds = p * (g @ _wide(v).transpose(-1, -2) - delta) * self.scale
                dq += ds @ _wide(k)
                dk = (ds.transpose(-1, -2) @ _wide(q)).sum_to_size(k.shape)
                dv = (p.transpose(-1, -2) @ g).sum_to_size(v.shape)
            if home is not None:
                before_k, before_v = (h.wait() for h in home)
                dk, dv = dk + before_k, dv + before_v
            home = [comm.shift(t, self._next_shape(t, step + 1), self.group) for t in (dk, dv)]
            if pending is not None:
                k, v = (x.wait() for x in pending)
        assert home is not None
        dk, dv = (h.wait() for h in home)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join two partial attentions of the same queries; safe where either saw nothing (lse = -inf)."""
    total = torch.logaddexp(lse, block_lse)
    base = torch.where(total.isinf(), 0.0, total)
    return out * (lse - base).exp().unsqueeze(-1) + block * (block_lse - base).exp().unsqueeze(-1), total


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
