"""Adaptive layer norm: shift, scale and gate of a token's channels come from a condition, one vector per sample.

Peebles & Xie 2023 (arXiv:2212.09748) after Perez et al. 2018 (FiLM, arXiv:1709.07871). In "adaLN-zero" the layer that
makes them starts at zero, so that every block starts as the identity.
"""

from __future__ import annotations

from torch import Tensor, nn


def modulation(dim: int, count: int) -> nn.Sequential:
    """The layer from a condition ``(B, dim)`` to ``count`` vectors side by side, ``(B, count * dim)``; starts at zero.

    Keys: ``1.weight``, ``1.bias``.
    """
    linear = nn.Linear(dim, count * dim)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.SiLU(), linear)


def for_tokens(vectors: Tensor, x: Tensor, count: int) -> tuple[Tensor, ...]:
    """The `count` vectors per sample in ``(B, count * D)``, so that they broadcast against all tokens of ``x``."""
    return vectors.view(vectors.shape[0], *(1,) * (x.ndim - 2), vectors.shape[-1]).chunk(count, dim=-1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` for every token.

    Shape: ``(B, ..., D)``, and ``(B, 1, ..., D)`` for shift and scale -> ``(B, ..., D)``.
    """
    return x * (1 + scale) + shift
