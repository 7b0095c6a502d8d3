"""A number per sample (diffusion time, noise level) as a vector of sines and cosines."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class PositionalTime(nn.Module):
    """Sines and cosines of geometrically spaced frequencies, from 1 down to 1 / ``max_period`` (both included).

    As in Vaswani et al. 2017 (arXiv:1706.03762) and Ho et al. 2020 (arXiv:2006.11239).

    Shape: ``(B,)`` -> ``(B, dim)``: all sines, then all cosines. It has no weights.
    """

    def __init__(self, dim: int, max_period: float = 10000.0) -> None:
        super().__init__()
        _check_even(dim)
        self.count, self.max_period = dim // 2, max_period

    def forward(self, t: Tensor) -> Tensor:
        """Embed each number."""
        exponent = torch.arange(self.count, device=t.device, dtype=torch.float32) / max(self.count - 1, 1)
        return _sin_cos(t, torch.exp(-math.log(self.max_period) * exponent))


class FourierTime(nn.Module):
    """Sines and cosines of fixed random frequencies (Tancik et al. 2020, arXiv:2006.10739; NCSN++).

    Shape: ``(B,)`` -> ``(B, dim)``: all sines, then all cosines. Keys: ``freqs``, a buffer of (dim / 2,).
    """

    freqs: Tensor

    def __init__(self, dim: int, scale: float = 16.0) -> None:
        super().__init__()
        _check_even(dim)
        self.register_buffer("freqs", torch.randn(dim // 2) * scale)

    def forward(self, t: Tensor) -> Tensor:
        """Embed each number."""
        return _sin_cos(t, 2 * math.pi * self.freqs)


def _sin_cos(t: Tensor, freqs: Tensor) -> Tensor:
    angles = t[:, None] * freqs.to(t.dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _check_even(dim: int) -> None:
    if dim < 2 or dim % 2:
        raise ValueError(f"a sine-cosine embedding needs an even number of channels, got {dim}")
