"""Nearest points: `knn` and `radius_search`, without the matrix of all distances.

On the CPU a k-d tree searches (SciPy's); elsewhere, or without SciPy, blocks of distances with a running selection.
Both choose by the same squared distances and, where these are equal, by the smaller index, so that a result depends
neither on the method nor on how a cloud is divided (`merge` joins the results of parts).

Shapes: points (N, d) or (B, N, d), queries (M, d) or (B, M, d); results (M, k) or (B, M, k).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

FAR = 2**62  # the index of no point: behind all others
_BLOCK = 2**21  # distances held at once
ROWS = 2**16  # queries searched at once: what lies between a search and its answer stays small
_TREE_DIMS = 16  # beyond, a tree visits almost every point


class Neighbors(NamedTuple):
    """Neighbours in order of distance, then of index."""

    distances: Tensor
    indices: Tensor


def knn(points: Tensor, queries: Tensor, k: int) -> Neighbors:
    """The `k` nearest points of each query.

    Args:
        points: (N, d) or (B, N, d).
        queries: (M, d) or (B, M, d), in the units of `points`.
        k: at least 1, at most N.

    Returns:
        distances (M, k) or (B, M, k), Euclidean, differentiable by points and queries (0 where a distance is 0), and
        indices into `points`, int64.

    Raises:
        ValueError: shapes that do not fit, a `k` out of range, coordinates that are not finite.
    """
    if has_torch_function((points, queries)):
        return handle_torch_function(knn, (points, queries), points, queries, k)
    check_search("knn", points, queries)
    check_k(points, k)
    check_finite("knn", points, queries)
    squared, indices = nearest(points, queries, k)
    return Neighbors(distances_to(points, queries, squared, indices), indices)


def radius_search(points: Tensor, queries: Tensor, radius: float, max_neighbors: int) -> Neighbors:
    """The points within `radius` (included) of each query: the nearest `max_neighbors` of them.

    Returns:
        distances and indices as of :func:`knn`, (M, max_neighbors) or (B, M, max_neighbors); where a query has fewer
        neighbours the distance is infinity and the index -1.

    Raises:
        ValueError: shapes that do not fit, a negative or infinite radius, `max_neighbors` below 1, coordinates that
            are not finite.
    """
    if has_torch_function((points, queries)):
        return handle_torch_function(radius_search, (points, queries), points, queries, radius, max_neighbors)
    check_search("radius_search", points, queries)
    check_radius(radius, max_neighbors)
    check_finite("radius_search", points, queries)
    squared, indices = nearest(points, queries, max_neighbors, float(radius))
    return within_radius(points, queries, squared, indices)


# ---------------------------------------------------------------------- checks
def check_search(name: str, points: Tensor, queries: Tensor) -> None:
    """Raise ValueError unless the two clouds fit together."""
    fits = points.ndim == queries.ndim and points.ndim in (2, 3) and points.shape[-1] == queries.shape[-1]
    if not fits or points.shape[:-2] != queries.shape[:-2] or points.shape[-1] == 0:
        raise ValueError(
            f"{name}: points (N, d) and queries (M, d), or (B, N, d) and (B, M, d), got {tuple(points.shape)} and "
            f"{tuple(queries.shape)}"
        )
    if not (points.is_floating_point() and queries.is_floating_point()):
        raise ValueError(f"{name}: coordinates are floating point, got {points.dtype} and {queries.dtype}")


def check_k(points: Tensor, k: int) -> None:
    """Raise ValueError unless there are `k` points."""
    if not 1 <= k <= points.shape[-2]:
        raise ValueError(f"knn: k must lie between 1 and the number of points, {points.shape[-2]}; got {k}")


def check_radius(radius: float, max_neighbors: int) -> None:
    """Raise ValueError for a radius that is no radius."""
    if not 0 <= radius < math.inf or max_neighbors < 1:
        raise ValueError(
            f"radius_search: radius must be finite and not negative, max_neighbors at least 1; got {radius} and "
            f"{max_neighbors}"
        )


def check_finite(name: str, *clouds: Tensor) -> None:
    """Raise ValueError if a coordinate is NaN or infinite."""
    if not all(is_finite(t) for t in clouds):
        raise_not_finite(name)


def is_finite(t: Tensor) -> bool:
    """True if every coordinate is a number (and for a tensor without data)."""
    return t.is_meta or bool(torch.isfinite(t.detach()).all())


def raise_not_finite(name: str) -> None:
    """The error of NaN and infinite coordinates."""
    raise ValueError(f"{name}: some coordinates are NaN or infinite; remove these points first")


# ---------------------------------------------------------------------- results from choices
def neighbors_of(points: Tensor, indices: Tensor) -> Tensor:
    """Rows of (N, c) or (B, N, c) by indices (M, k) or (B, M, k) -> (M, k, c) or (B, M, k, c)."""
    if points.ndim == 2:
        return points[indices]
    flat = indices.flatten(-2).unsqueeze(-1).expand(-1, -1, points.shape[-1])
    return points.gather(1, flat).unflatten(1, tuple(indices.shape[-2:]))


def distances_to(points: Tensor, queries: Tensor, squared: Tensor, indices: Tensor) -> Tensor:
    """Distances of chosen neighbours: as they were found, or, where a gradient is asked for, computed once more."""
    dtype = torch.promote_types(points.dtype, queries.dtype)
    if not torch.is_grad_enabled() or not (points.requires_grad or queries.requires_grad):
        return squared.sqrt().to(dtype)
    return torch.linalg.vector_norm(queries.unsqueeze(-2) - neighbors_of(points, indices), dim=-1)


def within_radius(points: Tensor, queries: Tensor, squared: Tensor, indices: Tensor) -> Neighbors:
    """The answer of `radius_search` from its choices, of which some are no point at all."""
    missing = indices == FAR
    if not points.shape[-2]:
        found = torch.full_like(squared, math.inf, dtype=torch.promote_types(points.dtype, queries.dtype))
        return Neighbors(found, indices.masked_fill(missing, -1))
    found = distances_to(points, queries, squared, indices.masked_fill(missing, 0))
    return Neighbors(found.masked_fill(missing, math.inf), indices.masked_fill(missing, -1))


# ---------------------------------------------------------------------- choosing
def nearest(points: Tensor, queries: Tensor, k: int, radius: float = math.inf) -> tuple[Tensor, Tensor]:
    """Squared distances and indices of the `k` nearest points within `radius`; infinity and `FAR` where there are none.

    Not differentiable; the squared distances are float64 on the CPU, at least float32 elsewhere.
    """
    points, queries = points.detach(), queries.detach()
    if points.ndim == 2:
        return PointIndex(points).nearest(queries, k, radius)
    found = [PointIndex(p).nearest(q, k, radius) for p, q in zip(points, queries, strict=True)]
    if not found:
        empty = measured(queries).new_empty((0, queries.shape[1], k))
        return empty, torch.empty_like(empty, dtype=torch.int64)
    return torch.stack([d for d, _ in found]), torch.stack([i for _, i in found])


def measured(coordinates: Tensor) -> Tensor:
    """Coordinates in the dtype in which distances are computed."""
    if coordinates.device.type == "cpu":
        return coordinates.double()
    return coordinates.to(torch.promote_types(coordinates.dtype, torch.float32))


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last dim of (a - b)^2, broadcast; one coordinate after the other, so that a pair has one value."""
    total = (a[..., 0] - b[..., 0]).square_()
    for c in range(1, a.shape[-1]):
        total += (a[..., c] - b[..., c]).square_()
    return total


def nothing_yet(queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """No neighbours for any of the queries (..., M, d): what `merge` starts from."""
    squared = measured(queries).new_full((*queries.shape[:-1], k), math.inf)
    return squared, torch.full_like(squared, FAR, dtype=torch.int64)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The `k` best of two results over different points, by squared distance, then index."""
    squared, indices = (torch.cat(pair, -1) for pair in zip(a, b, strict=True))
    return _in_order(squared, indices, k)


def _in_order(squared: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    indices, order = indices.sort(-1)
    squared, order = squared.gather(-1, order).sort(dim=-1, stable=True)
    return squared[..., :k], indices.gather(-1, order)[..., :k]


class PointIndex:
    """One cloud (N, d), ready to be searched."""

    def __init__(self, points: Tensor) -> None:
        self.points = measured(points.detach()).contiguous()
        self.tree = _tree_of(self.points)

    def nearest(self, queries: Tensor, k: int, radius: float = math.inf) -> tuple[Tensor, Tensor]:
        """As the function `nearest`, for queries (M, d)."""
        queries = measured(queries.detach()).contiguous()
        if not len(self.points) or not len(queries):
            return nothing_yet(queries, k)
        if len(queries) > ROWS:
            squared, indices = nothing_yet(queries, k)
            for start in range(0, len(queries), ROWS):
                part = slice(start, start + ROWS)
                squared[part], indices[part] = self.nearest(queries[part], k, radius)
            return squared, indices
        squared, indices = self._by_tree(queries, k, radius) if self.tree is not None else self._by_blocks(queries, k)
        too_far = squared > radius * radius
        squared, indices = squared.masked_fill_(too_far, math.inf), indices.masked_fill_(too_far, FAR)
        missing = k - squared.shape[1]
        if missing > 0:
            squared = torch.nn.functional.pad(squared, (0, missing), value=math.inf)
            indices = torch.nn.functional.pad(indices, (0, missing), value=FAR)
        return squared, indices

    # ------------------------------------------------------------------ tree
    def _by_tree(self, queries: Tensor, k: int, radius: float) -> tuple[Tensor, Tensor]:
        """One neighbour more than asked for shows whether the last one has rivals at the same distance."""
        reach = radius * (1 + 1e-9) + 1e-150  # the bound of the tree is exclusive, and squared
        k = min(k, len(self.points))
        seen = min(k + 1, len(self.points))
        squared, indices, rivals = self._ask_tree(queries, k, seen, reach)
        rows = rivals.nonzero().squeeze(1)
        while len(rows) and seen < len(self.points):
            seen = min(4 * seen, len(self.points))
            left = []
            for part in rows.split(max(1, _BLOCK // seen)):
                squared[part], indices[part], still = self._ask_tree(queries[part], k, seen, reach)
                left.append(part[still])
            rows = torch.cat(left)
        return squared, indices

    def _ask_tree(self, queries: Tensor, k: int, seen: int, reach: float) -> tuple[Tensor, Tensor, Tensor]:
        """The best `k` of the tree's first `seen`, and which queries may have others as near as the last of them."""
        found, at = self.tree.query(queries.numpy(), k=range(1, seen + 1), distance_upper_bound=reach)
        indices = torch.from_numpy(at).to(torch.int64)
        none = indices == len(self.points)
        squared = squared_distances(queries.unsqueeze(1), self.points[indices.masked_fill(none, 0)])
        squared = squared.masked_fill_(none, math.inf)
        squared, indices = _in_order(squared, indices.masked_fill_(none, FAR), k)
        last = torch.from_numpy(found[:, -1]).square()
        return squared, indices, (last <= squared[:, -1] * (1 + 1e-12)) & torch.isfinite(last)

    # ------------------------------------------------------------------ blocks
    def _by_blocks(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        width = min(len(self.points), max(4096, 8 * k))
        found = [self._row_block(part, k, width) for part in queries.split(max(1, _BLOCK // width))]
        return torch.cat([d for d, _ in found]), torch.cat([i for _, i in found])

    def _row_block(self, queries: Tensor, k: int, width: int) -> tuple[Tensor, Tensor]:
        best = nothing_yet(queries, k)
        for start in range(0, len(self.points), width):
            block = self.points[start : start + width]
            squared, columns = _smallest(squared_distances(queries.unsqueeze(1), block.unsqueeze(0)), k)
            best = merge(best, (squared, columns + start), k)
        return best


def _smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` smallest of each row and their columns; of equal ones those in front (which topk does not promise)."""
    n = values.shape[-1]
    if k >= n:
        return _in_order(values, torch.arange(n, device=values.device).expand_as(values), n)
    bound = values.topk(k, largest=False).values[..., -1:]
    column = torch.arange(n, device=values.device)
    key = torch.where(values < bound, column, torch.where(values == bound, column + n, 2 * n))
    columns = key.topk(k, largest=False).values % n
    return _in_order(values.gather(-1, columns), columns, k)


def _tree_of(points: Tensor) -> Any:
    """A k-d tree of SciPy, None where it does not apply."""
    if points.device.type != "cpu" or not len(points) or points.shape[1] > _TREE_DIMS:
        return None
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree(points.numpy(), balanced_tree=False)
