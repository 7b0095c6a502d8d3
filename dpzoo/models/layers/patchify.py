"""Between a field on a grid and a sequence of flat patches, in any number of spatial dims.

Tokens run over the patch grid with the last spatial dim fastest; inside a token the order is (patch dims, channels),
that of DiT's final layer (Peebles 2022, arXiv:2212.09748). The two functions are exact inverses of each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor


def patchify(x: Tensor, patch_size: Sequence[int]) -> Tensor:
    """Cut a field into flat patches.

    Shape: ``(B, C, *(g_i * p_i))`` -> ``(B, prod(g), prod(p) * C)``.

    Raises:
        ValueError: a spatial size is not a multiple of its patch size.
    """
    sizes = tuple(x.shape[2:])
    if len(sizes) != len(patch_size) or any(s % p for s, p in zip(sizes, patch_size, strict=True)):
        raise ValueError(f"patches of {tuple(patch_size)} do not tile a field of {sizes}")
    field, tokens = _layouts(len(sizes))
    return rearrange(x, f"{field} -> {tokens}", **_named("p", patch_size))


def unpatchify(x: Tensor, grid_size: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """Put flat patches back on their grid.

    Shape: ``(B, prod(g), prod(p) * C)`` -> ``(B, C, *(g_i * p_i))``.
    """
    field, tokens = _layouts(len(grid_size))
    return rearrange(x, f"{tokens} -> {field}", **_named("g", grid_size), **_named("p", patch_size))


def _layouts(ndim: int) -> tuple[str, str]:
    grid, patch = ([f"{kind}{i}" for i in range(ndim)] for kind in "gp")
    field = " ".join(f"({g} {p})" for g, p in zip(grid, patch, strict=True))
    return f"b c {field}", f"b ({' '.join(grid)}) ({' '.join(patch)} c)"


def _named(kind: str, sizes: Sequence[int]) -> dict[str, int]:
    return {f"{kind}{i}": size for i, size in enumerate(sizes)}
