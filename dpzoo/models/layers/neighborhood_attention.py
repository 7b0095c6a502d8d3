"""Multi-head self-attention on a grid, each token among those in a window around it.

Papers: Hassani et al. 2023 (NAT, arXiv:2204.07143), Hassani & Shi 2022 (DiNAT, arXiv:2209.15001).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.layers.conv_norm_act import per_dim
from dpzoo.ops import neighborhood_attention


class NeighborhoodAttention(nn.Module):
    """Neighborhood attention with one fused query-key-value projection.

    A grid smaller than the window is padded with zeros at its end, as NAT does, and the extra tokens dropped.

    Args:
        dim: Channels, a multiple of ``num_heads``.
        num_heads: Attention heads.
        kernel_size: Window, one int or one a dim.
        stride, dilation, is_causal: See :func:`dpzoo.ops.neighborhood_attention`.
        ndim: Spatial dims, 1 to 3.
        qkv_bias: Give the query-key-value projection a bias.
        rel_pos_bias: Learn a bias for every head and relative position, as NAT and DiNAT do.
        proj_drop: Dropout after the output projection.

    Shape: ``(B, *grid, dim)`` -> the same. Keys: ``qkv.*``, ``proj.*``, ``rpb (num_heads, 2 * kernel_size - 1, ...)``.

    Raises:
        ValueError: arguments that do not fit each other.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kernel_size: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        is_causal: bool | Sequence[bool] = False,
        ndim: int = 2,
        qkv_bias: bool = True,
        rel_pos_bias: bool = False,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"channels must be a multiple of num_heads, got {dim} and {num_heads}")
        self.ndim, self.num_heads, self.head_dim = ndim, num_heads, dim // num_heads
        self.kernel_size = per_dim(kernel_size, ndim, "kernel_size")
        self.stride = per_dim(stride, ndim, "stride")
        self.dilation = per_dim(dilation, ndim, "dilation")
        self.is_causal = is_causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        table = torch.empty(num_heads, *(2 * k - 1 for k in self.kernel_size))
        self.rpb = nn.Parameter(table) if rel_pos_bias else None
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the bias table truncated normal (std 0.02); the projections keep torch's initialisation."""
        if self.rpb is not None:
            nn.init.trunc_normal_(self.rpb, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Attend inside each token's window."""
        grid = x.shape[1:-1]
        x = self._padded(x)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.unbind(-3)  # each (B, *grid, heads, head_dim)
        x = neighborhood_attention(
            self.ndim, q, k, v, self.kernel_size, self.stride, self.dilation, self.is_causal, rel_pos_bias=self.rpb
        ).flatten(-2)
        for d, n in enumerate(grid, start=1):
            if x.shape[d] != n:
                x = x.narrow(d, 0, n)
        return self.proj_drop(self.proj(x))

    def _padded(self, x: Tensor) -> Tensor:
        """The grid, at least as large as the window along every dim."""
        missing = [max(0, k * d - n) for k, d, n in zip(self.kernel_size, self.dilation, x.shape[1:-1], strict=True)]
        if not any(missing):
            return x
        return F.pad(x, (0, 0, *(n for last in reversed(missing) for n in (0, last))))

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}"
