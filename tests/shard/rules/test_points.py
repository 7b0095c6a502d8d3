"""Point functions on sharded clouds give what one process gives: any two layouts, uneven and empty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpzoo import ops
from dpzoo.shard import scatter, strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_error, op_test
from dpzoo.testing.derivatives import with_derivatives
from tests.shard.rules.inputs import FEW

ALL = ("even", "uneven", "empty", "empty_first", "misaligned")


def _grid(shape: tuple[int, ...]) -> Tensor:
    """Coordinates with many equal distances, and points that coincide."""
    return torch.randint(0, 3, shape).double()


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _knn(k):
    return lambda p, q: tuple(ops.knn(p, q, k))


def _radius(radius, most):
    """Distances without the infinite ones, which a loss cannot use; and the indices."""

    def call(p, q):
        distances, indices = ops.radius_search(p, q, radius, most)
        return distances.masked_fill(indices < 0, 9.0), indices

    return call


def _case(name, fn, shape, shard, **options):
    return OpCase(name, fn=fn, shape=shape, shard=shard, **{**FEW, "layouts": ALL, **options})


CUBE = torch.tensor([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]).double()
FACES = torch.tensor([[0, 1, 3], [0, 3, 2], [4, 6, 7], [4, 7, 5], [0, 4, 5], [0, 5, 1], [2, 3, 7], [2, 7, 6],
                      [0, 2, 6], [0, 6, 4], [1, 5, 7], [1, 7, 3]])  # fmt: skip

CASES = [
    _case("knn", _knn(3), [(17, 3), (11, 3)], 0, ranks=(1, 2, 3, 4), subgroups=True, mesh2d=[(0, 1), (0, None)],
          covers=("knn",)),
    _case("knn with ties", lambda p, q: ops.knn(p, q, 7).indices, [(29, 3), (11, 3)], 0, fill=_grid, grads=False,
          ranks=(2, 3, 4)),
    _case("knn, all neighbours", _knn(9), [(9, 2), (5, 2)], 0),
    _case("knn, plain queries", lambda p: tuple(ops.knn(p, torch.linspace(-1, 1, 15).view(5, 3).double(), 3)), (17, 3),
          0, mesh2d=(0, 1)),
    _case("knn, plain points", lambda q, w: tuple(ops.knn(w, q, 3)), (17, 3), 0, plain=[(8, 3)]),
    _case("knn, coordinates cut", _knn(3), [(17, 4), (11, 4)], [0, 1], mesh2d=[(0, 1), (1, 0)]),
    _case("knn, points on one axis, queries on the other", _knn(3), [(17, 3), (11, 3)], 0, ranks=(),
          mesh2d=[(0, None), (None, 0)]),
    _case("knn of batches", _knn(3), [(2, 17, 3), (2, 9, 3)], 1, mesh2d=[(0, 1), (0, 1)]),
    _case("knn of batches cut apart", _knn(3), [(4, 17, 3), (4, 9, 3)], [0, 1], mesh2d=[(0, 1), (1, 0)]),
    _case("knn of batches cut as batches", _knn(3), [(4, 7, 3), (4, 5, 3)], [1, 0], layouts=("uneven", "misaligned")),
    _case("radius_search", _radius(1.0, 4), [(17, 3), (11, 3)], 0, ranks=(1, 2, 3, 4), subgroups=True,
          mesh2d=[(0, 1), (0, None)], covers=("radius_search",)),
    _case("radius_search with ties", lambda p, q: tuple(ops.radius_search(p, q, 1.0, 5)), [(29, 3), (11, 3)], 0,
          fill=_grid, grads=False),
    _case("radius_search, no points", lambda p, q: tuple(ops.radius_search(p, q, 1.0, 2)), [(0, 3), (5, 3)], 0,
          grads=False),
    _case("farthest_point_sample", lambda p: [ops.farthest_point_sample(p, 7, 3), ops.farthest_point_sample(p, 0)],
          (17, 3), 0, grads=False, ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1),
          covers=("farthest_point_sample",)),
    _case("farthest_point_sample with ties", lambda p: ops.farthest_point_sample(p, 29), (29, 3), 0, fill=_grid,
          grads=False),
    _case("farthest_point_sample of batches", lambda p: ops.farthest_point_sample(p, 5), (2, 17, 3), 1, grads=False,
          mesh2d=(0, 1)),
    _case("random_sample", lambda p: [ops.random_sample(p, 9, 3), p[ops.random_sample(p, 5, 1)]], (17, 3), 0,
          covers=("random_sample",)),
    _case("signed_distance", lambda p, v: tuple(ops.signed_distance(p, CUBE + v, FACES)), (17, 3), 0, plain=[(8, 3)],
          fill=lambda shape: torch.randn(shape).double() * 0.7, ranks=(1, 2, 3), mesh2d=(0, 1),
          covers=("signed_distance", "signed_distance of points")),
    _case("signed_distance to a cut surface", lambda p, v: tuple(ops.signed_distance(p * 2, CUBE + v / 9, FACES)),
          [(17, 3), (8, 3)], 0),
    _case("interpolate_idw", lambda p, v, q: ops.interpolate_idw(p, v, q, 3), [(17, 3), (17, 2), (11, 3)], 0,
          ranks=(1, 2, 3), mesh2d=[(0, None), (0, 1), (0, None)]),
    _case("areas and normals", lambda f, v: [ops.cell_areas(v, f), ops.cell_normals(v, f)], [(9, 3), (17, 3)], 0,
          fill=[lambda shape: torch.stack([torch.randperm(17)[:3] for _ in range(shape[0])]), _normal]),
    _case("areas on a plain mesh", lambda f, v: ops.cell_areas(v, f), (9, 4), 0, plain=[(17, 3)],
          fill=[lambda shape: torch.stack([torch.randperm(17)[:4] for _ in range(shape[0])]), _normal]),
]  # fmt: skip

test_ops = op_test(CASES)


@distributed(ranks=[3])
def test_second_derivatives():
    p, q = torch.randn(17, 3).double(), torch.randn(9, 3).double()
    assert_parity(
        with_derivatives(lambda p, q: ops.knn(p, q, 2).distances), [p, q], [0, 0], ["uneven"] * 2, strict=True
    )


@distributed(ranks=[2, 3])
def test_memory_of_a_rank_is_its_share(ranks: int):
    """Nothing as long as the whole cloud is ever sent: only blocks of points, boxes and flags."""
    n = 600
    p = scatter(torch.randn(n, 3, dtype=torch.float64), domain_mesh(), 0)
    with strict(), count_traffic() as traffic:
        ops.knn(p, p, 4)
    blocks = sum(len(part) for part in torch.arange(n).tensor_split(ranks)[1:]) * 3 * 8
    assert traffic.nbytes <= blocks + 100
    assert traffic.calls == ranks - 1 + 2


@distributed(ranks=[2])
def test_halves_with_distance_between_them_search_only_themselves():
    from dpzoo.shard.kernels import knn_ring

    searched = []
    index = knn_ring.PointIndex

    class Counting(index):
        def __init__(self, points):
            searched.append(len(points))
            super().__init__(points)

    cloud = torch.cat([torch.rand(50, 3), torch.rand(50, 3) + 10])
    p = scatter(cloud, domain_mesh(), 0)
    knn_ring.PointIndex = Counting
    try:
        ops.knn(p, p, 4)
    finally:
        knn_ring.PointIndex = index
    assert searched == [50]


@distributed(ranks=[2, 3])
def test_errors_are_raised_on_every_rank():
    mesh = domain_mesh()
    cloud = torch.rand(17, 3)
    p = scatter(cloud, mesh, 0)
    expect_error(lambda: ops.knn(p, p, 18), ValueError, "between 1 and the number of points, 17; got 18")
    expect_error(lambda: ops.knn(p, p[:, :2], 1), ValueError, "queries")
    expect_error(lambda: ops.radius_search(p, p, -1.0, 2), ValueError, "radius")
    expect_error(lambda: ops.farthest_point_sample(p, 18), ValueError, "got 18")
    expect_error(lambda: ops.random_sample(p, 18, 0), ValueError, "got 18")
    cloud[16, 1] = float("nan")
    broken = scatter(cloud, mesh, 0)
    for call in (
        lambda: ops.knn(broken, p, 1),
        lambda: ops.knn(p, broken, 1),
        lambda: ops.farthest_point_sample(broken, 2),
        lambda: ops.signed_distance(broken, CUBE.float(), FACES),
    ):
        expect_error(call, ValueError, "NaN or infinite")
    expect_error(lambda: ops.signed_distance(p, CUBE.float(), FACES + 1), IndexError, "out of bounds")


@distributed(ranks=3)
def test_a_ring_that_searches_in_pieces_changes_nothing():
    points, queries, mesh = _grid((40, 3)), _grid((33, 3)), domain_mesh()
    expected = ops.knn(points, queries, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpzoo.shard.kernels.knn_ring.ROWS", 5)
        found = ops.knn(scatter(points, mesh, dim=0), scatter(queries, mesh, dim=0, sizes=(11, 0, 22)), 4)
    assert torch.equal(found.distances.full_tensor(), expected.distances)
    assert torch.equal(found.indices.full_tensor(), expected.indices)
