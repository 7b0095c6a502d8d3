"""What the ways to bring keys to queries have in common: their calls, and keys and values that travel as one tensor.

Shapes: this rank's part, q (b, h, n, d), k (b, h / g, m, d), v (b, h / g, m, e), mask broadcastable to
(b, h, n, all keys); n and m differ per rank and may be 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dpzoo.shard.kernels.attention_parts import Rules

KEEP_BYTES = 8 * 2**20  # what was received in forward is kept for backward up to this size, and fetched again beyond
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Method(Protocol):
    """One way; made once per layout, used for every call with it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """This rank's output, and what `backward` wants to have kept."""
        ...

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
        """Gradients of this rank's parts; of the mask, if asked for, what its own queries and keys add."""
        ...


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in a dtype; where it has that dtype, without the microsecond that `to` takes to find out."""
    return t if t.dtype is dtype else t.to(dtype)


def packed(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values side by side: one message instead of two."""
    return torch.cat((k, v), -1)


def parted(kv: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The keys (of head dim `width`) and values of a pack."""
    k, v = kv.split_with_sizes((width, kv.shape[-1] - width), -1)
    return k, v
