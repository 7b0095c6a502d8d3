"""The parts of a DiT: attention over a grid of tokens, the adaLN-zero block, the final layer.

Tokens stay on their grid, ``(B, *grid, D)``, except inside global attention: cut along two dims, they then stay where
they are, while in a row their shards would interleave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from dpzoo import ops
from dpzoo.models.layers import Attention, DropPath, Mlp
from dpzoo.models.layers.modulation import for_tokens, modulate, modulation
from dpzoo.models.layers.rotary import RotaryEmbedding


class GridAttention(Attention):
    """Self-attention of the tokens of a grid: among all of them, or of each with its neighborhood.

    Args:
        dim, num_heads, qkv_bias, qk_norm, attn_drop, proj_drop, norm_eps: See
            :class:`~dpzoo.models.layers.attention.Attention`. There is no ``attn_drop`` in a neighborhood.
        grid_size: Tokens along each dim.
        kernel_size: Window of neighborhood attention (Hassani et al. 2023, arXiv:2204.07143), one int or one a dim;
            None: all tokens attend to all.
        dilation: Step between the tokens of a window, likewise.
        mask_token: Hold a learned token that takes the place of tokens without valid data. It starts at zero.

    Shape: ``(B, *grid_size, dim)`` -> the same. Keys: those of Attention, and ``mask_token (1, 1, dim)``.

    Raises:
        ValueError: ``attn_drop`` with a neighborhood.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: Sequence[int],
        kernel_size: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
        mask_token: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, **options)
        self.grid_size, self.kernel_size, self.dilation = tuple(grid_size), kernel_size, dilation
        if kernel_size is not None and self.attn_drop.p > 0:
            raise ValueError(f"neighborhood attention has no dropout of its weights; attn_drop={self.attn_drop.p}")
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim)) if mask_token else None

    def forward(self, x: Tensor, rotary: RotaryEmbedding | None = None, invalid: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            rotary: Turns queries and keys by their places.
            invalid: ``(B or 1, *grid_size, 1)``, True at tokens that the mask token replaces.
        """
        if self.mask_token is not None and invalid is not None:
            x = torch.where(invalid, self.mask_token.to(x.dtype), x)
        x = self._full(x, rotary) if self.kernel_size is None else self._neighborhood(x, rotary, self.kernel_size)
        return self.proj_drop(self.proj(x))

    def _full(self, x: Tensor, rotary: RotaryEmbedding | None) -> Tensor:
        x = x.flatten(1, -2)
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotary(q, k)
        drop = self.attn_drop.p if self.training else 0.0
        x = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        return x.transpose(1, 2).reshape(b, n, c).unflatten(1, self.grid_size)

    def _neighborhood(self, x: Tensor, rotary: RotaryEmbedding | None, kernel_size: int | Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotary(q, k, on_grid=True)
        attend = {1: ops.na1d, 2: ops.na2d, 3: ops.na3d}[len(self.grid_size)]
        return attend(q, k, v, kernel_size=kernel_size, dilation=self.dilation).flatten(-2)


class DiTBlock(nn.Module):
    """A transformer block whose norms and branches are shifted, scaled and gated by the condition (adaLN-zero).

    Args:
        dim: Channels.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels of the perceptron as a multiple of ``dim``.
        proj_drop: Dropout after the output projection and inside the perceptron.
        drop_path: Probability of leaving a branch out in training.
        norm_eps: Epsilon of every LayerNorm.
        attention: Further arguments of :class:`GridAttention`.

    Shape: ``(B, *grid, dim)`` and a condition ``(B, dim)`` -> ``(B, *grid, dim)``.
    Keys: ``attn.*``, ``mlp.*``, ``adaLN_modulation.1.*`` (the DiT release's names).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        **attention: Any,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=norm_eps)
        self.attn = GridAttention(dim, num_heads, proj_drop=proj_drop, norm_eps=norm_eps, **attention)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, approximate="tanh")
        self.adaLN_modulation = modulation(dim, 6)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(
        self, x: Tensor, condition: Tensor, rotary: RotaryEmbedding | None = None, invalid: Tensor | None = None
    ) -> Tensor:
        """Apply both residual branches; ``rotary`` and ``invalid`` are for the attention."""
        shift1, scale1, gate1, shift2, scale2, gate2 = for_tokens(self.adaLN_modulation(condition), x, 6)
        branch = self.attn(modulate(self.norm1(x), shift1, scale1), rotary, invalid)
        x = x + self.drop_path(gate1 * branch)
        branch = self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x + self.drop_path(gate2 * branch)


class FinalLayer(nn.Module):
    """The last, modulated norm, one linear layer per token, and un-patchify.

    Args:
        dim: Channels of a token.
        out_chans: Channels of the field.
        patch_size: Size of a patch along each spatial dim.
        norm_eps: Epsilon of the LayerNorm.

    Shape: ``(B, *grid, dim)`` and a condition ``(B, dim)`` -> ``(B, out_chans, *(grid * patch_size))``.
    Keys: ``linear.*``, ``adaLN_modulation.1.*``. All of them start at zero.
    """

    def __init__(self, dim: int, out_chans: int, patch_size: Sequence[int], norm_eps: float = 1e-6) -> None:
        super().__init__()
        self.patch_size = tuple(patch_size)
        self.norm_final = nn.LayerNorm(dim, elementwise_affine=False, eps=norm_eps)
        self.linear = nn.Linear(dim, math.prod(self.patch_size) * out_chans)
        self.adaLN_modulation = modulation(dim, 2)
        dims = range(len(self.patch_size))
        grid, patch = (" ".join(f"{kind}{d}" for d in dims) for kind in "gp")
        self._layouts = f"b {grid} ({patch} c) -> b c {' '.join(f'(g{d} p{d})' for d in dims)}"

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Tokens to a field."""
        shift, scale = for_tokens(self.adaLN_modulation(condition), x, 2)
        patches = self.linear(modulate(self.norm_final(x), shift, scale))
        return rearrange(patches, self._layouts, **{f"p{d}": n for d, n in enumerate(self.patch_size)})
