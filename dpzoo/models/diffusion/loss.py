"""Denoising score matching: a field is noised at a random level, and the denoiser's error is weighed by that level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.models.diffusion.noise_levels import LogNormal, NoiseLevels
from dpzoo.models.diffusion.precondition import per_sample


@dataclass(frozen=True)
class EDMLoss:
    """Weighted mean squared error of a denoiser, as in Karras et al. 2022 (arXiv:2206.00364), section 5.

    Each sample has one noise level and is weighted by the denoiser's ``loss_weight``.

    Args:
        levels: Where the noise levels come from.
        channel_weights: Factor of each channel's squared error; all 1 without it. They are used as they are: their
            mean scales the loss.
        draw: Standard normal numbers in the shape (and the cut) of a tensor.

    Shape: ``loss(denoiser, target, *conditions, mask=None, **conditions)`` with ``target (B, C, *grid)`` and ``mask (B
    or 1, C or 1, *grid)`` -> ``()``. The mask tells how much a point counts: bool, or weights >= 0, such as the area
    of a cell. The error is a mean over what counts in a sample, then over samples, so it does not depend on how samples
    are grouped in batches; a sample in which nothing counts has loss 0. What the target holds where the mask is 0, NaN
    too, takes no part in anything: the denoiser sees 0 and noise there.

    Raises:
        ValueError: weights or a mask that do not fit the target.
        TypeError: a denoiser without ``loss_weight``.
    """

    levels: NoiseLevels = field(default_factory=LogNormal)
    channel_weights: tuple[float, ...] | None = None
    draw: Callable[[Tensor], Tensor] = torch.randn_like

    def __call__(
        self, denoiser: nn.Module, target: Tensor, *conditions: Any, mask: Tensor | None = None, **named: Any
    ) -> Tensor:
        """Draw noise and find the loss."""
        target = target.to(torch.promote_types(target.dtype, torch.float32))
        sigma, noise = self.levels.draw(target), self.draw(target.detach())
        return self.at(sigma, noise, denoiser, target, *conditions, mask=mask, **named)

    def at(
        self,
        sigma: Tensor | float,
        noise: Tensor,
        denoiser: nn.Module,
        target: Tensor,
        *conditions: Any,
        mask: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        """The loss for a given noise level (a number, ``()`` or ``(B,)``) and given standard normal noise."""
        self._check(target, mask)
        if mask is not None:
            target = torch.where(mask > 0, target, 0.0)
        weight = _weight_of(denoiser)(sigma, target)
        level = per_sample(target, sigma).view(-1, *[1] * (target.ndim - 1))
        error = (denoiser(target + level * noise, sigma, *conditions, **named) - target).square() * weight
        if self.channel_weights is not None:
            error = error * target.new_tensor(self.channel_weights).view(-1, *[1] * (target.ndim - 2))
        return error.mean() if mask is None else _masked_mean(error, mask)

    def _check(self, target: Tensor, mask: Tensor | None) -> None:
        if self.channel_weights is not None and len(self.channel_weights) != target.shape[1]:
            raise ValueError(
                f"EDMLoss: {len(self.channel_weights)} channel weights for {target.shape[1]} channels "
                f"(target {tuple(target.shape)})"
            )
        if mask is None:
            return
        wanted = [(n, 1) if d < 2 else (n,) for d, n in enumerate(target.shape)]
        if mask.ndim != target.ndim or any(n not in w for n, w in zip(mask.shape, wanted, strict=True)):
            b, c, *grid = target.shape
            raise ValueError(
                f"EDMLoss: the mask must be ({b} or 1, {c} or 1, {', '.join(map(str, grid))}) for a target of shape "
                f"{tuple(target.shape)}, got {tuple(mask.shape)}"
            )


def _masked_mean(error: Tensor, mask: Tensor) -> Tensor:
    counts = mask.to(error.dtype)
    inner = tuple(range(1, error.ndim))
    copies = error.shape[1] // mask.shape[1]
    total = counts.sum(inner) * copies
    return ((error * counts).sum(inner) / total.clamp(min=torch.finfo(error.dtype).tiny)).mean()


def _weight_of(denoiser: nn.Module) -> Callable[[Tensor | float, Tensor], Tensor]:
    """``loss_weight`` of a denoiser, also through wrappers that keep it as ``module`` (data parallelism)."""
    inner: Any = denoiser
    while not hasattr(inner, "loss_weight"):
        if not hasattr(inner, "module"):
            raise TypeError(
                f"EDMLoss: {type(denoiser).__name__} has no loss_weight(sigma, x); wrap the network in "
                "EDMPreconditioner"
            )
        inner = inner.module
    return inner.loss_weight
