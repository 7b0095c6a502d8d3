"""A dense head for a pyramid of features: all levels merged, coarse to fine, then un-patchified.

Paper: Lin et al. 2017, "Feature Pyramid Networks" (arXiv:1612.03144).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.models.layers.conv_norm_act import CONVS, TRANSPOSED_CONVS

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


class PyramidHead(nn.Module):
    """Norm and project each level to one width, add it to the interpolated sum of the coarser ones, expand to a field.

    Args:
        dims: Channels of the levels, finest first.
        width: Channels of the merged features.
        out_chans: Channels of the field.
        patch_size: Field points per token of the finest level, along every dim.
        ndim: Spatial dims.

    Shape: ``[(B, *grid, dim), ...]`` -> ``(B, out_chans, *(finest grid * patch_size))``.
    Keys: ``norms.l.*``, ``laterals.l.*``, ``smooth.*``, ``proj.*``.
    """

    def __init__(self, dims: Sequence[int], width: int, out_chans: int, patch_size: int, ndim: int) -> None:
        super().__init__()
        self.mode = LINEAR[ndim]
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for dim in dims)
        self.laterals = nn.ModuleList(nn.Linear(dim, width) for dim in dims)
        self.smooth = CONVS[ndim](width, width, 3, padding=1)
        self.act = nn.GELU()
        self.proj = TRANSPOSED_CONVS[ndim](width, out_chans, patch_size, stride=patch_size)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Features of all levels to a field."""
        merged: Tensor | None = None
        for norm, lateral, x in reversed(list(zip(self.norms, self.laterals, features, strict=True))):
            own = lateral(norm(x)).movedim(-1, 1)
            if merged is not None:
                own = own + F.interpolate(merged, size=own.shape[2:], mode=self.mode)
            merged = own
        assert merged is not None
        return self.proj(self.act(self.smooth(merged)))
