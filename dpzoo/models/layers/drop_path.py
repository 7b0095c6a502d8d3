"""Stochastic depth (Huang 2016, arXiv:1603.09382): leave out a residual branch for whole samples at random."""

from __future__ import annotations

from torch import Tensor, nn


class DropPath(nn.Module):
    """Zero a sample's branch with probability ``drop_prob`` in training and scale the kept ones by ``1/(1-drop_prob)``.

    Args:
        drop_prob: In ``[0, 1)``.

    Shape: ``(B, ...)`` -> the same. One draw per sample, so that every token of it is kept or dropped together.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"drop_prob must lie in [0, 1), got {drop_prob}")
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples while training; the identity otherwise."""
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"drop_prob={self.drop_prob:g}"
