"""U-Net for segmentation and regression on grids, in 1, 2 or 3 spatial dims.

Papers: Ronneberger et al. 2015, "U-Net" (arXiv:1505.04597); Isensee et al. 2021, "nnU-Net" (Nature Methods 18;
arXiv:1809.10486), from which the defaults come: strided convolutions, instance norm, leaky ReLU, deep supervision.
The code is written anew. Weights of two libraries have a one-to-one place here (both Apache-2.0):

====================================== ========================================== ===================================
dpzoo ``UNet``                         nnU-Net ``PlainConvUNet``                  MONAI ``BasicUNet``
====================================== ========================================== ===================================
``encoder.0.convs.{c}.{conv,norm}.*``  ``encoder.stages.0.0.convs.{c}....``       ``conv_0.conv_{c}.{conv,adn.N}.*``
``encoder.{s}.convs.{c}....``          ``encoder.stages.{s}.0.convs.{c}....``     ``down_{s}.convs.conv_{c}....``
``decoder.{i}.up.*``                   ``decoder.transpconvs.{i}.*``              ``upcat_{n-i}.upsample.deconv.*``
``decoder.{i}.convs.{c}....``          ``decoder.stages.{i}.convs.{c}....``       ``upcat_{n-i}.convs.conv_{c}....``
``head.*``                             ``decoder.seg_layers.{n-1}.*``             ``final_conv.*``
``deep_heads.{i}.*``                   ``decoder.seg_layers.{i}.*``, i < n-1      none
====================================== ========================================== ===================================

with n decoder stages, the coarsest first. nnU-Net stores every tensor of a stage a second time under ``all_modules``
and the encoder again under ``decoder.encoder``. For MONAI: ``down="max"``, ``negative_slope=0.1``,
``odd_sizes="fit"``, ``skip_first=True``. MONAI's ``UNet`` is another net:
:class:`~dpzoo.models.unet_residual.ResidualUNet`.

Single-device code: it runs domain-parallel when its input is a ``ShardTensor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers.conv_norm_act import CONVS, TRANSPOSED_CONVS, ConvNormAct, init_convs, per_dim

DOWNS = ("stride", "max", "avg")
UPS = ("transpose", "linear", "nearest")
ODD_SIZES = ("error", "fit")

_POOLS: dict[str, dict[int, Any]] = {
    "max": {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d},
    "avg": {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d},
}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class UNet(HubMixin, nn.Module):
    """Encoder of convolution stages, each coarser than the one before; decoder back up, joined with the skips.

    Args:
        in_chans: Input channels.
        out_chans: Output channels.
        ndim: Spatial dims: 1, 2 or 3.
        channels: Channels of each encoder stage, finest first; at least two stages.
        strides: Down-sampling between stages: one int, or one entry per stage after the first, an int or one a dim.
        kernel_sizes: Odd. One int, or one entry per stage, an int or one a dim.
        convs_per_stage: Convolutions of an encoder stage: one int, or one per stage.
        decoder_convs: Convolutions of a decoder stage: one int, or one per decoder stage, coarsest first.
        down: ``"stride"`` (the stage's first convolution), ``"max"`` or ``"avg"`` (a pool before the stage).
        up: ``"transpose"`` (kernel = stride), or ``"linear"`` / ``"nearest"`` (1x1 convolution, then resize).
        norm: ``"instance"``, ``"instance_plain"`` (no weights), ``"batch"``, ``"group"`` or ``"none"``.
        act: ``"leaky_relu"``, ``"relu"``, ``"prelu"``, ``"gelu"``, ``"silu"`` or ``"none"``.
        negative_slope: Of ``"leaky_relu"``.
        bias: Give convolutions a bias (transposed ones and heads always have one).
        deep_supervision: Also predict at every coarser decoder stage; ``forward`` then returns a list, finest first.
        odd_sizes: What to do with a grid that ``strides`` do not divide: ``"error"`` as nnU-Net does, or ``"fit"``: the
            up-sampled field loses surplus rows at its end, or repeats its last one (the latter as MONAI does).
        skip_first: Concatenate (skip, up) instead of (up, skip).

    Shape: ``(B, in_chans, *grid)`` -> ``(B, out_chans, *grid)``, with any grid.

    Raises:
        ValueError: arguments that contradict each other; in ``forward``, a grid that does not fit.
    """

    def __init__(
        self,
        in_chans: int = 1,
        out_chans: int = 2,
        *,
        ndim: int = 2,
        channels: Sequence[int] = (32, 64, 128, 256),
        strides: int | Sequence[int | Sequence[int]] = 2,
        kernel_sizes: int | Sequence[int | Sequence[int]] = 3,
        convs_per_stage: int | Sequence[int] = 2,
        decoder_convs: int | Sequence[int] = 2,
        down: str = "stride",
        up: str = "transpose",
        norm: str = "instance",
        act: str = "leaky_relu",
        negative_slope: float = 0.01,
        bias: bool = True,
        deep_supervision: bool = False,
        odd_sizes: str = "error",
        skip_first: bool = False,
    ) -> None:
        super().__init__()
        _one_of("down", down, DOWNS)
        _one_of("up", up, UPS)
        _one_of("odd_sizes", odd_sizes, ODD_SIZES)
        stages = len(channels)
        if ndim not in CONVS or stages < 2:
            raise ValueError(f"UNet needs ndim 1, 2 or 3 and two or more stages, got ndim={ndim}, channels={channels}")
        self.in_chans, self.ndim, self.down, self.up = in_chans, ndim, down, up
        self.deep_supervision, self.odd_sizes = deep_supervision, odd_sizes
        self.strides = tuple(per_dim(s, ndim, "a stride") for s in _per_stage(strides, stages - 1, "strides"))
        kernels = _per_stage(kernel_sizes, stages, "kernel_sizes")
        unit: dict[str, Any] = {"ndim": ndim, "norm": norm, "act": act, "negative_slope": negative_slope, "bias": bias}
        depths = _per_stage(convs_per_stage, stages, "convs_per_stage")
        self.encoder = nn.ModuleList(
            EncoderStage(c_in, c_out, depth, stride=stride, down=down, kernel_size=kernel, **unit)
            for c_in, c_out, depth, stride, kernel in zip(
                (in_chans, *channels), channels, depths, ((1,) * ndim, *self.strides), kernels, strict=False
            )
        )
        depths = _per_stage(decoder_convs, stages - 1, "decoder_convs")
        self.decoder = nn.ModuleList(
            DecoderStage(
                channels[s + 1],
                channels[s],
                depths[stages - 2 - s],
                stride=self.strides[s],
                up=up,
                skip_first=skip_first,
                kernel_size=kernels[s],
                **unit,
            )
            for s in reversed(range(stages - 1))
        )
        coarse = reversed(channels[1:-1]) if deep_supervision else ()
        self.deep_heads = nn.ModuleList(CONVS[ndim](c, out_chans, 1) for c in coarse)
        self.head = CONVS[ndim](channels[0], out_chans, 1)
        init_convs(self, negative_slope)

    @property
    def total_stride(self) -> tuple[int, ...]:
        """Down-sampling of the coarsest stage, per spatial dim."""
        return tuple(math.prod(s) for s in zip(*self.strides, strict=True))

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """Random inputs on a small grid, on the weights' device and in their dtype."""
        return (self.head.weight.new_empty(batch_size, self.in_chans, *(2 * s for s in self.total_stride)).normal_(),)

    def check_grid(self, x: Tensor) -> None:
        """Raise ``ValueError`` for an input that the net has no answer to, before anything is computed."""
        if x.ndim != self.ndim + 2 or x.shape[1] != self.in_chans:
            dims = ", ".join("DHW"[-self.ndim :])
            raise ValueError(f"UNet takes (B, {self.in_chans}, {dims}), got an input of shape {tuple(x.shape)}")
        grid, total = tuple(x.shape[2:]), self.total_stride
        if self.odd_sizes == "error" and any(n % s for n, s in zip(grid, total, strict=True)):
            fitting = tuple(-(-n // s) * s for n, s in zip(grid, total, strict=True))
            raise ValueError(
                f"UNet: a grid of {grid} is not a multiple of {total}, the product of its strides; "
                f"pad it to {fitting}, or build the net with odd_sizes='fit'"
            )
        if self.down != "stride" and any(n < s for n, s in zip(grid, total, strict=True)):
            raise ValueError(f"UNet: a grid of {grid} is pooled away; it needs at least {total} points")

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Run the whole net; with deep supervision a list of fields, finest first."""
        self.check_grid(x)
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        coarse = []
        for i, stage in enumerate(self.decoder):
            x = stage(x, skips.pop())
            if i < len(self.deep_heads):
                coarse.append(self.deep_heads[i](x))
        out = self.head(x)
        return [out, *reversed(coarse)] if self.deep_supervision else out


class EncoderStage(nn.Module):
    """Down-sampling by a pool or the first convolution, then convolutions.

    Shape: ``(B, in_chans, *grid)`` -> ``(B, out_chans, *coarser)``. Keys: ``convs.{c}.*``.
    """

    def __init__(
        self, in_chans: int, out_chans: int, depth: int, *, stride: int | Sequence[int], down: str, **unit: Any
    ) -> None:
        super().__init__()
        strides = per_dim(stride, unit["ndim"], "stride")
        pooled = down != "stride" and max(strides) > 1
        self.pool = _POOLS[down][unit["ndim"]](strides, strides) if pooled else nn.Identity()
        self.convs = conv_chain(in_chans, out_chans, depth, 1 if pooled else strides, **unit)

    def forward(self, x: Tensor) -> Tensor:
        """Coarsen and convolve."""
        return self.convs(self.pool(x))


class DecoderStage(nn.Module):
    """Up-sample to the skip's grid, concatenate, convolve.

    Shape: ``(B, in_chans, *grid)`` and ``(B, out_chans, *finer)`` -> ``(B, out_chans, *finer)``.
    Keys: ``up.*``, ``convs.{c}.*``.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        depth: int,
        *,
        stride: Sequence[int],
        up: str,
        skip_first: bool,
        **unit: Any,
    ) -> None:
        super().__init__()
        ndim = unit["ndim"]
        self.mode = {"linear": _LINEAR[ndim]}.get(up, up)
        self.skip_first = skip_first
        if up == "transpose":
            self.up = TRANSPOSED_CONVS[ndim](in_chans, out_chans, stride, stride)
        else:
            self.up = CONVS[ndim](in_chans, out_chans, 1)
        self.convs = conv_chain(2 * out_chans, out_chans, depth, 1, **unit)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """Refine ``x`` with the skip of the same level."""
        x, grid = self.up(x), skip.shape[2:]
        if self.mode == "transpose":
            x = fit_grid(x, grid)
        else:
            x = F.interpolate(x, size=grid, mode=self.mode)
        return self.convs(torch.cat([skip, x] if self.skip_first else [x, skip], dim=1))


def conv_chain(in_chans: int, out_chans: int, depth: int, stride: int | Sequence[int], **unit: Any) -> nn.Sequential:
    """``depth`` convolution units, the first of them strided."""
    chain = [ConvNormAct(in_chans, out_chans, stride=stride, **unit)]
    return nn.Sequential(*chain, *(ConvNormAct(out_chans, out_chans, **unit) for _ in range(depth - 1)))


def fit_grid(x: Tensor, grid: Sequence[int]) -> Tensor:
    """Drop surplus rows at the end of each spatial dim, or repeat the last row where some are missing."""
    for dim, n in enumerate(grid, start=2):
        if x.shape[dim] > n:
            x = x.narrow(dim, 0, n)
    missing = [n - x.shape[dim] for dim, n in enumerate(grid, start=2)]
    if any(missing):
        x = F.pad(x, [rows for n in reversed(missing) for rows in (0, n)], mode="replicate")
    return x


def _per_stage(value: int | Sequence[Any], stages: int, what: str) -> tuple[Any, ...]:
    entries = (value,) * stages if isinstance(value, int) else tuple(value)
    if len(entries) != stages:
        raise ValueError(f"{what} must be one int or {stages} entries, one a stage, got {value}")
    return entries


def _one_of(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} must be one of {allowed}, got {value!r}")
