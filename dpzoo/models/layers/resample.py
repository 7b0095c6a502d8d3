"""Convolution on a grid that is halved or doubled by a smoothing filter.

Filtering before dropping every second row (and after inserting zeros) keeps high frequencies from folding into low
ones: Zhang 2019 (arXiv:1904.11486), Karras et al. 2020 (arXiv:1912.04958). NCSN++ uses the taps (1, 3, 3, 1), DDPM++
the box (1, 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.layers.conv_norm_act import same_padding

RESAMPLINGS = ("none", "down", "up")

_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class ResampleConv(nn.Module):
    """Filter and halve or double the grid, then convolve.

    Args:
        in_chans, out_chans: Channels.
        kernel_size: Of the convolution, odd.
        ndim: Spatial dims.
        resample: ``"none"``, ``"down"`` (by 2) or ``"up"`` (by 2).
        taps: One-dimensional filter of even length, applied along every dim; scaled to sum 1.
        stride_conv: Let the convolution itself take every second row of the filtered field, instead of convolving the
            halved one: the shortcut of NCSN++. Only with ``"down"``.

    Shape: ``(B, in_chans, *grid)`` -> ``(B, out_chans, *grid)``, its grid halved (rounded down) or doubled.
    Keys: ``weight``, ``bias``, and the buffer ``resample_filter`` of (1, 1, taps, ...) unless ``"none"``.
    """

    resample_filter: Tensor | None

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        kernel_size: int,
        *,
        ndim: int = 2,
        resample: str = "none",
        taps: Sequence[float] = (1, 1),
        stride_conv: bool = False,
    ) -> None:
        super().__init__()
        if resample not in RESAMPLINGS or (stride_conv and resample != "down"):
            raise ValueError(f"resample must be one of {RESAMPLINGS}, got {resample!r} with stride_conv={stride_conv}")
        if len(taps) % 2:
            raise ValueError(f"a filter that halves or doubles a grid has an even number of taps, got {tuple(taps)}")
        self.ndim, self.resample, self.stride_conv = ndim, resample, stride_conv
        self.padding = same_padding((kernel_size,))[0]
        self.weight = nn.Parameter(torch.empty(out_chans, in_chans, *(kernel_size,) * ndim))
        self.bias = nn.Parameter(torch.zeros(out_chans))
        self.register_buffer("resample_filter", None if resample == "none" else outer_filter(taps, ndim))
        self.reset_parameters()

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Uniform weights of Glorot's variance times ``gain`` squared, zero bias."""
        nn.init.xavier_uniform_(self.weight, gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Resample and convolve."""
        conv = _CONV[self.ndim]
        if self.resample_filter is None:
            return conv(x, self.weight, self.bias, padding=self.padding)
        if self.stride_conv:
            smooth = filter_field(x, self.resample_filter, "none", extra_padding=self.padding)
            return conv(smooth, self.weight, self.bias, stride=2)
        return conv(filter_field(x, self.resample_filter, self.resample), self.weight, self.bias, padding=self.padding)


def outer_filter(taps: Sequence[float], ndim: int) -> Tensor:
    """The outer product of ``taps`` with itself along every dim, summing to 1: shape (1, 1, taps, ...)."""
    line = torch.tensor(taps, dtype=torch.float32)
    line = line / line.sum()
    out = line
    for _ in range(ndim - 1):
        out = out[..., None] * line
    return out[None, None]


def filter_field(x: Tensor, taps: Tensor, resample: str, extra_padding: int = 0) -> Tensor:
    """Filter every channel by itself and keep every second row (``"down"``), insert rows (``"up"``), or neither.

    Shape: n rows become n // 2, 2 n, or n + 2 * extra_padding - 1 (for ``"none"``, as the filter's length is even).
    """
    channels, ndim = x.shape[1], taps.ndim - 2
    kernel = taps.to(x.dtype).expand(channels, *taps.shape[1:])
    padding = (taps.shape[-1] - 1) // 2
    if resample == "up":
        gain = math.prod((2,) * ndim)  # the inserted zeros take as much away
        return _CONV_TRANSPOSE[ndim](x, kernel * gain, stride=2, padding=padding, groups=channels)
    stride = 2 if resample == "down" else 1
    return _CONV[ndim](x, kernel, stride=stride, padding=padding + extra_padding, groups=channels)
