"""Heads that turn tokens back into a field."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from dpzoo.models.layers.patchify import unpatchify


class DenseHead(nn.Module):
    """One linear layer per patch token, then un-patchify to the field's grid.

    Args:
        dim: Channels of a token.
        out_chans: Channels of the field.
        grid_size: Patches along each spatial dim.
        patch_size: Size of a patch along each spatial dim.

    Shape: ``(B, prod(grid_size), dim)`` -> ``(B, out_chans, *(grid_size * patch_size))``. Keys: ``proj.*``.
    """

    def __init__(self, dim: int, out_chans: int, grid_size: Sequence[int], patch_size: Sequence[int]) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.patch_size = tuple(patch_size)
        self.proj = nn.Linear(dim, math.prod(self.patch_size) * out_chans)

    def forward(self, x: Tensor) -> Tensor:
        """Patch tokens to a field."""
        return unpatchify(self.proj(x), self.grid_size, self.patch_size)
