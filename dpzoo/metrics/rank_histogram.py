"""Where the truth falls among the sorted members of an ensemble."""

from __future__ import annotations

import torch
from torch import Tensor

from dpzoo.metrics.weighting import check_members, weighted_mean, wide


def rank_histogram(forecast: Tensor, truth: Tensor, *, member_dim: int = 0, weights: Tensor | None = None) -> Tensor:
    """Share of points at which 0, 1, ..., M members lie below the truth (Hamill 2001, Mon. Wea. Rev. 129).

    Flat for a reliable ensemble, a bowl for one that is too sure of itself, a slope for a biased one. Where members
    equal the truth (dry points) its rank is one of several; each of those gets the same share of the point, which is
    what drawing lots gives in the mean.

    Args:
        weights: How much a point counts, broadcast to the truth; bool too. Elsewhere than at weight 0, a NaN truth has
            rank 0.

    Shape: ``forecast (M, ...)`` with the members in ``member_dim``, ``truth (...)`` -> ``(M + 1,)``, with sum 1.

    Raises:
        ValueError: shapes that do not fit.
    """
    dim = check_members(forecast, truth, member_dim, 1, "rank histogram")
    forecast, truth = wide(forecast, truth)
    against = truth.unsqueeze(dim)
    below, equal = (forecast < against).sum(dim), (forecast == against).sum(dim)
    share = 1.0 / (equal + 1).to(truth.dtype)
    ranks = range(forecast.shape[dim] + 1)
    return torch.stack([weighted_mean(((below <= r) & (r <= below + equal)) * share, weights) for r in ranks])
