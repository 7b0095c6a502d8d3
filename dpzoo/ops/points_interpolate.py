"""Values between points: inverse-distance weighting of the nearest ones."""

from __future__ import annotations

from torch import Tensor

from dpzoo.ops.points_search import knn, neighbors_of


def interpolate_idw(points: Tensor, values: Tensor, queries: Tensor, k: int = 4, power: float = 2.0) -> Tensor:
    """Mean of the values of the `k` nearest points, weighted by 1 / distance ** power (Shepard 1968).

    A query that lies on a point gets that point's value. Differentiable by values, points and queries.

    Args:
        points: (N, d) or (B, N, d).
        values: (N, c) or (B, N, c).
        queries: (M, d) or (B, M, d).

    Returns:
        (M, c) or (B, M, c).

    Raises:
        ValueError: shapes that do not fit, or what `knn` refuses.
    """
    if values.ndim != points.ndim or values.shape[:-1] != points.shape[:-1]:
        raise ValueError(
            f"interpolate_idw: values should have a row for each point, found {tuple(values.shape)} for points "
            f"{tuple(points.shape)}"
        )
    distances, indices = knn(points, queries, k)
    hit = distances == 0
    ratio = distances[..., :1] / distances.masked_fill(hit, 1.0)  # at most 1: no overflow next to a point
    weights = (ratio**power).masked_fill(hit, 1.0).to(values.dtype)
    total = (weights.unsqueeze(-1) * neighbors_of(values, indices)).sum(-2)
    return total / weights.sum(-1, keepdim=True)
