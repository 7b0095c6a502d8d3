"""The pre-norm transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from dpzoo.models.layers.attention import Attention
from dpzoo.models.layers.drop_path import DropPath
from dpzoo.models.layers.layer_scale import LayerScale
from dpzoo.models.layers.mlp import Mlp


class Block(nn.Module):
    """``x += attn(norm1(x)); x += mlp(norm2(x))``, each branch with optional LayerScale and stochastic depth.

    Args:
        dim: Channels.
        num_heads: Attention heads.
        mlp_ratio: Hidden channels of the perceptron as a multiple of ``dim``.
        qkv_bias, qk_norm, attn_drop: See :class:`~dpzoo.models.layers.attention.Attention`.
        proj_drop: Dropout after the output projection and inside the perceptron.
        init_values: Initial LayerScale factor; no LayerScale when None or 0 (as in timm).
        drop_path: Probability of leaving a branch out in training.
        norm_eps: Epsilon of every LayerNorm.

    Shape: ``(B, N, dim)`` -> ``(B, N, dim)``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = Attention(
            dim,
            num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_eps=norm_eps,
        )
        self.ls1 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.ls2 = LayerScale(dim, init_values) if init_values else nn.Identity()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Apply both residual branches."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
