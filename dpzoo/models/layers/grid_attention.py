"""Self-attention among all points of a grid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.layers.conv_norm_act import norm_groups
from dpzoo.models.layers.resample import ResampleConv


class GridAttention(nn.Module):
    """Group norm, attention over all grid points, output projection (no shortcut).

    Args:
        channels: Channels, a multiple of ``num_heads``.
        num_heads: Attention heads.
        ndim: Spatial dims.

    Shape: ``(B, channels, *grid)`` -> the same. Keys: ``norm.*``, ``qkv.*``, ``proj.*``. Output channels of ``qkv`` are
    ordered (head, channel of the head, query / key / value), the last fastest.
    """

    def __init__(self, channels: int, num_heads: int = 1, ndim: int = 2) -> None:
        super().__init__()
        if channels % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads, got {channels} and {num_heads}")
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(norm_groups(channels), channels, eps=1e-6)
        self.qkv = ResampleConv(channels, 3 * channels, 1, ndim=ndim)
        self.proj = ResampleConv(channels, channels, 1, ndim=ndim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among the points of each sample."""
        grid, channels = x.shape[2:], x.shape[1]
        points = self.qkv(self.norm(x)).flatten(2).unflatten(1, (self.num_heads, channels // self.num_heads, 3))
        q, k, v = points.permute(3, 0, 1, 4, 2).unbind(0)  # each (B, heads, points, head channels)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(2, 3).flatten(1, 2).unflatten(2, grid))
