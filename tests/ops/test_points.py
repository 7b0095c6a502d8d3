"""Point functions on plain tensors, against all pairs, closed forms, and derivatives by differences."""

import math

import pytest
import torch
from torch import Tensor

from dpzoo import ops
from dpzoo.ops.points_discs import DiscTree
from dpzoo.ops.points_search import FAR, PointIndex
from dpzoo.ops.points_triangles import closest_on_triangles, place_on


def random(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def all_pairs(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    squared = (queries[:, None].double() - points[None].double()).square().sum(-1)
    squared, indices = squared.sort(dim=-1, stable=True)
    return squared[:, :k].sqrt(), indices[:, :k]


CLOUDS = {
    "random": torch.rand(300, 3, generator=torch.Generator().manual_seed(0)),
    "grid": torch.randint(0, 4, (300, 3), generator=torch.Generator().manual_seed(0)).float(),
    "one place": torch.zeros(50, 2),
    "few": torch.rand(7, 5, generator=torch.Generator().manual_seed(0)),
}


# ---------------------------------------------------------------------- search
@pytest.mark.parametrize("method", ["tree", "blocks"])
@pytest.mark.parametrize("name", CLOUDS)
def test_nearest_are_those_of_all_pairs_with_ties_by_index(name, method, monkeypatch):
    torch.manual_seed(1)
    points = CLOUDS[name]
    queries = torch.cat([points[:20], torch.rand(15, points.shape[1])])
    if method == "blocks":
        monkeypatch.setattr("dpzoo.ops.points_search._tree_of", lambda points: None)
        monkeypatch.setattr("dpzoo.ops.points_search._BLOCK", 500)
    for k in (1, 3, 7):
        distances, indices = all_pairs(points, queries, k)
        found = ops.knn(points, queries, k)
        assert torch.equal(found.indices, indices)
        torch.testing.assert_close(found.distances, distances.float())
        for radius in (0.0, 0.2, 1.0):
            within = distances <= radius
            found = ops.radius_search(points, queries, radius, k)
            assert torch.equal(found.indices, torch.where(within, indices, -1))
            assert torch.equal(found.distances.isinf(), ~within)


def test_blocks_wider_than_one_choose_in_order(monkeypatch):
    monkeypatch.setattr("dpzoo.ops.points_search._tree_of", lambda points: None)
    points = torch.randint(0, 3, (9000, 2)).float()
    queries = torch.rand(9, 2)
    assert torch.equal(ops.knn(points, queries, 5).indices, all_pairs(points, queries, 5)[1])


def test_batches_and_more_neighbours_than_points():
    points, queries = random(2, 6, 3), random(2, 4, 3)
    found = ops.radius_search(points, queries, 10.0, 9)
    assert found.indices.shape == (2, 4, 9)
    for b in range(2):
        assert torch.equal(found.indices[b, :, :6], all_pairs(points[b], queries[b], 6)[1])
    assert (found.indices[..., 6:] == -1).all()
    assert ops.radius_search(random(0, 3), queries[0], 1.0, 2).indices.eq(-1).all()
    assert ops.knn(points, queries[:, :0], 2).indices.shape == (2, 0, 2)
    assert ops.knn(points[:0], queries[:0], 2).indices.shape == (0, 4, 2)


def test_derivatives_of_distances():
    torch.manual_seed(0)
    points, queries = random(9, 3).requires_grad_(), random(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda p, q: ops.knn(p, q, 3).distances, (points, queries))
    assert torch.autograd.gradgradcheck(lambda p, q: ops.knn(p, q, 3).distances, (points, queries))
    same = points.detach().clone().requires_grad_()
    ops.knn(same, same, 1).distances.sum().backward()
    assert torch.equal(same.grad, torch.zeros(9, 3).double())  # and not NaN
    ops.radius_search(points, queries, 0.5, 3).distances.nan_to_num(posinf=0.0).sum().backward()
    assert torch.isfinite(points.grad).all()


def test_half_precision_and_float32_keep_their_dtype():
    cloud = torch.rand(20, 3)
    assert ops.knn(cloud.bfloat16(), cloud.bfloat16(), 2).distances.dtype is torch.bfloat16
    assert ops.knn(cloud, cloud, 2).distances.dtype is torch.float32


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda p: ops.knn(p, p, 0), "got 0"),
        (lambda p: ops.knn(p, p, 10), "number of points, 9; got 10"),
        (lambda p: ops.knn(p, p[:, :2], 1), r"\(9, 3\) and \(9, 2\)"),
        (lambda p: ops.knn(p.long(), p, 1), "floating point"),
        (lambda p: ops.knn(p / 0, p, 1), "NaN or infinite"),
        (lambda p: ops.radius_search(p, p, math.inf, 1), "radius"),
        (lambda p: ops.radius_search(p, p, 1.0, 0), "max_neighbors"),
        (lambda p: ops.farthest_point_sample(p, 10), "got 10"),
        (lambda p: ops.farthest_point_sample(p, 2, 9), "start"),
        (lambda p: ops.random_sample(p, -1, 0), "got -1"),
        (lambda p: ops.interpolate_idw(p, p[:4], p), "a row for each point"),
        (lambda p: ops.signed_distance(p, p, torch.empty(0, 3, dtype=torch.int64)), "F > 0"),
        (lambda p: ops.cell_areas(p, torch.zeros(2, 2, dtype=torch.int64)), "n >= 3"),
    ],
)
def test_errors(call, match):
    with pytest.raises(ValueError, match=match):
        call(random(9, 3) + 1)


# ---------------------------------------------------------------------- sampling
def test_farthest_points():
    line = torch.tensor([[0.0], [1.0], [2.0], [10.0], [4.0]])
    assert ops.farthest_point_sample(line, 4).tolist() == [0, 3, 4, 2]
    assert ops.farthest_point_sample(line, 2, start=3).tolist() == [3, 0]
    assert ops.farthest_point_sample(torch.zeros(4, 2), 4).tolist() == [0, 1, 2, 3]
    both = ops.farthest_point_sample(torch.stack([line, line.flip(0)]), 3)
    assert both.tolist() == [[0, 3, 4], [0, 1, 4]]


def test_random_samples_are_permutations_and_even():
    cloud = torch.empty(37, 2)
    assert sorted(ops.random_sample(cloud, 37, 5).tolist()) == list(range(37))
    assert torch.equal(ops.random_sample(cloud, 9, 5), ops.random_sample(cloud, 37, 5)[:9])
    assert not torch.equal(ops.random_sample(cloud, 9, 5), ops.random_sample(cloud, 9, 6))
    for total in (1, 2, 3, 4, 5, 64, 65):
        assert sorted(ops.random_sample(torch.empty(total, 1), total, 1).tolist()) == list(range(total))
    first = torch.cat([ops.random_sample(torch.empty(10, 1), 3, seed) for seed in range(3000)])
    counts = first.bincount(minlength=10)
    assert counts.min() > 800  # 900 expected, standard deviation 29
    assert counts.max() < 1000
    huge = ops.random_sample(torch.empty(1, 1).expand(10**12, 1), 5, 0)
    assert huge.unique().numel() == 5
    assert huge.max() > 10**10


# ---------------------------------------------------------------------- surfaces
def sphere(rings: int, around: int) -> tuple[Tensor, Tensor]:
    """A unit sphere of triangles with outward normals."""
    theta = torch.linspace(0, math.pi, rings + 2, dtype=torch.float64)[1:-1]
    phi = torch.arange(around, dtype=torch.float64) * (2 * math.pi / around)
    ring = torch.stack([phi.cos(), phi.sin(), torch.zeros_like(phi)], -1)
    body = theta.sin()[:, None, None] * ring + theta.cos()[:, None, None] * torch.tensor([0.0, 0.0, 1.0])
    poles = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    vertices = torch.cat([body.flatten(0, 1), poles])
    top, bottom = len(vertices) - 2, len(vertices) - 1
    faces = []
    for j in range(around):
        k = (j + 1) % around
        faces += [[top, j, k], [bottom, (rings - 1) * around + k, (rings - 1) * around + j]]
        for i in range(rings - 1):
            a, b, c, d = i * around + j, i * around + k, (i + 1) * around + j, (i + 1) * around + k
            faces += [[a, c, b], [b, c, d]]
    return vertices, torch.tensor(faces)


def least_of_all(points: Tensor, triangles: Tensor) -> Tensor:
    """Distance to the nearest of all triangles, by sampling nothing: each pair by itself."""
    p = points.repeat_interleave(len(triangles), 0)
    t = triangles.repeat(len(points), 1, 1)
    _, weights = closest_on_triangles(p, t)
    return (p - place_on(t, weights)).norm(dim=-1).view(len(points), -1).amin(1)


def test_nearest_place_on_a_triangle_is_the_least_over_a_fine_net():
    torch.manual_seed(0)
    triangle = random(3, 3)
    points = torch.randn(200, 3).double()
    _, weights = closest_on_triangles(points, triangle.expand(200, 3, 3))
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(200).double())
    found = (points - place_on(triangle.expand(200, 3, 3), weights)).norm(dim=-1)
    steps = torch.linspace(0, 1, 101, dtype=torch.float64)
    u, v = torch.meshgrid(steps, steps, indexing="ij")
    net = torch.stack([1 - u - v, u, v], -1)[u + v <= 1 + 1e-9] @ triangle
    least = torch.cdist(points, net).amin(1)
    assert (found <= least + 1e-9).all()
    assert (least - found).max() < 0.02


def test_distance_and_sign_to_a_sphere():
    torch.manual_seed(0)
    vertices, faces = sphere(14, 20)
    points = torch.cat([torch.randn(400, 3).double(), vertices[:20] * 0.9, vertices[:20] * 1.5, torch.zeros(1, 3)])
    distances, closest = ops.signed_distance(points, vertices, faces)
    torch.testing.assert_close(distances.abs(), least_of_all(points, vertices[faces]), rtol=0, atol=1e-12)
    torch.testing.assert_close((points - closest).norm(dim=1), distances.abs())
    radius = points.norm(dim=1)
    sure = (radius > 1) | (radius < 0.95)
    assert torch.equal((distances < 0)[sure], (radius < 1)[sure])


def test_sign_at_the_edges_and_corners_of_a_thin_wedge():
    """Where normals of neighbouring faces disagree about the side, the sum of them decides."""
    vertices = torch.tensor([[0, 0, 0], [4, 0, 0.2], [4, 0, -0.2], [2, 1, 0]], dtype=torch.float64)
    faces = torch.tensor([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]])
    centre = vertices.mean(0)
    outward = (ops.cell_normals(vertices, faces) * (vertices[faces].mean(1) - centre)).sum(-1)
    if (outward < 0).all():
        faces = faces.flip(1)
    else:
        assert (outward > 0).all()
    torch.manual_seed(0)
    points = centre + torch.randn(3000, 3).double() * torch.tensor([2.0, 1.0, 0.5])
    weights = torch.linalg.solve(
        torch.cat([vertices, torch.ones(4, 1)], 1).T, torch.cat([points, torch.ones(3000, 1)], 1).T
    )
    inside = (weights > 0).all(0)
    assert inside.any()
    assert torch.equal(ops.signed_distance(points, vertices, faces).distances < 0, inside)


def test_triangles_of_all_sizes_and_without_area():
    torch.manual_seed(0)
    vertices = torch.cat([torch.randn(30, 3).double() * scale for scale in (0.01, 1.0, 30.0)])
    faces = torch.randint(0, 90, (200, 3))
    points = torch.randn(100, 3).double() * 3
    found = ops.signed_distance(points, vertices, faces).distances
    torch.testing.assert_close(found.abs(), least_of_all(points, vertices[faces]), rtol=1e-9, atol=1e-9)
    line = torch.tensor([[0.0, 0, 0], [1, 0, 0], [2, 0, 0]]).double()
    beside = torch.tensor([[0.5, 1, 0], [3, 0, 0]]).double()
    flat = ops.signed_distance(beside, line, torch.tensor([[0, 1, 2]]))
    torch.testing.assert_close(flat.distances.abs(), torch.ones(2).double())
    torch.testing.assert_close(flat.closest, torch.tensor([[0.5, 0, 0], [2, 0, 0]]).double())


def test_the_tree_rules_out_most_triangles():
    vertices, faces = sphere(40, 60)
    triangles = vertices[faces]
    torch.manual_seed(0)
    points = torch.randn(200, 3).double() * 3
    bound = least_of_all(points, triangles).square()
    rows, _ = DiscTree(triangles).within(points, bound)
    assert len(rows) >= 200
    assert len(rows) < 200 * len(faces) * 0.03


def test_derivatives_of_signed_distance():
    torch.manual_seed(0)
    vertices, faces = sphere(3, 5)
    points = torch.randn(12, 3).double().requires_grad_()
    corners = vertices.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p, v: ops.signed_distance(p, v, faces).distances, (points, corners))
    on_it = vertices[:3].clone().requires_grad_()
    ops.signed_distance(on_it, vertices, faces).distances.sum().backward()
    assert torch.isfinite(on_it.grad).all()
    assert ops.signed_distance(points[:0], vertices, faces).distances.shape == (0,)


def test_areas_and_normals():
    vertices = torch.tensor([[0, 0, 0], [2, 0, 0], [2, 3, 0], [0, 3, 0], [1, 1, 1]], dtype=torch.float64) + 1e3
    quads, triangles = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]), torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert ops.cell_areas(vertices, quads).tolist() == [6.0, 6.0]
    assert ops.cell_normals(vertices, quads).tolist() == [[0, 0, 1], [0, 0, -1]]
    assert ops.cell_areas(vertices, triangles).tolist() == [3.0, 0.0]
    assert ops.cell_normals(vertices, triangles).tolist() == [[0, 0, 1], [0, 0, 0]]
    body, faces = sphere(60, 80)
    assert ops.cell_areas(body, faces).sum().item() == pytest.approx(4 * math.pi, rel=3e-3)
    assert (ops.cell_normals(body, faces) * body[faces].mean(1)).sum(-1).min() > 0.99
    closed = (ops.cell_areas(body, faces).unsqueeze(1) * ops.cell_normals(body, faces)).sum(0)
    torch.testing.assert_close(closed, torch.zeros(3).double(), rtol=0, atol=1e-12)


def test_interpolation():
    torch.manual_seed(0)
    points, values = random(30, 3), random(30, 2)
    torch.testing.assert_close(ops.interpolate_idw(points, values, points), values)
    queries = random(5, 3)
    d, i = all_pairs(points, queries, 4)
    weights = 1 / d**2
    expected = (weights[..., None] * values[i]).sum(1) / weights.sum(1, keepdim=True)
    torch.testing.assert_close(ops.interpolate_idw(points, values, queries), expected)
    near = points[:5] + 1e-200
    assert torch.isfinite(ops.interpolate_idw(points, values, near)).all()
    leaves = [t.clone().requires_grad_() for t in (points, values, queries)]
    assert torch.autograd.gradcheck(ops.interpolate_idw, leaves)


def test_an_index_can_be_asked_again():
    index = PointIndex(random(20, 3))
    for _ in range(2):
        squared, at = index.nearest(random(4, 3), 25)
        assert at.shape == (4, 25)
        assert (at[:, 20:] == FAR).all()
        assert squared[:, 20:].isinf().all()


def test_a_search_in_pieces_changes_nothing(monkeypatch):
    points, queries = torch.randint(0, 4, (60, 3)).double(), torch.randint(0, 4, (45, 3)).double()
    whole = ops.knn(points, queries, 5), ops.radius_search(points, queries, 1.5, 4)
    monkeypatch.setattr("dpzoo.ops.points_search.ROWS", 7)
    pieces = ops.knn(points, queries, 5), ops.radius_search(points, queries, 1.5, 4)
    for a, b in zip(whole, pieces, strict=True):
        assert torch.equal(a.distances, b.distances) and torch.equal(a.indices, b.indices)
