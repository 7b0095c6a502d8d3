"""Cut a field into patches and project each to a token: a convolution whose kernel equals its stride."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class PatchEmbed(nn.Module):
    """Patch embedding in 1, 2 or 3 spatial dims.

    Args:
        img_size: Spatial sizes; one int stands for a square (cube).
        patch_size: Patch sizes, likewise. Every spatial size is a multiple of its patch size.
        in_chans: Input channels.
        embed_dim: Channels of a token.
        ndim: Number of spatial dims. Without it: the length of ``img_size`` or ``patch_size`` if one is a sequence,
            else 2.

    Shape: ``(B, in_chans, *img_size)`` -> ``(B, N, embed_dim)`` with ``N = prod(img_size / patch_size)``, the last
    spatial dim fastest. Keys: ``proj.weight (embed_dim, in_chans, *patch_size)``, ``proj.bias`` (timm's names).

    Raises:
        ValueError: sizes that do not fit together; in ``forward``, an input of another shape.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        ndim: int | None = None,
    ) -> None:
        super().__init__()
        ndim = _spatial_ndim(img_size, patch_size, ndim)
        self.img_size = _per_dim("img_size", img_size, ndim)
        self.patch_size = _per_dim("patch_size", patch_size, ndim)
        self.in_chans = in_chans
        _check_divisible(self.img_size, self.patch_size)
        self.grid_size = tuple(s // p for s, p in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = math.prod(self.grid_size)
        self.proj = CONVOLUTIONS[ndim](in_chans, embed_dim, kernel_size=self.patch_size, stride=self.patch_size)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Field to patch tokens."""
        return self._projected(x).flatten(2).transpose(1, 2)

    def on_grid(self, x: Tensor) -> Tensor:
        """Field to patch tokens on their grid, ``(B, *grid_size, embed_dim)``, cut as the field is."""
        return self._projected(x).movedim(1, -1)

    def _projected(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != (self.in_chans, *self.img_size):
            expected = ", ".join(str(n) for n in (self.in_chans, *self.img_size))
            raise ValueError(
                f"this model was built for inputs of shape (batch, {expected}), got {tuple(x.shape)}; "
                "build it with img_size= and in_chans= of your data, or crop or pad the input"
            )
        return self.proj(x)


def _spatial_ndim(img_size: int | Sequence[int], patch_size: int | Sequence[int], ndim: int | None) -> int:
    if ndim is None:
        ndim = next((len(s) for s in (img_size, patch_size) if not isinstance(s, int)), 2)
    if ndim not in CONVOLUTIONS:
        raise ValueError(f"patch embedding works in 1, 2 or 3 spatial dims, got {ndim} (img_size={img_size})")
    return ndim


def _per_dim(name: str, value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    sizes = (value,) * ndim if isinstance(value, int) else tuple(int(v) for v in value)
    if len(sizes) != ndim:
        raise ValueError(f"{name}={value} has {len(sizes)} sizes, but the model has {ndim} spatial dims")
    if min(sizes) < 1:
        raise ValueError(f"{name}={value} must be positive in every dim")
    return sizes


def _check_divisible(img_size: tuple[int, ...], patch_size: tuple[int, ...]) -> None:
    for dim, (size, patch) in enumerate(zip(img_size, patch_size, strict=True)):
        if size % patch:
            below = size - size % patch
            choices = f"{below + patch}" if below == 0 else f"{below} or {below + patch}"
            raise ValueError(
                f"img_size {img_size} is not divisible by patch_size {patch_size} in spatial dim {dim}: "
                f"{size} = {size // patch} * {patch} + {size % patch}; crop or pad that dim to {choices}"
            )
