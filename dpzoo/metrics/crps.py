"""Continuous ranked probability score of an ensemble."""

from __future__ import annotations

import torch
from torch import Tensor

from dpzoo.metrics.weighting import Dims, check_members, weighted_mean, wide


def crps(
    forecast: Tensor,
    truth: Tensor,
    *,
    member_dim: int = 0,
    fair: bool = True,
    weights: Tensor | None = None,
    dims: Dims = None,
) -> Tensor:
    """Mean CRPS, in the unit of the fields; for one member it is the mean absolute error.

    Args:
        fair: The unbiased estimate for an ensemble of this size (Ferro 2014, doi:10.1002/qj.2270): what many members of
            the same kind would get. False: the score of the ensemble as it is.
        weights: How much a point counts, broadcast to the truth; bool too.
        dims: Dims of the truth over which the mean is taken; all without it.

    Shape: ``forecast (M, ...)`` with the members in ``member_dim``, ``truth (...)`` -> ``()``, or what ``dims`` leaves.

    Raises:
        ValueError: shapes that do not fit, or ``fair`` with one member.
    """
    return weighted_mean(crps_field(forecast, truth, member_dim=member_dim, fair=fair), weights, dims)


def crps_field(forecast: Tensor, truth: Tensor, *, member_dim: int = 0, fair: bool = True) -> Tensor:
    """CRPS at every point: ``mean |x_i - y| - mean |x_i - x_j| / 2``; arguments as in :func:`crps`.

    Sorting the members gives the second term without their pairs, so memory grows with M and not with M squared.

    Shape: ``(M, ...)``, ``(...)`` -> ``(...)``.
    """
    dim = check_members(forecast, truth, member_dim, 2 if fair else 1, "fair CRPS" if fair else "CRPS")
    forecast, truth = wide(forecast, truth)
    count = forecast.shape[dim]
    skill = (forecast - truth.unsqueeze(dim)).abs().mean(dim)
    if count == 1:
        return skill
    place = torch.arange(count, device=forecast.device, dtype=forecast.dtype)
    factor = (2 * place - (count - 1)).view(-1, *[1] * (forecast.ndim - 1 - dim))
    between = (torch.sort(forecast, dim=dim).values * factor).sum(dim)  # sum of |x_i - x_j| over pairs i < j
    return skill - between / (count * (count - 1) if fair else count * count)
