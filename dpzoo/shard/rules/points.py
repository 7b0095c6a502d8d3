"""The point functions of `dpzoo.ops` on sharded clouds: neighbour search, sampling, distance to a surface.

Clouds and queries may be cut in any two ways. Along the axis that cuts the points they go around as a ring; queries
stay where they are, and so do results. Choices are not differentiable; the distances to what was chosen are.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpzoo import ops
from dpzoo.ops import points_sample, points_search
from dpzoo.ops.points_surface import check_surface
from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import relayout, to_shard
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.fallback import replicate
from dpzoo.shard.kernels.farthest_points import farthest_points
from dpzoo.shard.kernels.knn_ring import gathered_nearest, ring_nearest
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import RULE_OF, handler, rule
from dpzoo.shard.rules.parts import global_of
from dpzoo.shard.rules.remote_layout import Layout, on_mesh
from dpzoo.shard.spec import REPLICATED
from dpzoo.shard.tensor import ShardTensor


# ---------------------------------------------------------------------- neighbour search
@handler(ops.knn, name="knn")
def knn(func: Any, points: Tensor, queries: Tensor, k: int) -> Any:
    """The ring, then distances from the coordinates of what was chosen."""
    points_search.check_search("knn", points, queries)
    points_search.check_k(points, k)
    points, queries = _clouds("knn", points, queries)
    squared, indices = _nearest(points, queries, k, math.inf)
    return ops.Neighbors(points_search.distances_to(points, queries, squared, indices), indices)


@handler(ops.radius_search, name="radius_search")
def radius_search(func: Any, points: Tensor, queries: Tensor, radius: float, max_neighbors: int) -> Any:
    """As knn, within a radius."""
    points_search.check_search("radius_search", points, queries)
    points_search.check_radius(radius, max_neighbors)
    points, queries = _clouds("radius_search", points, queries)
    squared, indices = _nearest(points, queries, max_neighbors, float(radius))
    return points_search.within_radius(points, queries, squared, indices)


def _clouds(name: str, *clouds: Tensor) -> tuple[ShardTensor, ...]:
    """All of them on one mesh, coordinates whole on each rank; raises ValueError on every rank if one is not finite."""
    like = next(t for t in clouds if isinstance(t, ShardTensor))
    found = tuple(on_mesh(t, like) for t in clouds)
    same_mesh(getattr(ops, name), found)
    found = tuple(_whole_coordinates(t) for t in found)
    mesh = like._spec.layout
    bad = torch.tensor(not all(points_search.is_finite(t._local_tensor) for t in found), device=found[0].device)
    for axis in mesh.axes:
        if any(t._spec.cuts[axis] != REPLICATED for t in found):
            bad = comm.all_reduce(bad, mesh.groups[axis], "max")
    if bool(bad):
        points_search.raise_not_finite(name)
    return found


def _whole_coordinates(t: ShardTensor) -> ShardTensor:
    layout = Layout.of(t)
    for axis, cut in enumerate(layout.cuts):
        if cut == t.ndim - 1:
            layout = layout.but(axis)
    return relayout(t, layout.spec(t))


def _nearest(points: ShardTensor, queries: ShardTensor, k: int, radius: float) -> tuple[ShardTensor, ShardTensor]:
    """Squared distances and global indices of the chosen points, cut like the queries."""
    points, queries = points.detach(), queries.detach()  # type: ignore[assignment]
    at_points, at_queries = _side_by_side(Layout.of(points), Layout.of(queries), points.ndim)
    p, q = at_points.local(points), at_queries.local(queries)
    ring = next((a for a, c in enumerate(at_points.cuts) if c == points.ndim - 2), None)
    flat = p.ndim == 2
    p, q = (p.unsqueeze(0), q.unsqueeze(0)) if flat else (p, q)
    if ring is None:
        found = points_search.nearest(p, q, k, radius)
    else:
        search = ring_nearest if at_queries.cuts[ring] == queries.ndim - 2 else gathered_nearest
        found = search(p, q, k, radius, at_points.sizes[ring], points._spec.layout.groups[ring])
    squared, indices = (
        global_of(t.squeeze(0) if flat else t, queries._spec, at_queries.cuts, at_queries.sizes) for t in found
    )
    return squared, indices


def _side_by_side(points: Layout, queries: Layout, ndim: int) -> tuple[Layout, Layout]:
    """Layouts in which batch dims are cut alike; points keep a cut of their rows, queries every cut they can."""
    rows = ndim - 2
    for axis in range(len(points.cuts)):
        p_cut, q_cut = points.cuts[axis], queries.cuts[axis]
        if q_cut not in (REPLICATED, rows):  # a batch dim
            points = _free(points, q_cut).but(axis, q_cut, queries.sizes[axis])
        elif p_cut not in (REPLICATED, rows):
            if q_cut == REPLICATED and p_cut not in queries.cuts:
                queries = queries.but(axis, p_cut, points.sizes[axis])
            else:
                points = points.but(axis)
    return points, queries


def _free(layout: Layout, dim: Any) -> Layout:
    """A layout in which no axis cuts `dim`."""
    for axis, cut in enumerate(layout.cuts):
        if cut == dim:
            layout = layout.but(axis)
    return layout


# ---------------------------------------------------------------------- sampling
@handler(ops.farthest_point_sample, name="farthest_point_sample")
def farthest_point_sample(func: Any, points: Tensor, n: int, start: int = 0) -> Any:
    """The farthest candidate of all ranks, choice by choice; the same indices on every rank."""
    points_sample.check_sample("farthest_point_sample", points, n, start)
    (cloud,) = _clouds("farthest_point_sample", points)
    layout, rows = Layout.of(cloud), cloud.ndim - 2
    local = layout.local(cloud.detach())  # type: ignore[arg-type]
    axis = next((a for a, c in enumerate(layout.cuts) if c == rows), None)
    if axis is None:
        chosen = ops.farthest_point_sample(local, n, start)
        return global_of(chosen, cloud._spec, layout.cuts, layout.sizes)
    batched = local if local.ndim == 3 else local.unsqueeze(0)
    chosen = farthest_points(batched, n, start, layout.sizes[axis], cloud._spec.layout.groups[axis])
    chosen = chosen if local.ndim == 3 else chosen.squeeze(0)
    rest = layout.but(axis)
    return global_of(chosen, cloud._spec, rest.cuts, rest.sizes)


@handler(ops.random_sample, name="random_sample")
def random_sample(func: Any, points: Tensor, n: int, seed: int) -> Any:
    """The same indices on every rank, computed by each."""
    assert isinstance(points, ShardTensor)
    points_sample.check_sample("random_sample", points, n)
    chosen = points_sample.permuted(torch.arange(n), points.shape[-2], seed)
    return replicate(chosen.to(points.device), points)


# ---------------------------------------------------------------------- distance to a surface
@handler(ops.signed_distance, name="signed_distance")
def signed_distance(func: Any, points: Tensor, vertices: Tensor, faces: Tensor) -> Any:
    """Each rank its own points, with the whole surface."""
    check_surface(points, vertices, faces)
    like = next(t for t in (points, vertices, faces) if isinstance(t, ShardTensor))
    surface = [relayout(t, t._spec.replicated()) for t in (on_mesh(t, like) for t in (vertices, faces))]
    cloud, corners = _clouds("signed_distance", points, surface[0])
    _check_faces(surface[1], corners.shape[0])
    found = RULE_OF["signed_distance of points"](func, (ShardTensor,), (cloud, corners, surface[1]), {})
    return ops.SurfaceDistance(*found)


def _check_faces(faces: ShardTensor, n: int) -> None:
    local = to_shard(faces, faces._spec)
    if local.numel() and (int(local.min()) < -n or int(local.max()) >= n):
        torch.zeros(n)[local.flatten()]


@rule(name="signed_distance of points")
def _signed_distance(points: Tensor, vertices: Tensor, faces: Tensor) -> Dims:
    names = ("xyz", "vertex", "face", "corner", "where")
    return Dims(
        [("point", "xyz"), ("vertex", "xyz"), ("face", "corner")],
        [("point",), ("point", "where")],
        lambda p, v, f: tuple(ops.signed_distance(p, v, f)),
        whole=frozenset(names),
    )
