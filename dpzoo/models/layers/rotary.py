"""Rotary position embedding: queries and keys turn by angles that grow with their place, so that their product depends
on the distance between them.

Su et al. 2021 (arXiv:2104.09864); on a grid every coordinate turns a share of the channels ("axial", as in EVA-02,
arXiv:2303.11331). Tables are plain tensors of the whole grid: where tokens are sharded, they are sliced like them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dpzoo.models.layers.pos_embed import split_pairs


def rotary_angles(grid_size: Sequence[int], head_dim: int, theta: float = 10000.0) -> Tensor:
    """Angles in radians by which each pair of channels turns at each place of a grid, in float32.

    Pairs are shared out to the grid dims in order; pair k of the n of a dim turns by ``theta ** (-k / n)`` a step.

    Shape: ``(*grid_size, head_dim / 2)``.

    Raises:
        ValueError: an odd ``head_dim``, or not a pair for each dim.
    """
    parts = []
    for d, pairs in enumerate(split_pairs(head_dim, len(grid_size))):
        rates = theta ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = torch.arange(grid_size[d], dtype=torch.float64)[:, None] * rates
        shape = [1] * len(grid_size)
        shape[d] = grid_size[d]
        parts.append(angles.view(*shape, -1).expand(*grid_size, -1))
    return torch.cat(parts, dim=-1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = True) -> Tensor:
    """Turn every pair of channels.

    Args:
        cos, sin: Of the angles, one per pair: ``(..., head_dim / 2)``, broadcast against ``x``.
        interleaved: Pairs are neighbouring channels (2k, 2k + 1); else channels (k, k + head_dim / 2), "rotate half".

    Shape: ``(..., head_dim)`` -> the same, in x's dtype; half precision is computed in the tables' dtype.
    """
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    else:
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    return turned.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary embedding of the tokens of a grid with any number of dims.

    Args:
        grid_size: Tokens along each dim; one entry for a sequence.
        head_dim: Channels of a head, even.
        theta: Base of the frequencies.
        interleaved: See :func:`rotate`.

    Shape of ``forward(q, k)``: ``(B, heads, N, head_dim)`` each, or ``(B, *grid_size, heads, head_dim)`` with
    ``on_grid=True`` -> the same. It has no weights; its tables are not saved.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, grid_size: Sequence[int], head_dim: int, *, theta: float = 10000.0, interleaved: bool = True
    ) -> None:
        super().__init__()
        self.grid_size, self.interleaved = tuple(grid_size), interleaved
        angles = rotary_angles(self.grid_size, head_dim, theta)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, *, on_grid: bool = False) -> tuple[Tensor, Tensor]:
        """Turn queries and keys by their places."""
        shape = (*self.grid_size, 1, -1) if on_grid else (-1, self.cos.shape[-1])
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        return (
            rotate(q, cos, sin, interleaved=self.interleaved),
            rotate(k, cos, sin, interleaved=self.interleaved),
        )
