"""Neighborhood attention transformers, for pictures, weather grids and volumes.

Papers: Hassani et al. 2023, "Neighborhood Attention Transformer" (NAT, arXiv:2204.07143); Hassani & Shi 2022, "Dilated
Neighborhood Attention Transformer" (DiNAT, arXiv:2209.15001).
State-dict keys are those of the public NAT and DiNAT checkpoints (MIT, https://github.com/SHI-Labs/Neighborhood-Attention-Transformer);
the code is written anew.

Single-device code: it runs domain-parallel when its input is a ``ShardTensor``. Tokens stay on their grid, channels
last, so that every spatial dim may be cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin
from dpzoo.models.layers import DropPath, Mlp
from dpzoo.models.layers.conv_norm_act import CONVS, per_dim
from dpzoo.models.layers.neighborhood_attention import NeighborhoodAttention
from dpzoo.models.neighborhood_head import PyramidHead

HEADS = ("classification", "dense")
PATCH = 4  # the tokenizer's two convolutions halve the grid twice


class ConvTokenizer(nn.Module):
    """Two strided convolutions and a LayerNorm. Shape: ``(B, in_chans, *size)`` -> ``(B, *ceil(size / 4), dim)``."""

    def __init__(self, in_chans: int, dim: int, ndim: int) -> None:
        super().__init__()
        conv = CONVS[ndim]
        self.proj = nn.Sequential(
            conv(in_chans, dim // 2, 3, stride=2, padding=1), conv(dim // 2, dim, 3, stride=2, padding=1)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Field to tokens."""
        return self.norm(self.proj(x).movedim(1, -1))


class ConvDownsampler(nn.Module):
    """A strided convolution and a LayerNorm. Shape: ``(B, *grid, dim)`` -> ``(B, *ceil(grid / 2), 2 * dim)``."""

    def __init__(self, dim: int, ndim: int) -> None:
        super().__init__()
        self.reduction = CONVS[ndim](dim, 2 * dim, 3, stride=2, padding=1, bias=False)
        self.norm = nn.LayerNorm(2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Halve the grid, double the channels."""
        return self.norm(self.reduction(x.movedim(-1, 1)).movedim(1, -1))


class NeighborhoodBlock(nn.Module):
    """``x += gamma1 * attn(norm1(x)); x += gamma2 * mlp(norm2(x))`` on a grid, with optional layer scale.

    Args:
        dim: Channels.
        attn: The attention, ``(B, *grid, dim)`` -> the same.
        mlp_ratio: Hidden channels of the perceptron as a multiple of ``dim``.
        drop: Dropout inside the perceptron.
        drop_path: Probability of leaving a branch out in training.
        layer_scale: Initial value of ``gamma1`` and ``gamma2``; without them when None.

    Shape: ``(B, *grid, dim)`` -> the same.
    """

    gamma1: nn.Parameter | None
    gamma2: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        attn: nn.Module,
        *,
        mlp_ratio: float,
        drop: float = 0.0,
        drop_path: float = 0.0,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attn
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)
        for name in ("gamma1", "gamma2"):
            scale = None if layer_scale is None else nn.Parameter(torch.full((dim,), float(layer_scale)))
            self.register_parameter(name, scale)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both residual branches."""
        x = x + self.drop_path(_scaled(self.attn(self.norm1(x)), self.gamma1))
        return x + self.drop_path(_scaled(self.mlp(self.norm2(x)), self.gamma2))


def _scaled(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else x * gamma


class NeighborhoodLevel(nn.Module):
    """The blocks of one resolution, and the way to the next. Keys: ``blocks.*``, ``downsample.*``."""

    def __init__(self, blocks: Sequence[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(B, *grid, dim)`` -> this level's features, and the input of the next level."""
        x = self.blocks(x)
        return x, x if self.downsample is None else self.downsample(x)


class NeighborhoodTransformer(HubMixin, nn.Module):
    """NAT, or DiNAT with dilations: a pyramid of neighborhood attention, and a classification or dense head.

    Args:
        in_chans: Input channels.
        num_classes: Outputs of the classification head; 0 returns the pooled features. The dense head has none.
        ndim: Spatial dims, 2 or 3.
        head: ``"classification"``, or ``"dense"`` for a field on the input's grid (all levels merged top-down).
        out_chans: Channels of the dense head's field; ``in_chans`` without it.
        head_dim_dense: Width of the dense head; ``embed_dim`` without it.
        embed_dim: Channels of the first level; each next one has twice as many.
        depths, num_heads: Blocks and attention heads of each level.
        kernel_size: Window, one int or one a dim.
        dilations: Per level the dilation of every second block (the others have 1), or one number for each block.
            None: 1 everywhere, which is NAT.
        mlp_ratio: Hidden channels of the perceptrons as a multiple of their width.
        qkv_bias: Give the query-key-value projections a bias.
        rel_pos_bias: Learn a bias for every head and relative position, as the papers do.
        layer_scale: Initial value of a learned factor for each branch's channels; none when None.
        drop_rate, proj_drop_rate: Dropout after the tokenizer and in the perceptrons; after attention's projection.
        drop_path_rate: Stochastic depth of the last block; grows linearly from 0 at the first.
        img_size: Size of :meth:`example_inputs`; the model takes any size.

    Shape: ``(B, in_chans, *size)`` -> ``(B, num_classes)``, or ``(B, out_chans, *size)`` with the dense head.

    Raises:
        ValueError: arguments that contradict each other.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        *,
        ndim: int = 2,
        head: str = "classification",
        out_chans: int | None = None,
        head_dim_dense: int | None = None,
        embed_dim: int = 64,
        depths: Sequence[int] = (3, 4, 18, 5),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        kernel_size: int | Sequence[int] = 7,
        dilations: Sequence[int | Sequence[int]] | None = None,
        mlp_ratio: float = 3.0,
        qkv_bias: bool = True,
        rel_pos_bias: bool = True,
        layer_scale: float | None = None,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        img_size: int | Sequence[int] = 224,
    ) -> None:
        super().__init__()
        _check_head(head, out_chans)
        if ndim not in (2, 3) or len(num_heads) != len(depths):
            raise ValueError(
                f"expected ndim 2 or 3 and as many num_heads as depths, got ndim={ndim}, depths={tuple(depths)} and "
                f"num_heads={tuple(num_heads)}"
            )
        self.in_chans, self.ndim = in_chans, ndim
        self.num_classes = num_classes if head == "classification" else 0
        self.img_size = per_dim(img_size, ndim, "img_size")
        self.patch_embed = ConvTokenizer(in_chans, embed_dim, ndim)
        self.pos_drop = nn.Dropout(drop_rate)
        dims = [embed_dim * 2**level for level in range(len(depths))]
        steps = block_dilations(depths, dilations)
        drops = iter(torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist())
        levels = []
        for level, (dim, heads) in enumerate(zip(dims, num_heads, strict=True)):
            blocks = [
                NeighborhoodBlock(
                    dim,
                    NeighborhoodAttention(
                        dim,
                        heads,
                        kernel_size,
                        dilation=dilation,
                        ndim=ndim,
                        qkv_bias=qkv_bias,
                        rel_pos_bias=rel_pos_bias,
                        proj_drop=proj_drop_rate,
                    ),
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=next(drops),
                    layer_scale=layer_scale,
                )
                for dilation in steps[level]
            ]
            levels.append(NeighborhoodLevel(blocks, ConvDownsampler(dim, ndim) if level < len(dims) - 1 else None))
        self.levels = nn.ModuleList(levels)
        self.is_dense = head == "dense"
        self.norm: nn.Module = nn.Identity() if self.is_dense else nn.LayerNorm(dims[-1])
        self.head: nn.Module = nn.Identity()
        if self.is_dense:
            channels = in_chans if out_chans is None else out_chans
            self.head = PyramidHead(dims, head_dim_dense or embed_dim, channels, PATCH, ndim)
        elif num_classes:
            self.head = nn.Linear(dims[-1], num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as NAT does: linear layers truncated normal (std 0.02), the rest as torch does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that optimizers usually leave undecayed, besides biases and norms."""
        return {name for name, _ in self.named_parameters() if name.rpartition(".")[2] in ("rpb", "gamma1", "gamma2")}

    def example_inputs(self, batch_size: int = 1) -> tuple[Tensor, ...]:
        """Random inputs that ``forward`` accepts, on the weights' device and in their dtype."""
        weight = self.patch_embed.norm.weight
        return (weight.new_empty(batch_size, self.in_chans, *self.img_size).normal_(),)

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """``(B, in_chans, *size)`` -> the features of every level, ``(B, *grid, dim)``, finest first."""
        x = self.pos_drop(self.patch_embed(x))
        found = []
        for level in self.levels:
            features, x = level(x)
            found.append(features)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Run the whole model; shapes as in the class."""
        features = self.forward_features(x)
        if not self.is_dense:
            return self.head(self.norm(features[-1]).flatten(1, -2).mean(1))
        out = self.head(features)
        for d, n in enumerate(x.shape[2:], start=2):
            out = out.narrow(d, 0, n)
        return out


def block_dilations(depths: Sequence[int], dilations: Sequence[int | Sequence[int]] | None) -> list[tuple[int, ...]]:
    """The dilation of every block: per level, from one number for each second block, or as told.

    Raises:
        ValueError: another number of levels or blocks.
    """
    told = (1,) * len(depths) if dilations is None else tuple(dilations)
    if len(told) != len(depths):
        raise ValueError(f"expected dilations for {len(depths)} levels, got {told}")
    found = []
    for level, (depth, given) in enumerate(zip(depths, told, strict=True)):
        steps = tuple(given if i % 2 else 1 for i in range(depth)) if isinstance(given, int) else tuple(given)
        if len(steps) != depth:
            raise ValueError(f"level {level} has {depth} blocks, but dilations {given}; give one int, or one a block")
        found.append(steps)
    return found


def _check_head(head: str, out_chans: int | None) -> None:
    if head not in HEADS:
        raise ValueError(f"head must be one of {HEADS}, got {head!r}")
    if head == "classification" and out_chans is not None:
        raise ValueError(f"out_chans={out_chans} belongs to head='dense'; a classification head has num_classes")
