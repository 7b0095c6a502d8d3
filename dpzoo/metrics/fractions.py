"""Fractions skill score: are there as many events in the neighbourhood as there should be?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.metrics.categories import check_events
from dpzoo.metrics.weighting import Dims, all_dims, check_members, wide


def fractions_skill_score(
    forecast: Tensor,
    truth: Tensor,
    thresholds: Sequence[float],
    window: int | tuple[int, int],
    *,
    member_dim: int | None = None,
    mask: Tensor | None = None,
    dims: Dims = None,
) -> Tensor:
    """FSS at each threshold, from 0 to 1 (perfect): Roberts & Lean 2008, doi:10.1175/2007MWR2123.1.

    ``1 - sum (f - o)^2 / (sum f^2 + sum o^2)``, f and o the fractions of a window's points at which the value is >= the
    threshold. A window at the border counts points outside the grid as no event, as in the paper. NaN without an event.

    Args:
        window: Points on a side of the window, odd; rows and columns may differ.
        member_dim: Where the forecast has its members, if it is an ensemble: f is then the mean over them too.
        mask: bool, False where there is no data, broadcast to the truth: no event there, and no window's centre.
        dims: Dims of the truth over which windows are summed before the ratio; all without it. The last two (the grid)
            must be among them.

    Shape: ``(..., H, W)``, or ``(M, ..., H, W)`` with ``member_dim``, and ``truth (..., H, W)`` -> ``(T,)``, then what
    ``dims`` leaves.

    Raises:
        ValueError: shapes that do not fit, an even window, or ``dims`` without the grid.
    """
    if member_dim is None:
        check_events(forecast, truth, thresholds, "FSS")
    else:
        member_dim = check_members(forecast, truth, member_dim, 1, "FSS")
        check_events(truth, truth, thresholds, "FSS")
    over, size = _grid_dims(truth, dims), _odd(window)
    counts = None if mask is None else mask.expand(truth.shape) > 0
    kind = wide(forecast, truth)[0].dtype
    scores = []
    for threshold in thresholds:
        said, seen = (forecast >= threshold).to(kind), (truth >= threshold).to(kind)
        if member_dim is not None:
            said = said.mean(member_dim)
        f, o = (_fractions(event if counts is None else event * counts, size) for event in (said, seen))
        if counts is not None:
            f, o = f * counts, o * counts
        scores.append(1 - (f - o).square().sum(over) / (f.square().sum(over) + o.square().sum(over)))
    return torch.stack(scores)


def _fractions(event: Tensor, size: tuple[int, int]) -> Tensor:
    grid = tuple(event.shape[-2:])
    shares = F.avg_pool2d(event.reshape(-1, 1, *grid), size, stride=1, padding=(size[0] // 2, size[1] // 2))
    return shares.reshape(event.shape)


def _odd(window: int | tuple[int, int]) -> tuple[int, int]:
    rows, columns = (window, window) if isinstance(window, int) else window
    if rows < 1 or columns < 1 or rows % 2 == 0 or columns % 2 == 0:
        raise ValueError(f"FSS: a window is centred on a point, so its sides must be odd; got {window}")
    return rows, columns


def _grid_dims(truth: Tensor, dims: Dims) -> tuple[int, ...]:
    if truth.ndim < 2:
        raise ValueError(f"FSS needs fields with rows and columns (..., H, W), got {tuple(truth.shape)}")
    over = all_dims(truth.ndim, dims)
    if not {truth.ndim - 2, truth.ndim - 1} <= set(over):
        raise ValueError(f"FSS: dims must hold the grid, the last two dims of {tuple(truth.shape)}; got {dims}")
    return over
