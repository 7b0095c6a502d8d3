"""Error of an ensemble's mean, and how far its members lie apart."""

from __future__ import annotations

import math

from torch import Tensor

from dpzoo.metrics.weighting import Dims, check_members, weighted_mean, wide


def ensemble_rmse(
    forecast: Tensor, truth: Tensor, *, member_dim: int = 0, weights: Tensor | None = None, dims: Dims = None
) -> Tensor:
    """Root mean squared error of the ensemble's mean, in the unit of the fields.

    Shape: ``forecast (M, ...)`` with the members in ``member_dim``, ``truth (...)`` -> ``()``, or what ``dims`` (of the
    truth) leaves. ``weights`` broadcast to the truth.

    Raises:
        ValueError: shapes that do not fit.
    """
    dim = check_members(forecast, truth, member_dim, 1, "ensemble RMSE")
    forecast, truth = wide(forecast, truth)
    return weighted_mean((forecast.mean(dim) - truth).square(), weights, dims).sqrt()


def ensemble_spread(
    forecast: Tensor, *, member_dim: int = 0, weights: Tensor | None = None, dims: Dims = None
) -> Tensor:
    """Root of the mean unbiased variance over the members, in the unit of the field.

    Shape: ``forecast (M, ...)`` -> ``()``, or what ``dims`` (of a field without the members) leaves.

    Raises:
        ValueError: fewer than two members.
    """
    dim = member_dim % forecast.ndim
    if forecast.shape[dim] < 2:
        raise ValueError(f"ensemble spread needs 2 members or more, got {forecast.shape[dim]} (dim {member_dim})")
    (forecast,) = wide(forecast)
    return weighted_mean(forecast.var(dim, correction=1), weights, dims).sqrt()


def spread_skill_ratio(
    forecast: Tensor, truth: Tensor, *, member_dim: int = 0, weights: Tensor | None = None, dims: Dims = None
) -> Tensor:
    """``sqrt((M + 1) / M) spread / RMSE``: 1 for a reliable ensemble, less if it is too sure of itself.

    Fortin et al. 2014, doi:10.1175/JHM-D-14-0008.1. Shapes and errors as in the other two.
    """
    error = ensemble_rmse(forecast, truth, member_dim=member_dim, weights=weights, dims=dims)
    spread = ensemble_spread(forecast, member_dim=member_dim, weights=weights, dims=dims)
    members = forecast.shape[member_dim]
    return math.sqrt((members + 1) / members) * spread / error
