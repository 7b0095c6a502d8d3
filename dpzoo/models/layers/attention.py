"""Multi-head self-attention over a sequence of tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with one fused query-key-value projection.

    Args:
        dim: Channels, a multiple of ``num_heads``.
        num_heads: Attention heads.
        qkv_bias: Give the query-key-value projection a bias.
        qk_norm: LayerNorm queries and keys over the head's channels (Dehghani 2023, arXiv:2302.05442).
        attn_drop: Dropout of the attention weights.
        proj_drop: Dropout after the output projection.
        norm_eps: Epsilon of the query and key norms.

    Shape: ``(B, N, dim)`` -> ``(B, N, dim)``. Keys: ``qkv.*``, ``proj.*``, ``q_norm.*``, ``k_norm.*`` (timm's names).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got embed_dim={dim}, num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among the tokens of each sample."""
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # each (B, heads, N, head_dim)
        q, k = self.q_norm(q), self.k_norm(k)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        x = x.transpose(1, 2).reshape(b, n, c)
        return self.proj_drop(self.proj(x))
