"""Fixed position embeddings of a grid: sines and cosines of each token's coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def split_pairs(dim: int, ndim: int) -> list[int]:
    """How many of the ``dim / 2`` (sine, cosine) pairs each of ``ndim`` coordinates gets, as evenly as they go.

    Raises:
        ValueError: an odd ``dim``, or not a pair for each coordinate.
    """
    if dim % 2 or dim // 2 < ndim:
        raise ValueError(
            f"sines and cosines of {ndim} coordinate(s) need an even number of channels, at least {2 * ndim}; got {dim}"
        )
    each, more = divmod(dim // 2, ndim)
    return [each + (i < more) for i in range(ndim)]


def sincos_positions(grid_size: Sequence[int], dim: int, max_period: float = 10000.0) -> Tensor:
    """Sine-cosine position embedding of a grid with any number of dims, in float32.

    The first channels belong to the *last* grid dim, as in DiT and MAE (He et al. 2022, arXiv:2111.06377), and for each
    coordinate all sines come before all cosines.

    Shape: ``(prod(grid_size), dim)``, the last grid dim fastest.

    Raises:
        ValueError: see :func:`split_pairs`.
    """
    parts = []
    for at, pairs in enumerate(split_pairs(dim, len(grid_size))):
        d = len(grid_size) - 1 - at
        steps = torch.arange(pairs, dtype=torch.float64)
        angles = torch.arange(grid_size[d], dtype=torch.float64)[:, None] * torch.exp(
            steps * (-math.log(max_period) / pairs)
        )
        part = torch.cat([angles.sin(), angles.cos()], dim=1)
        shape = [1] * len(grid_size)
        shape[d] = grid_size[d]
        parts.append(part.view(*shape, -1).expand(*grid_size, -1))
    return torch.cat(parts, dim=-1).reshape(-1, dim).float()
