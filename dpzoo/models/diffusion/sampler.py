"""From noise to a field: Heun's method through falling noise levels, with fresh noise on the way if asked for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.models.diffusion.noise_levels import edm_sigmas

MOST_CHURN = math.sqrt(2.0) - 1.0
"""A step may raise the noise level by this share at most: the new noise is then no stronger than the old."""

Denoiser = Callable[..., Tensor]


@dataclass(frozen=True)
class EDMSampler:
    """Algorithm 2 of Karras et al. 2022 (arXiv:2206.00364); without churn it is deterministic, their algorithm 1.

    Args:
        steps: Noise levels that are visited; a run calls the denoiser ``order * steps - order + 1`` times.
        sigma_min, sigma_max, rho: Of the levels, see :func:`~dpzoo.models.diffusion.edm_sigmas`.
        order: 2 is Heun's method, 1 is Euler's.
        churn: ``S_churn``: how much noise is renewed, over all steps together. 0: nothing is random but the start.
        churn_range: Only at levels in this closed range.
        churn_noise: Deviation of the renewed noise; a little over 1 makes up for detail that a denoiser removes.
        dtype: Of the field between the calls of the denoiser. It is the sum of many small steps.

    Shape: ``sampler(denoiser, like, *conditions, mask=None, **conditions)`` with ``like (B, C, *grid)`` and ``mask (B
    or 1, C or 1, *grid)`` -> the shape of ``like``, in ``dtype``. Only shape, device and cut of ``like`` are used; each
    entry of the batch is another member. Where the mask is 0 the denoiser's answer is taken to be 0, NaN too: all
    through the run it sees 0 and noise there, as with the mask of :class:`~dpzoo.models.diffusion.EDMLoss` in
    training, and the sample is 0.

    Raises:
        ValueError: settings out of range.

    Example::

        dpzoo.shard.manual_seed(member)
        forecast = EDMSampler(steps=18, sigma_max=800.0)(model.eval(), like=state, state=state, invariant=terrain)
    """

    steps: int = 18
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    order: int = 2
    churn: float = 0.0
    churn_range: tuple[float, float] = (0.0, math.inf)
    churn_noise: float = 1.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.sigmas()
        if self.order not in (1, 2):
            raise ValueError(f"EDMSampler: order must be 1 (Euler) or 2 (Heun), got {self.order}")
        if not (self.churn >= 0 and self.churn_noise >= 0):
            raise ValueError(
                f"EDMSampler: churn and churn_noise must be >= 0, got churn={self.churn} and "
                f"churn_noise={self.churn_noise}"
            )
        if not self.dtype.is_floating_point:
            raise ValueError(f"EDMSampler: dtype must be a floating one, got {self.dtype}")

    def sigmas(self) -> list[float]:
        """The noise levels from ``sigma_max`` to 0, ``steps + 1`` of them."""
        return edm_sigmas(self.steps, self.sigma_min, self.sigma_max, self.rho)

    def __call__(
        self,
        denoiser: Denoiser,
        like: Tensor,
        *conditions: Any,
        draw: Callable[[Tensor], Tensor] = torch.randn_like,
        mask: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        """Sample; ``draw`` gives standard normal numbers in the shape (and the cut) of a tensor."""
        path = self.trajectory(denoiser, like, *conditions, draw=draw, mask=mask, **named)
        return deque(path, maxlen=1)[0][1]

    @torch.no_grad()
    def trajectory(
        self,
        denoiser: Denoiser,
        like: Tensor,
        *conditions: Any,
        draw: Callable[[Tensor], Tensor] = torch.randn_like,
        mask: Tensor | None = None,
        **named: Any,
    ) -> Iterator[tuple[float, Tensor]]:
        """The same, giving ``(noise level, field)`` at the start and after every step: for progress bars and films."""

        def denoise(x: Tensor, sigma: float) -> Tensor:
            answer = denoiser(x, sigma, *conditions, **named).to(x.dtype)
            return answer if mask is None else torch.where(mask > 0, answer, 0.0)

        sigmas = self.sigmas()
        x = draw(torch.empty_like(like, dtype=self.dtype)) * sigmas[0]
        yield sigmas[0], x
        for sigma, lower in zip(sigmas, sigmas[1:], strict=False):
            raised = sigma * (1.0 + self._churn_at(sigma))
            if raised > sigma:
                x = x + draw(x) * (math.sqrt(raised**2 - sigma**2) * self.churn_noise)
            x = self._step(denoise, x, raised, lower)
            yield lower, x

    def _churn_at(self, sigma: float) -> float:
        low, high = self.churn_range
        return min(self.churn / self.steps, MOST_CHURN) if low <= sigma <= high else 0.0

    def _step(self, denoise: Callable[[Tensor, float], Tensor], x: Tensor, sigma: float, lower: float) -> Tensor:
        slope = (x - denoise(x, sigma)) / sigma
        there = x + (lower - sigma) * slope
        if lower == 0 or self.order == 1:
            return there
        slope_there = (there - denoise(there, lower)) / lower
        return x + (lower - sigma) * 0.5 * (slope + slope_there)
