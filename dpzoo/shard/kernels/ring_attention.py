"""Ring attention (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889) for shards of any length.

Keys and values go once around the ring; each rank attends to the block it holds while the next one travels. The
backward pass sends the blocks around again. The gradients of a block follow it one step behind and are home after as
many steps: each rank computes those of its own block first and keeps them, so that nothing travels a full circle.

No rank holds more than three blocks. Shapes: see `attention_method.py`.
"""

from __future__ import annotations

from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.kernels.attention_block import wide
from dpzoo.shard.kernels.attention_method import Gradients, packed, parted
from dpzoo.shard.kernels.attention_parts import Backward, Forward, Rules
from dpzoo.shard.kernels.zigzag import Sequence
from dpzoo.shard.partition import Sizes


class RingAttention:
    """Queries and keys cut over one group; with `balanced`, both lie in zigzag during the call."""

    def __init__(self, q_sizes: Sizes, kv_sizes: Sizes, group: str, balanced: bool = False) -> None:
        self.group, self.n, self.me = group, comm.group_size(group), comm.group_rank(group)
        self.queries, self.keys = Sequence(q_sizes, group, balanced), Sequence(kv_sizes, group, balanced)

    def _owner(self, step: int) -> int:
        """Whose block this rank holds at a step."""
        return (self.me - step) % self.n

    def _send(self, block: Tensor, step: int) -> comm.PendingShift | None:
        """Pass a block on after `step`, receive the one of the next step."""
        if self.n == 1:
            return None
        shape = (*block.shape[:2], self.keys.lengths[self._owner(step + 1)], block.shape[3])
        return comm.shift(block, shape, self.group)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `Method.forward`; keeps the output and log-sum-exp as they lie during the call."""
        d, e, dtype = k.shape[-1], v.shape[-1], q.dtype
        kv = self.keys.enter(packed(k, v))
        found = Forward(self.queries.enter(q), self.queries.held[self.me], rules, mask)
        for step in range(self.n):
            pending = self._send(kv, step) if step < self.n - 1 else None
            found.add(*parted(kv, d), self.keys.held[self._owner(step)])
            if pending is not None:
                kv = pending.wait()
        out, lse = found.result(e)
        out = out.to(dtype)
        return self.queries.leave(out), (out, lse)

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
        d, (out, lse) = k.shape[-1], kept
        kv = self.keys.enter(packed(k, v))
        q, g = self.queries.enter(q), self.queries.enter(g)
        work = Backward(g, q, out, lse, self.queries.held[self.me], rules, mask, mask_grad)
        own: Tensor | None = None
        behind: comm.PendingShift | None = None
        for step in range(self.n):
            pending = self._send(kv, step) if step < self.n - 1 else None
            share = wide(packed(*work.block(*parted(kv, d), self.keys.held[self._owner(step)])))
            if own is None:
                own = share
            else:
                if behind is not None:
                    share += behind.wait()
                behind = self._send(share, step)
            if pending is not None:
                kv = pending.wait()
        assert own is not None
        if behind is not None:
            own += behind.wait()
        dk, dv = parted(self.keys.leave(own), d)
        return self.queries.leave(work.dq.to(q.dtype)), dk, dv, work.dmask
