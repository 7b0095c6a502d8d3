"""A network made a denoiser: input, output and skip scaled so that they have unit variance at every noise level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin


class EDMPreconditioner(HubMixin, nn.Module):
    """Estimate of the clean field: ``c_skip x + c_out network(c_in x, c_noise)``.

    Karras et al. 2022 (arXiv:2206.00364), table 1, with s the noise level and d the deviation of the data:
    ``c_skip = d^2 / (s^2 + d^2)``, ``c_out = s d / sqrt(s^2 + d^2)``, ``c_in = 1 / sqrt(s^2 + d^2)``,
    ``c_noise = log(s) / 4``.

    Args:
        network: Called as ``network(x, c_noise, *conditions, **conditions)`` with ``c_noise (B,)``, such as
            :class:`~dpzoo.models.DiT` and :class:`~dpzoo.models.DiffusionUNet`.
        sigma_data: Standard deviation of the (normalised) data, one for all channels or one for each.

    Shape: ``forward(x, sigma, ...)`` with ``x (B, C, *grid)`` and ``sigma`` a number, ``()`` or ``(B,)`` ->
    ``(B, C, *grid)``, in float32 or x's own dtype if that is finer. The network sees its weights' dtype.

    Raises:
        ValueError: a ``sigma_data`` that is not positive; in ``forward``, a sigma that fits no sample.
    """

    sigma_data: Tensor

    def __init__(self, network: nn.Module, sigma_data: float | Sequence[float] = 0.5) -> None:
        super().__init__()
        values = [float(sigma_data)] if isinstance(sigma_data, int | float) else [float(v) for v in sigma_data]
        if not values or not all(v > 0 and math.isfinite(v) for v in values):
            raise ValueError(f"sigma_data is a standard deviation, each > 0; got {sigma_data}")
        self.network = network
        shape = () if isinstance(sigma_data, int | float) else (len(values),)
        self.register_buffer("sigma_data", torch.tensor(values).view(shape))

    def forward(self, x: Tensor, sigma: Tensor | float, *conditions: Any, **named: Any) -> Tensor:
        """Denoise ``x``, whose noise has the standard deviation ``sigma``."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        level = per_sample(x, sigma)
        s, d = self._by_channel(level, x)
        total = (s.square() + d.square()).sqrt()
        weight = next((p for p in self.network.parameters() if p.is_floating_point()), x)
        c_noise = (level.log() / 4).to(torch.promote_types(weight.dtype, torch.float32))
        answer = self.network((x / total).to(weight.dtype), c_noise, *conditions, **named)
        return (d / total).square() * x + (s * d / total) * answer.to(x.dtype)

    def loss_weight(self, sigma: Tensor | float, x: Tensor) -> Tensor:
        """``(s^2 + d^2) / (s d)^2``, by which a squared error at level s counts the same as at any other.

        Shape: ``sigma`` as in ``forward``, ``x (B, C, *grid)`` -> ``(B, 1 or C, 1, ...)``, to be multiplied with it.
        """
        s, d = self._by_channel(per_sample(x, sigma), x)
        return (s.square() + d.square()) / (s * d).square()

    def _by_channel(self, level: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Noise level ``(B, 1, 1, ...)`` and deviation of the data ``()`` or ``(C, 1, ...)``."""
        ones = [1] * (x.ndim - 2)
        if self.sigma_data.ndim and len(self.sigma_data) != x.shape[1]:
            raise ValueError(
                f"EDMPreconditioner: sigma_data has {len(self.sigma_data)} entries, x has {x.shape[1]} channels "
                f"(shape {tuple(x.shape)})"
            )
        data = self.sigma_data.to(level.dtype)
        return level.view(-1, 1, *ones), data.view(-1, *ones) if data.ndim else data


def per_sample(x: Tensor, sigma: Tensor | float) -> Tensor:
    """A noise level as ``(B,)``, in float32 or x's own dtype if that is finer.

    Raises:
        ValueError: a number that is not positive, or another count of levels than samples.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not isinstance(sigma, Tensor):
        if not sigma > 0:
            raise ValueError(f"the noise level sigma must be > 0, got {sigma}")
        return x.new_full((x.shape[0],), float(sigma), dtype=dtype)
    if tuple(sigma.shape) not in ((), (x.shape[0],)):
        raise ValueError(
            f"sigma holds one noise level per sample: expected shape () or ({x.shape[0]},) for x of shape "
            f"{tuple(x.shape)}, got {tuple(sigma.shape)}"
        )
    return sigma.to(dtype) if sigma.ndim else sigma.to(dtype).expand(x.shape[0])
