"""Several denoisers as one, each for its range of noise levels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dpzoo.models.hub import HubMixin


class StagedExperts(HubMixin, nn.Module):
    """A denoiser that hands each call to the expert for its noise level (Balaji et al. 2022, arXiv:2211.01324).

    A level on a border belongs to the higher range. Experts are trained one by one, each with
    ``EDMLoss(LogUniform(sigma_min, sigma_max))``.

    Args:
        stages: ``(denoiser, sigma_min, sigma_max)`` in any order. The ranges must touch and not overlap.

    Shape: as the experts; ``sigma`` is a number or a tensor whose entries all fall in one range. Keys:
    ``experts.{i}.*``, lowest range first.

    Raises:
        ValueError: ranges with a gap or an overlap; in ``forward``, a level that no expert was made for. Churn raises
            a level by a factor of up to sqrt(2); the highest expert takes that much beyond its range.
    """

    def __init__(self, stages: Sequence[tuple[nn.Module, float, float]]) -> None:
        super().__init__()
        stages = sorted(stages, key=lambda stage: stage[1])
        _check(stages)
        self.experts = nn.ModuleList(expert for expert, _, _ in stages)
        self.borders = (stages[0][1], *(high for _, _, high in stages))

    def expert_for(self, sigma: float) -> nn.Module:
        """The expert of a noise level."""
        return self.experts[self._stage(sigma)]

    def forward(self, x: Tensor, sigma: Tensor | float, *conditions: Any, **named: Any) -> Tensor:
        """Denoise with the expert of ``sigma``."""
        levels = (float(sigma.min()), float(sigma.max())) if isinstance(sigma, Tensor) else (sigma, sigma)
        stage, other = (self._stage(level) for level in levels)
        if stage != other:
            raise ValueError(
                f"StagedExperts: the samples' noise levels lie between {levels[0]:g} and {levels[1]:g}, in the ranges "
                f"of several experts (borders {self.borders}); call it with one level at a time"
            )
        return self.experts[stage](x, sigma, *conditions, **named)

    def _stage(self, sigma: float) -> int:
        lowest, highest = self.borders[0], self.borders[-1]
        slack = 1e-6  # a level that went through float32
        if not lowest * (1 - slack) <= sigma <= highest * math.sqrt(2.0) * (1 + slack):
            raise ValueError(
                f"StagedExperts: no expert for the noise level {sigma:g}; the experts cover {lowest:g} to {highest:g}"
            )
        return sum(sigma >= border for border in self.borders[1:-1])


def _check(stages: Sequence[tuple[nn.Module, float, float]]) -> None:
    ranges = [(low, high) for _, low, high in stages]
    if not ranges or not all(0 <= low < high for low, high in ranges):
        raise ValueError(f"StagedExperts needs one range 0 <= sigma_min < sigma_max per expert, got {ranges}")
    for (_, high), (low, _) in zip(ranges, ranges[1:], strict=False):
        if not math.isclose(high, low, rel_tol=1e-6):
            raise ValueError(
                f"StagedExperts: the ranges {ranges} {'overlap' if high > low else 'leave a gap'} between {high:g} and "
                f"{low:g}"
            )
