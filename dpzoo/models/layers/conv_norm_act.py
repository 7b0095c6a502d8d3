"""Convolution, normalization, activation: the unit of convolutional nets, in 1, 2 or 3 spatial dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

CONVS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED_CONVS: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = ("instance", "instance_plain", "batch", "group", "none")
ACTS = ("leaky_relu", "relu", "prelu", "gelu", "silu", "none")

_INSTANCE: dict[int, Any] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
_BATCH: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def per_dim(value: int | Sequence[int], ndim: int, what: str) -> tuple[int, ...]:
    """One positive number for every spatial dim; one int stands for all.

    Raises:
        ValueError: another count than ``ndim``, or a number below 1.
    """
    numbers = (value,) * ndim if isinstance(value, int) else tuple(value)
    if len(numbers) != ndim or min(numbers) < 1:
        raise ValueError(f"{what} must be one positive int, or {ndim} of them (one a spatial dim), got {value}")
    return numbers


def same_padding(kernel_size: Sequence[int]) -> tuple[int, ...]:
    """Padding with which a stride-1 convolution keeps the grid.

    Raises:
        ValueError: an even kernel, which no symmetric padding fits.
    """
    if any(k % 2 == 0 for k in kernel_size):
        raise ValueError(f"kernel sizes must be odd to keep the grid, got {tuple(kernel_size)}")
    return tuple(k // 2 for k in kernel_size)


def make_norm(name: str, channels: int, ndim: int) -> nn.Module:
    """A norm over channels: ``"instance"`` (``"instance_plain"``: no weights), ``"batch"``, ``"group"``, ``"none"``."""
    if name in ("instance", "instance_plain"):
        return _INSTANCE[ndim](channels, affine=name == "instance")
    if name == "batch":
        return _BATCH[ndim](channels)
    if name == "group":
        return nn.GroupNorm(norm_groups(channels), channels)
    if name != "none":
        raise ValueError(f"norm must be one of {NORMS}, got {name!r}")
    return nn.Identity()


def norm_groups(channels: int) -> int:
    """Groups of a group norm: at most 32, at least 4 channels each where channels allow, and dividing them."""
    return max((g for g in range(1, min(32, channels // 4) + 1) if channels % g == 0), default=1)


def make_act(name: str, negative_slope: float = 0.01) -> nn.Module:
    """An activation by name; ``negative_slope`` is that of ``"leaky_relu"``."""
    if name == "leaky_relu":
        return nn.LeakyReLU(negative_slope)
    plain = {"relu": nn.ReLU, "prelu": nn.PReLU, "gelu": nn.GELU, "silu": nn.SiLU, "none": nn.Identity}
    if name not in plain:
        raise ValueError(f"act must be one of {ACTS}, got {name!r}")
    return plain[name]()


class ConvNormAct(nn.Module):
    """A convolution that keeps the grid (or divides it by ``stride``), a norm, an activation.

    Args:
        in_chans, out_chans: Channels.
        ndim: Spatial dims.
        kernel_size: Odd, one int or one a dim.
        stride: One int or one a dim. A grid of n becomes ceil(n / stride).
        norm, act, negative_slope: See :func:`make_norm` and :func:`make_act`.
        bias: Give the convolution a bias.
        transposed: Use a transposed convolution, which multiplies the grid by ``stride``.

    Shape: ``(B, in_chans, *grid)`` -> ``(B, out_chans, *new_grid)``. Keys: ``conv.*``, ``norm.*``, ``act.*`` (PReLU).
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        *,
        ndim: int = 2,
        kernel_size: int | Sequence[int] = 3,
        stride: int | Sequence[int] = 1,
        norm: str = "instance",
        act: str = "leaky_relu",
        negative_slope: float = 0.01,
        bias: bool = True,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        kernel, strides = per_dim(kernel_size, ndim, "kernel_size"), per_dim(stride, ndim, "stride")
        options: dict[str, Any] = {"stride": strides, "padding": same_padding(kernel), "bias": bias}
        if transposed:
            options["output_padding"] = tuple(s - 1 for s in strides)
        self.conv = (TRANSPOSED_CONVS if transposed else CONVS)[ndim](in_chans, out_chans, kernel, **options)
        self.norm = make_norm(norm, out_chans, ndim)
        self.act = make_act(act, negative_slope)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalize, activate."""
        return self.act(self.norm(self.conv(x)))


def init_convs(module: nn.Module, negative_slope: float) -> None:
    """He-normal weights for leaky rectifiers (He 2015, arXiv:1502.01852), zero biases, in all convolutions within."""
    kinds = (*CONVS.values(), *TRANSPOSED_CONVS.values())
    for part in module.modules():
        if isinstance(part, kinds):
            nn.init.kaiming_normal_(part.weight, a=negative_slope)
            if part.bias is not None:
                with torch.no_grad():
                    part.bias.zero_()
