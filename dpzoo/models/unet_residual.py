"""U-Net of residual units, down-sampled from its first convolution on.

Paper: Kerfoot et al. 2018, "Left-Ventricle Quantification Using Residual U-Net" (STACOM 2018, LNCS 11395).
It is the net of MONAI's ``UNet`` (Apache-2.0), which nests the stages; here they stand in two lists. The code is
written anew. With ``p(i) = "model." + "1.submodule." * i``, n strided stages, and ``{unit}`` for ``conv`` / ``act``:

===================================== =============================================================================
dpzoo ``ResidualUNet``                MONAI ``UNet``
===================================== =============================================================================
``encoder.{i}.convs.{c}.{unit}.*``    ``p(i) + "0.conv.unit{c}.{conv,adn.A}.*"``
``encoder.{i}.{unit}.*``               ``p(i) + "0.{conv,adn.A}.*"``, with ``res_units=0``
``encoder.{i}.residual.*``            ``p(i) + "0.residual.*"``
``encoder.{n}....``                   the same with ``p(n)`` instead of ``p(n) + "0."``
``decoder.{n-1-i}.up.{unit}.*``       ``p(i) + "2.0.{conv,adn.A}.*"``; without "0." if ``res_units=0``
``decoder.{n-1-i}.residual_unit....`` ``p(i) + "2.1.conv.unit0.{conv,adn.A}.*"``
===================================== =============================================================================

Single-device code: it runs domain-parallel when its input is a ``ShardTensor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers.conv_norm_act import CONVS, ConvNormAct, per_dim, same_padding


class ResidualUNet(HubMixin, nn.Module):
    """Strided residual units down, transposed convolutions up, each skip joined *before* the up-sampling.

    Args:
        in_chans, out_chans: Input and output channels.
        ndim: Spatial dims.
        channels: Channels of each stage; the last stage is not strided.
        strides: Of every stage but the last: one int, or one entry a stage, each an int or one a dim.
        kernel_size, up_kernel_size: Odd.
        res_units: Convolutions inside a residual unit; 0 for plain convolutions instead of residual units.
        norm, act: As in :class:`~dpzoo.models.unet.UNet`.
        bias: Give convolutions a bias.

    Shape: ``(B, in_chans, *grid)`` -> ``(B, out_chans, *grid)``; the grid is a multiple of the strides' product.

    Raises:
        ValueError: arguments that contradict each other; in ``forward``, a grid that does not fit.
    """

    def __init__(
        self,
        in_chans: int = 1,
        out_chans: int = 2,
        *,
        ndim: int = 2,
        channels: Sequence[int] = (16, 32, 64, 128, 256),
        strides: int | Sequence[int | Sequence[int]] = 2,
        kernel_size: int = 3,
        up_kernel_size: int = 3,
        res_units: int = 2,
        norm: str = "instance_plain",
        act: str = "prelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        n = len(channels) - 1
        steps = (strides,) * n if isinstance(strides, int) else tuple(strides)
        if ndim not in CONVS or n < 1 or len(steps) != n:
            raise ValueError(
                f"ResidualUNet needs ndim 1, 2 or 3, two or more channels and one stride fewer, "
                f"got ndim={ndim}, channels={channels}, strides={strides}"
            )
        self.in_chans, self.ndim = in_chans, ndim
        self.strides = tuple(per_dim(s, ndim, "a stride") for s in steps)
        unit: dict[str, Any] = {"ndim": ndim, "norm": norm, "act": act, "bias": bias}
        self.encoder = nn.ModuleList(
            _down(c_in, c_out, stride, res_units, kernel_size=kernel_size, **unit)
            for c_in, c_out, stride in zip((in_chans, *channels), channels, (*self.strides, (1,) * ndim), strict=False)
        )
        out = (out_chans, *channels)
        self.decoder = nn.ModuleList(
            ResidualUp(
                channels[i] + (channels[i + 1] if i == n - 1 else channels[i]),
                out[i],
                self.strides[i],
                kernel_sizes=(up_kernel_size, kernel_size),
                residual=res_units > 0,
                top=i == 0,
                **unit,
            )
            for i in reversed(range(n))
        )

    @property
    def total_stride(self) -> tuple[int, ...]:
        """Down-sampling of the coarsest stage, per spatial dim."""
        return tuple(math.prod(s) for s in zip(*self.strides, strict=True))

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """Random inputs on a small grid, on the weights' device and in their dtype."""
        weight = next(self.parameters())
        return (weight.new_empty(batch_size, self.in_chans, *(2 * s for s in self.total_stride)).normal_(),)

    def forward(self, x: Tensor) -> Tensor:
        """Run the whole net."""
        grid, total = tuple(x.shape[2:]), self.total_stride
        if len(grid) != self.ndim or any(n % s for n, s in zip(grid, total, strict=True)):
            raise ValueError(f"ResidualUNet: a grid of {grid} is not a multiple of {total}, the product of its strides")
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        for stage in self.decoder:
            x = stage(torch.cat([skips.pop(), x], dim=1))
        return x


class ResidualUnit(nn.Module):
    """A chain of convolution units, the first strided, plus the input (convolved where the shape changes).

    Keys: ``convs.{c}.*``, ``residual.*``.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        stride: int | Sequence[int] = 1,
        depth: int = 2,
        *,
        kernel_size: int,
        ndim: int,
        last_plain: bool = False,
        **unit: Any,
    ) -> None:
        super().__init__()
        units = []
        for c in range(depth):
            plain = {"norm": "none", "act": "none"} if last_plain and c == depth - 1 else {}
            given = {"kernel_size": kernel_size, "ndim": ndim, "stride": stride if c == 0 else 1, **unit, **plain}
            units.append(ConvNormAct(in_chans if c == 0 else out_chans, out_chans, **given))
        self.convs = nn.Sequential(*units)
        self.residual: nn.Module = nn.Identity()
        strides = per_dim(stride, ndim, "stride")
        if max(strides) > 1 or in_chans != out_chans:
            kernel = per_dim(kernel_size if max(strides) > 1 else 1, ndim, "kernel_size")
            self.residual = CONVS[ndim](
                in_chans, out_chans, kernel, strides, same_padding(kernel), bias=unit.get("bias", True)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Convolutions plus shortcut."""
        return self.convs(x) + self.residual(x)


class ResidualUp(nn.Module):
    """Transposed convolution unit, then a residual unit; the net's last one ends without norm and activation.

    Keys: ``up.*``, ``residual_unit.*``.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        stride: Sequence[int],
        *,
        kernel_sizes: tuple[int, int],
        residual: bool,
        top: bool,
        **unit: Any,
    ) -> None:
        super().__init__()
        plain = {"norm": "none", "act": "none"} if top and not residual else {}
        up = {"kernel_size": kernel_sizes[0], "stride": stride, "transposed": True, **unit, **plain}
        self.up = ConvNormAct(in_chans, out_chans, **up)
        self.residual_unit: nn.Module = nn.Identity()
        if residual:
            self.residual_unit = ResidualUnit(
                out_chans, out_chans, depth=1, kernel_size=kernel_sizes[1], last_plain=top, **unit
            )

    def forward(self, x: Tensor) -> Tensor:
        """Refine the grid by the stride."""
        return self.residual_unit(self.up(x))


def _down(in_chans: int, out_chans: int, stride: int | Sequence[int], res_units: int, **unit: Any) -> nn.Module:
    if res_units:
        return ResidualUnit(in_chans, out_chans, stride, res_units, **unit)
    return ConvNormAct(in_chans, out_chans, stride=stride, **unit)
