"""LayerScale (Touvron 2021, arXiv:2103.17239): a learned factor per channel at the end of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LayerScale(nn.Module):
    """``x * gamma`` over the last dim. Shape: ``(..., dim)`` -> the same. Key: ``gamma``."""

    def __init__(self, dim: int, init_value: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init_value)))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each channel."""
        return x * self.gamma
