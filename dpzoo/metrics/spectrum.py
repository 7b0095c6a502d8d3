"""Power of a field by wavelength."""

from __future__ import annotations

import torch
from torch import Tensor

from dpzoo.metrics.weighting import check_weights, wide


def radial_power_spectrum(
    field: Tensor, spacing: float | tuple[float, float] = 1.0, *, taper: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Power in rings of equal wavenumber, all directions together.

    A ring is as wide as the lowest wavenumber of the shorter side, and ring k holds the waves nearest to k times that;
    the last ring is the shortest wave that both directions can show, so the corners beyond it are left out. Without
    them the powers would add up to the mean square of the field (Parseval); ring 0 is that of its mean. A field that is
    not periodic has false power at short waves, which ``taper`` lowers.

    Args:
        spacing: Distance of points, for rows and columns: it sets the unit of the wavenumbers, cycles per its unit.
        taper: First take the mean away and let the field fall to zero at the border (a Hann window, scaled to keep the
            power of white noise).
        mask: bool, False where there is no data, broadcast to the field: the mean of the others is taken away and what
            there is (NaN too) counts as 0. It acts as a window, is scaled as one, and blurs a spectrum as one: compare
            fields with the same mask. NaN for a field without any data.

    Shape: ``(..., H, W)`` -> wavenumbers ``(K,)``, power ``(..., K)``.

    Raises:
        ValueError: a field without two dims, a spacing that is not positive, or a mask that does not broadcast to it.
    """
    steps = (spacing, spacing) if isinstance(spacing, int | float) else tuple(spacing)
    if field.ndim < 2 or len(steps) != 2 or not min(steps) > 0:
        raise ValueError(
            f"radial_power_spectrum needs a field (..., H, W) and a spacing > 0, got {tuple(field.shape)}, {spacing}"
        )
    (field,) = wide(field)
    rows, columns = field.shape[-2:]
    ring, count, width = _rings(rows, columns, steps, field.device)
    if mask is not None:
        field = _masked(field, mask, _hann(rows, columns, field) if taper else None)
    elif taper:
        field = (field - field.mean((-2, -1), keepdim=True)) * _hann(rows, columns, field)
    power = torch.fft.rfft2(field, norm="forward").abs().square() * _copies(columns, field)
    sums = power.new_zeros(*power.shape[:-2], count + 1).index_add(-1, ring.flatten(), power.flatten(-2))
    numbers = torch.arange(count, device=field.device, dtype=field.dtype) * width
    return numbers, sums[..., :count]


def _masked(field: Tensor, mask: Tensor, window: Tensor | None) -> Tensor:
    """The field without its mean, where there is data, times the window, of which only that part is there."""
    check_weights(field, mask)
    counts = mask.expand(*mask.shape[:-2], *field.shape[-2:]).to(field.dtype)
    seen = counts if window is None else counts * window
    sums = torch.where(mask, field, 0.0).sum((-2, -1), keepdim=True)
    mean = sums / counts.sum((-2, -1), keepdim=True)
    scale = seen.square().mean((-2, -1), keepdim=True).sqrt()
    return torch.where(mask, field - mean, 0.0) * seen / scale


def _rings(rows: int, columns: int, steps: tuple[float, ...], device: torch.device) -> tuple[Tensor, int, float]:
    """Ring of each wave of a real transform, how many rings there are (what is beyond goes to one more), the width."""
    width = 1.0 / min(rows * steps[0], columns * steps[1])
    shortest = min(0.5 / steps[0], 0.5 / steps[1])
    count = int(shortest / width + 1e-9) + 1
    ky = torch.fft.fftfreq(rows, steps[0], device=device, dtype=torch.float64)
    kx = torch.fft.rfftfreq(columns, steps[1], device=device, dtype=torch.float64)
    ring = (ky[:, None].square() + kx.square()).sqrt().div(width)
    return (ring + 0.5 - 1e-9).floor().long().clamp(max=count), count, width


def _copies(columns: int, like: Tensor) -> Tensor:
    """A real transform leaves out the mirror image of its columns, except where that is the column itself."""
    copies = torch.full((columns // 2 + 1,), 2.0, device=like.device, dtype=like.dtype)
    copies[0] = 1.0
    if columns % 2 == 0:
        copies[-1] = 1.0
    return copies


def _hann(rows: int, columns: int, like: Tensor) -> Tensor:
    sides = [
        torch.hann_window(n, periodic=False, device=like.device, dtype=torch.float64)
        if n > 2
        else torch.ones(n, device=like.device, dtype=torch.float64)
        for n in (rows, columns)
    ]
    window = sides[0][:, None] * sides[1]
    return (window / window.square().mean().sqrt()).to(like.dtype)
