"""Noise levels: how they are drawn in training, and the steps from the highest to none in sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NoiseLevels(Protocol):
    """A distribution of noise levels."""

    def draw(self, like: Tensor) -> Tensor:
        """One level for each sample of ``like (B, ...)``: ``(B,)``.

        The levels are drawn by ``like``, whose kind knows what is shared: all ranks that hold a part of a sample find
        the same level.
        """


@dataclass(frozen=True)
class LogNormal:
    """``log(sigma)`` is normal: EDM's choice for pictures (arXiv:2206.00364, table 1).

    Raises:
        ValueError: ``std`` that is not positive.
    """

    mean: float = -1.2
    std: float = 1.2

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"LogNormal: std must be > 0, got {self.std}")

    def draw(self, like: Tensor) -> Tensor:
        """One level per sample, ``(B,)``."""
        return _empty(like).normal_(self.mean, self.std).exp()


@dataclass(frozen=True)
class LogUniform:
    """``log(sigma)`` is uniform between two levels: all scales alike, or one expert's range.

    Raises:
        ValueError: unless ``0 < low < high``.
    """

    low: float = 0.002
    high: float = 80.0

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"LogUniform needs 0 < low < high, got low={self.low}, high={self.high}")

    def draw(self, like: Tensor) -> Tensor:
        """One level per sample, ``(B,)``."""
        return _empty(like).uniform_(math.log(self.low), math.log(self.high)).exp()


def _empty(like: Tensor) -> Tensor:
    return like.new_empty((like.shape[0],), dtype=torch.promote_types(like.dtype, torch.float32))


def edm_sigmas(steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, rho: float = 7.0) -> list[float]:
    """The levels that a sampler visits, from ``sigma_max`` down to ``sigma_min`` and then 0: ``steps + 1`` numbers.

    Their ``rho``-th roots are evenly spaced (arXiv:2206.00364, equation 5); a large ``rho`` has more of the low levels.

    Raises:
        ValueError: ``steps < 1``, or not ``0 < sigma_min < sigma_max``, or ``rho <= 0``.
    """
    if steps < 1 or not 0 < sigma_min < sigma_max < math.inf or not rho > 0:
        raise ValueError(
            f"a schedule needs steps >= 1, 0 < sigma_min < sigma_max and rho > 0; got steps={steps}, "
            f"sigma_min={sigma_min}, sigma_max={sigma_max}, rho={rho}"
        )
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    inner = [(first + i / (steps - 1) * (last - first)) ** rho for i in range(1, steps - 1)]
    return [sigma_max, *inner, *([sigma_min] if steps > 1 else []), 0.0]
