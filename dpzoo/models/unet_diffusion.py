"""U-Net that denoises: the score networks DDPM++ and NCSN++, for fields in 1, 2 or 3 spatial dims.

Papers: Song et al. 2021, "Score-Based Generative Modeling through Stochastic Differential Equations" (arXiv:2011.13456,
appendix H), as used by Karras et al. 2022, "Elucidating the Design Space of Diffusion-Based Generative Models"
(arXiv:2206.00364, appendix F). The code is written from the papers. It needs no image size, and its keys none either.
Weights of EDM's "song-unet" have a one-to-one place here; its keys name the resolution R (the finest is level 0):

===================================== ================================================================================
dpzoo ``DiffusionUNet``               EDM's ``enc`` / ``dec``
===================================== ================================================================================
``map_{noise,layer0,layer1,label}.*`` the same
``encoder.0.conv.*``                  ``enc.{R}x{R}_conv.*``
``encoder.{l}.down....``              ``enc.{R}x{R}_down....``
``encoder.{l}.residual.*``            ``enc.{R}x{R}_aux_residual.*``
``encoder.{l}.blocks.{i}....``        ``enc.{R}x{R}_block{i}....``
``middle.{0,1}....``                  ``dec.{R}x{R}_in{0,1}....`` of the coarsest level
``decoder.{l}.up....``                ``dec.{R}x{R}_up....``
``decoder.{l}.blocks.{i}....``        ``dec.{R}x{R}_block{i}....``
``out_norm.*``, ``out_conv.*``        ``dec.{R}x{R}_aux_norm.*``, ``dec.{R}x{R}_aux_conv.*`` of level 0
in a block: ``norm0 conv0 affine``    the same; the attention's ``attn.{norm,qkv,proj}`` may be ``norm2 qkv proj``
``norm1 conv1 skip attn``
===================================== ================================================================================

Single-device code: it runs domain-parallel when its input is a ``ShardTensor`` (noise levels stay plain tensors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers.conv_norm_act import CONVS, norm_groups
from dpzoo.models.layers.grid_attention import GridAttention
from dpzoo.models.layers.resample import ResampleConv
from dpzoo.models.layers.time_embedding import FourierTime, PositionalTime

EMBEDDINGS = ("positional", "fourier")
ENCODERS = ("standard", "residual")
NORM_EPS = 1e-6


class DiffusionUNet(HubMixin, nn.Module):
    """Residual blocks that know the noise level, attention on chosen levels, filtered resampling between levels.

    Args:
        in_chans, out_chans: Channels of the noisy field (with any conditions) and of the output.
        ndim: Spatial dims: 1, 2 or 3.
        model_channels: Base channels.
        channel_mult: Channels of each level as multiples of it, finest first.
        num_blocks: Residual blocks of an encoder level; a decoder level has one more.
        attn_levels: Levels (0 = finest) whose blocks attend; the coarsest level's middle block always does.
        num_heads: Attention heads.
        channel_mult_emb: Channels of the noise embedding, as a multiple of ``model_channels``.
        channel_mult_noise: Channels of its sines and cosines, likewise.
        embedding: ``"positional"`` (DDPM++) or ``"fourier"`` (NCSN++).
        encoder: ``"standard"`` (DDPM++), or ``"residual"`` (NCSN++): the filtered input is added on every level.
        resample_filter: Taps for halving and doubling: (1, 1) in DDPM++, (1, 3, 3, 1) in NCSN++.
        label_dim: Length of a condition vector per sample; 0 for none.
        dropout: Inside the residual blocks.

    Shape: ``x`` ``(B, in_chans, *grid)``, ``noise_labels`` ``(B,)``, ``class_labels`` ``(B, label_dim)`` ->
    ``(B, out_chans, *grid)``. Grid sizes are multiples of ``2 ** (levels - 1)``.

    Raises:
        ValueError: arguments that contradict each other; in ``forward``, a grid that does not fit.
    """

    def __init__(
        self,
        in_chans: int = 3,
        out_chans: int = 3,
        *,
        ndim: int = 2,
        model_channels: int = 128,
        channel_mult: Sequence[int] = (1, 2, 2, 2),
        num_blocks: int = 4,
        attn_levels: Sequence[int] = (1,),
        num_heads: int = 1,
        channel_mult_emb: int = 4,
        channel_mult_noise: int = 1,
        embedding: str = "positional",
        encoder: str = "standard",
        resample_filter: Sequence[float] = (1, 1),
        label_dim: int = 0,
        dropout: float = 0.10,
    ) -> None:
        super().__init__()
        _check_arguments(ndim, embedding, encoder, channel_mult, attn_levels)
        self.in_chans, self.ndim, self.label_dim = in_chans, ndim, label_dim
        self.levels = len(channel_mult)
        noise_channels = model_channels * channel_mult_noise
        emb_channels = model_channels * channel_mult_emb
        self.map_noise = (PositionalTime if embedding == "positional" else FourierTime)(noise_channels)
        self.map_label = nn.Linear(label_dim, noise_channels) if label_dim else None
        self.map_layer0 = nn.Linear(noise_channels, emb_channels)
        self.map_layer1 = nn.Linear(emb_channels, emb_channels)
        widths = [model_channels * m for m in channel_mult]
        attends = [level in attn_levels for level in range(self.levels)]
        how = {"ndim": ndim, "num_heads": num_heads, "taps": tuple(resample_filter), "dropout": dropout}
        block: dict[str, Any] = {"emb_channels": emb_channels, **how}
        first = FirstLevel(in_chans, model_channels, widths[0], num_blocks, attention=attends[0], **block)
        # The side path carries the input to level 1, then what came out of the level before.
        aux = [in_chans, *widths] if encoder == "residual" else [0] * self.levels
        coarser = zip(widths, widths[1:], aux, attends[1:], strict=False)
        self.encoder = nn.ModuleList(
            [first, *(DownLevel(c, w, num_blocks, aux_chans=a, attention=at, **block) for c, w, a, at in coarser)]
        )
        self.middle = nn.ModuleList(DiffusionBlock(widths[-1], widths[-1], attention=a, **block) for a in (True, False))
        # A level's skips, last first: its blocks, then its entry, which is as wide as the level before.
        self.decoder = nn.ModuleList(
            UpLevel(below, width, [*[width] * num_blocks, entry], up=below_level, attention=at, **block)
            for below, width, entry, below_level, at in zip(
                [*widths[1:], widths[-1]],
                widths,
                [model_channels, *widths],
                [True] * (self.levels - 1) + [False],
                attends,
                strict=False,
            )
        )
        width = widths[0]
        self.out_norm = nn.GroupNorm(norm_groups(width), width, eps=NORM_EPS)
        self.out_conv = ResampleConv(width, out_chans, 3, ndim=ndim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform weights; the last layer of every residual branch and of the net starts near zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, DiffusionBlock):
                module.conv1.reset_parameters(gain=1e-5)
            elif isinstance(module, GridAttention):
                module.proj.reset_parameters(gain=1e-5)
        self.out_conv.reset_parameters(gain=1e-5)

    @property
    def total_stride(self) -> tuple[int, ...]:
        """Down-sampling of the coarsest level, per spatial dim."""
        return (2 ** (self.levels - 1),) * self.ndim

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """Random inputs on a small grid, on the weights' device and in their dtype."""
        weight = self.out_conv.weight
        grid = (2 * s for s in self.total_stride)
        inputs = [weight.new_empty(batch_size, self.in_chans, *grid).normal_(), weight.new_empty(batch_size).normal_()]
        if self.label_dim:
            inputs.append(weight.new_empty(batch_size, self.label_dim).normal_())
        return tuple(inputs)

    def embed(self, noise_labels: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Noise levels ``(B,)`` and conditions ``(B, label_dim)`` -> ``(B, emb_channels)``."""
        emb = self.map_noise(noise_labels)
        if self.map_label is not None:
            if class_labels is None:
                raise ValueError(f"DiffusionUNet was built with label_dim={self.label_dim} and needs class_labels")
            # A one-hot vector then has the scale of one with unit variance.
            emb = emb + self.map_label(class_labels * math.sqrt(self.label_dim))
        return F.silu(self.map_layer1(F.silu(self.map_layer0(emb))))

    def check_grid(self, x: Tensor) -> None:
        """Raise ``ValueError`` for an input that the net has no answer to, before anything is computed."""
        grid, total = tuple(x.shape[2:]), self.total_stride
        if x.ndim != self.ndim + 2 or x.shape[1] != self.in_chans:
            dims = ", ".join("DHW"[-self.ndim :])
            raise ValueError(
                f"DiffusionUNet takes (B, {self.in_chans}, {dims}), got an input of shape {tuple(x.shape)}"
            )
        if any(n % s for n, s in zip(grid, total, strict=True)):
            fitting = tuple(-(-n // s) * s for n, s in zip(grid, total, strict=True))
            raise ValueError(
                f"DiffusionUNet: a grid of {grid} cannot be halved {self.levels - 1} times; pad it to {fitting}, "
                f"or use fewer levels than {self.levels}"
            )

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor | None = None) -> Tensor:
        """Run the whole net."""
        self.check_grid(x)
        emb = self.embed(noise_labels, class_labels)
        skips: list[Tensor] = []
        aux = x
        for level in self.encoder:
            x, aux = level(x, aux, emb, skips)
        for block in self.middle:
            x = block(x, emb)
        for level in reversed(self.decoder):
            x = level(x, emb, skips)
        return self.out_conv(F.silu(self.out_norm(x)))


class DiffusionBlock(nn.Module):
    """Two convolutions with the noise embedding added between, shortcut, and attention if asked for.

    Sums of two branches are divided by sqrt(2), which keeps their variance.

    Args:
        in_chans, out_chans: Channels.
        emb_channels: Channels of the embedding.
        resample, taps: Of the first convolution and the shortcut, as in
            :class:`~dpzoo.models.layers.resample.ResampleConv`.
        attention, num_heads: Add grid attention.
        dropout: Before the second convolution.

    Shape: ``(B, in_chans, *grid)``, ``(B, emb_channels)`` -> ``(B, out_chans, *grid)``, its grid halved or doubled.
    Keys: ``norm0 conv0 affine norm1 conv1 skip attn.{norm,qkv,proj}``.
    """

    def __init__(
        self,
        in_chans: int,
        out_chans: int,
        *,
        emb_channels: int,
        ndim: int,
        taps: Sequence[float],
        resample: str = "none",
        attention: bool = False,
        num_heads: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"ndim": ndim, "resample": resample, "taps": taps}
        self.norm0 = nn.GroupNorm(norm_groups(in_chans), in_chans, eps=NORM_EPS)
        self.conv0 = ResampleConv(in_chans, out_chans, 3, **how)
        self.affine = nn.Linear(emb_channels, out_chans)
        self.norm1 = nn.GroupNorm(norm_groups(out_chans), out_chans, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = ResampleConv(out_chans, out_chans, 3, ndim=ndim)
        changes = in_chans != out_chans or resample != "none"
        self.skip = ResampleConv(in_chans, out_chans, 1, **how) if changes else nn.Identity()
        self.attn = GridAttention(out_chans, num_heads, ndim) if attention else None

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """Apply the block."""
        shift = self.affine(emb)
        h = self.conv0(F.silu(self.norm0(x)))
        h = self.norm1(h + shift.reshape(*shift.shape, *(1,) * (x.ndim - 2)))
        h = half_sum(self.conv1(self.dropout(F.silu(h))), self.skip(x))
        return h if self.attn is None else half_sum(self.attn(h), h)


class FirstLevel(nn.Module):
    """The finest encoder level: one convolution, then blocks. Keys: ``conv.*``, ``blocks.{i}.*``."""

    def __init__(self, in_chans: int, base: int, width: int, num_blocks: int, *, attention: bool, **block: Any) -> None:
        super().__init__()
        self.conv = ResampleConv(in_chans, base, 3, ndim=block["ndim"])
        self.blocks = _blocks([base, *[width] * (num_blocks - 1)], width, [attention] * num_blocks, block)

    def forward(self, x: Tensor, aux: Tensor, emb: Tensor, skips: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The level's output and the side path's; all results the decoder joins are put on ``skips``."""
        x = self.conv(x)
        skips.append(x)
        return _run(self.blocks, x, emb, skips), aux


class DownLevel(nn.Module):
    """A coarser encoder level: a halving block, the side path unless ``aux_chans`` is 0, then blocks.

    Keys: ``down.*``, ``residual.*``, ``blocks.{i}.*``.
    """

    def __init__(
        self,
        in_chans: int,
        width: int,
        num_blocks: int,
        *,
        aux_chans: int = 0,
        attention: bool,
        **block: Any,
    ) -> None:
        super().__init__()
        how: dict[str, Any] = {"ndim": block["ndim"], "resample": "down", "taps": block["taps"]}
        self.down = DiffusionBlock(in_chans, in_chans, resample="down", **block)
        self.residual = ResampleConv(aux_chans, in_chans, 3, stride_conv=True, **how) if aux_chans else None
        self.blocks = _blocks([in_chans, *[width] * (num_blocks - 1)], width, [attention] * num_blocks, block)

    def forward(self, x: Tensor, aux: Tensor, emb: Tensor, skips: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in :class:`FirstLevel`."""
        x = self.down(x, emb)
        if self.residual is not None:
            x = aux = half_sum(x, self.residual(aux))
        skips.append(x)
        return _run(self.blocks, x, emb, skips), aux


class UpLevel(nn.Module):
    """A decoder level: a doubling block unless it is the coarsest, then blocks that each join one skip.

    Keys: ``up.*``, ``blocks.{i}.*``.
    """

    def __init__(
        self, in_chans: int, width: int, joined: Sequence[int], *, up: bool, attention: bool, **block: Any
    ) -> None:
        super().__init__()
        self.up = DiffusionBlock(in_chans, in_chans, resample="up", **block) if up else None
        inputs = [before + skip for before, skip in zip([in_chans, *[width] * (len(joined) - 1)], joined, strict=True)]
        self.blocks = _blocks(inputs, width, [False] * (len(joined) - 1) + [attention], block)

    def forward(self, x: Tensor, emb: Tensor, skips: list[Tensor]) -> Tensor:
        """Refine ``x`` with the level's skips, the last stored first."""
        if self.up is not None:
            x = self.up(x, emb)
        for block in self.blocks:
            x = block(torch.cat([x, skips.pop()], dim=1), emb)
        return x


def half_sum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two fields with the variance of one."""
    return (a + b) * math.sqrt(0.5)


def _blocks(inputs: Sequence[int], width: int, attention: Sequence[bool], block: dict[str, Any]) -> nn.ModuleList:
    pairs = zip(inputs, attention, strict=True)
    return nn.ModuleList(DiffusionBlock(c, width, attention=attends, **block) for c, attends in pairs)


def _run(blocks: nn.ModuleList, x: Tensor, emb: Tensor, skips: list[Tensor]) -> Tensor:
    for block in blocks:
        x = block(x, emb)
        skips.append(x)
    return x


def _check_arguments(
    ndim: int, embedding: str, encoder: str, channel_mult: Sequence[int], attn_levels: Sequence[int]
) -> None:
    if ndim not in CONVS:
        raise ValueError(f"DiffusionUNet works in 1, 2 or 3 spatial dims, got ndim={ndim}")
    if embedding not in EMBEDDINGS:
        raise ValueError(f"embedding must be one of {EMBEDDINGS}, got {embedding!r}")
    if encoder not in ENCODERS:
        raise ValueError(f"encoder must be one of {ENCODERS}, got {encoder!r}")
    beyond = [level for level in attn_levels if not 0 <= level < len(channel_mult)]
    if beyond:
        raise ValueError(
            f"attn_levels {beyond} do not exist: channel_mult={tuple(channel_mult)} makes levels 0 to "
            f"{len(channel_mult) - 1}"
        )
