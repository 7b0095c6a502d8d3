"""Weights that belong to a grid, moved to another grid: position embeddings, patch kernels, relative position biases.

Every function takes the old grid where the tensor does not show it: 64 positions are an 8 x 8 grid, or 4 x 16. All
work in any number of dims, one dim after the other, in float32 or the tensor's own dtype if that is finer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = ("bicubic", "bilinear")


def resample_positions(
    positions: Tensor,
    old_grid: Sequence[int],
    new_grid: Sequence[int],
    *,
    prefix_tokens: int = 0,
    mode: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """A learned position embedding, interpolated to another grid; the rows of prefix tokens stay as they are.

    Args:
        positions: One row per token, the last grid dim fastest, prefix tokens (class, registers) first.
        old_grid, new_grid: Patches along each dim.
        prefix_tokens: Leading rows that stand for no place.
        mode: "bicubic" or "bilinear", in as many dims as the grids have.
        antialias: Smooth before a dim gets coarser.

    Shape: ``(1, prefix_tokens + prod(old_grid), D)`` -> ``(1, prefix_tokens + prod(new_grid), D)``, same dtype.

    Raises:
        ValueError: grids of different numbers of dims, or rows that are not those of ``old_grid``.
    """
    old, new = tuple(old_grid), tuple(new_grid)
    rows = prefix_tokens + math.prod(old)
    if positions.ndim != 3 or positions.shape[0] != 1 or positions.shape[1] != rows or len(old) != len(new):
        raise ValueError(
            f"resample_positions: a grid of {old} with {prefix_tokens} prefix tokens has shape (1, {rows}, D), "
            f"got {tuple(positions.shape)}; the new grid is {new}"
        )
    if old == new:
        return positions
    prefix, places = positions[:, :prefix_tokens], positions[0, prefix_tokens:]
    grid = _wide(places).unflatten(0, old).movedim(-1, 0)
    moved = resize(grid, new, mode=mode, antialias=antialias).movedim(0, -1).flatten(0, -2)
    return torch.cat([prefix, moved.to(positions.dtype)[None]], dim=1)


def resample_patch_kernel(kernel: Tensor, new_size: Sequence[int], *, mode: str = "bicubic") -> Tensor:
    """The kernel of a patch embedding for patches of another size, by the pseudo-inverse of resizing.

    A larger patch of an enlarged picture then gives the token that the old patch gave (FlexiViT, Beyer et al. 2023,
    arXiv:2212.08013). The pseudo-inverse of a resize along all dims is the product of those along each.

    Shape: ``(D, C, *old_size)`` -> ``(D, C, *new_size)``, same dtype.

    Raises:
        ValueError: another number of dims.
    """
    new = tuple(new_size)
    if kernel.ndim != len(new) + 2:
        raise ValueError(f"resample_patch_kernel: a kernel of shape {tuple(kernel.shape)} has no patches of {new}")
    out = kernel.double()  # a pseudo-inverse in float32 loses half of the digits; kernels are small
    for d, size in enumerate(new, start=2):
        if out.shape[d] != size:
            basis = torch.eye(out.shape[d], dtype=torch.float64, device=kernel.device)
            resized = _resize_dim(basis, 1, size, mode, antialias=True)  # row i: where basis vector i goes
            out = (out.movedim(d, -1) @ torch.linalg.pinv(resized).T).movedim(-1, d)
    return out.to(kernel.dtype)


def resample_bias_table(table: Tensor, new_size: Sequence[int], *, mode: str = "bicubic") -> Tensor:
    """A table of attention biases by relative position, for another window.

    Shape: ``(heads, *old_size)`` -> ``(heads, *new_size)``, sizes 2 * window - 1 along each dim (NAT's ``rpb``).

    Raises:
        ValueError: another number of dims.
    """
    new = tuple(new_size)
    if table.ndim != len(new) + 1:
        raise ValueError(f"resample_bias_table: a table of shape {tuple(table.shape)} has no windows of {new}")
    return resize(_wide(table), new, mode=mode, antialias=False).to(table.dtype)


def resample_flat_bias_table(
    table: Tensor, old_size: Sequence[int], new_size: Sequence[int], *, mode: str = "bicubic"
) -> Tensor:
    """Like :func:`resample_bias_table` for tables with one row per relative position, as Swin keeps them.

    Shape: ``(prod(old_size), heads)`` -> ``(prod(new_size), heads)``.

    Raises:
        ValueError: rows that are not those of ``old_size``.
    """
    if table.ndim != 2 or table.shape[0] != math.prod(old_size):
        raise ValueError(f"resample_flat_bias_table: {tuple(old_size)} has no table of shape {tuple(table.shape)}")
    moved = resample_bias_table(table.T.unflatten(1, tuple(old_size)), new_size, mode=mode)
    return moved.flatten(1).T.contiguous()


def adapt_input_channels(kernel: Tensor, channels: int) -> Tensor:
    """The first kernel of a net for pictures (3 channels), for another number of channels.

    One channel: the sum over the three. Others: the three repeated in turn, scaled by ``3 / channels``, so that the
    answer to equal channels stays. Both as timm does.

    Shape: ``(D, 3, ...)`` -> ``(D, channels, ...)``.

    Raises:
        ValueError: a kernel that does not have 3 input channels.
    """
    if kernel.shape[1] == channels:
        return kernel
    if kernel.shape[1] != 3:
        raise ValueError(
            f"only kernels for pictures (3 channels) are adapted to other inputs, this one has {kernel.shape[1]} "
            f"(wanted: {channels})"
        )
    wide = _wide(kernel)
    if channels == 1:
        return wide.sum(dim=1, keepdim=True).to(kernel.dtype)
    repeated = wide[:, torch.arange(channels, device=kernel.device) % 3]
    return (repeated * (3.0 / channels)).to(kernel.dtype)


def resize(x: Tensor, sizes: Sequence[int], *, mode: str = "bicubic", antialias: bool = True) -> Tensor:
    """Interpolate all dims but the first, one dim after the other. Shape: ``(C, *old)`` -> ``(C, *sizes)``."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    for d, size in enumerate(sizes, start=1):
        if x.shape[d] != size:
            x = _resize_dim(x, d, size, mode, antialias)
    return x


def _resize_dim(x: Tensor, dim: int, size: int, mode: str, antialias: bool) -> Tensor:
    """Interpolate one dim; torch's two-dimensional interpolation on one row.

    The row is the last dim: with a last dim of size 1, torch 2.14 antialiases wrongly.
    """
    lines = x.movedim(dim, -1)
    rows = lines.reshape(1, -1, 1, lines.shape[-1])
    moved = F.interpolate(rows, size=(1, size), mode=mode, align_corners=False, antialias=antialias)
    return moved.reshape(*lines.shape[:-1], size).movedim(-1, dim)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
