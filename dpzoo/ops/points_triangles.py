"""Geometry of single triangles: the nearest place on each, and normals of faces, edges and corners."""

from __future__ import annotations

import torch
from torch import Tensor

FACE, EDGES, CORNERS = 0, (1, 2, 3), (4, 5, 6)
"""Features of a triangle abc: its face, the edges ab, bc, ca, the corners a, b, c."""


def closest_on_triangles(points: Tensor, triangles: Tensor) -> tuple[Tensor, Tensor]:
    """The place on each triangle (n, 3, 3) that is nearest to the point (n, 3) beside it.

    Returns:
        Which feature it lies on (n,), and its barycentric weights (n, 3).

    Ericson 2005, "Real-Time Collision Detection", 5.1.5: signs of products of edges tell the feature. A triangle
    without area is the longest of its edges.
    """
    a, b, c = triangles.unbind(1)
    ab, ac = b - a, c - a
    d1, d2 = _dot(ab, points - a), _dot(ac, points - a)
    d3, d4 = _dot(ab, points - b), _dot(ac, points - b)
    d5, d6 = _dot(ab, points - c), _dot(ac, points - c)
    va, vb, vc = d3 * d6 - d5 * d4, d5 * d2 - d1 * d6, d1 * d4 - d3 * d2
    along_bc = d4 - d3, d5 - d6
    total = va + vb + vc
    on_ab, on_ac = _share(d1, d1 - d3), _share(d2, d2 - d6)
    on_bc = _share(along_bc[0], along_bc[0] + along_bc[1])
    one, zero = torch.ones_like(d1), torch.zeros_like(d1)
    regions = (  # feature, when, weights of b and c; the first that holds decides
        (CORNERS[0], (d1 <= 0) & (d2 <= 0), zero, zero),
        (CORNERS[1], (d3 >= 0) & (d4 <= d3), one, zero),
        (EDGES[0], (vc <= 0) & (d1 >= 0) & (d3 <= 0), on_ab, zero),
        (CORNERS[2], (d6 >= 0) & (d5 <= d6), zero, one),
        (EDGES[2], (vb <= 0) & (d2 >= 0) & (d6 <= 0), zero, on_ac),
        (EDGES[1], (va <= 0) & (along_bc[0] >= 0) & (along_bc[1] >= 0), 1 - on_bc, on_bc),
    )
    feature, of_b, of_c = torch.zeros_like(d1, dtype=torch.int64), _share(vb, total), _share(vc, total)
    for name, holds, b_there, c_there in reversed(regions):
        feature.masked_fill_(holds, name)
        of_b, of_c = torch.where(holds, b_there, of_b), torch.where(holds, c_there, of_c)
    of_a = torch.where(feature == EDGES[1], zero, 1 - of_b - of_c)
    return _flat_ones(points, triangles, feature, torch.stack([of_a, of_b, of_c], -1))


def place_on(triangles: Tensor, weights: Tensor) -> Tensor:
    """The places (n, 3) that barycentric weights (n, 3) mean on triangles (n, 3, 3)."""
    a, b, c = triangles.unbind(1)
    return weights[:, :1] * a + weights[:, 1:2] * b + weights[:, 2:] * c


def _flat_ones(points: Tensor, triangles: Tensor, feature: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where a triangle has no area the signs say nothing: the nearest place of its three edges."""
    cross = _cross_of(triangles)
    flat = (_dot(cross, cross) == 0).nonzero().squeeze(1)
    if not len(flat):
        return feature, weights
    p, t = points[flat], triangles[flat]
    tried = []
    for start in range(3):
        a, b = t[:, start], t[:, (start + 1) % 3]
        share = _share(_dot(p - a, b - a), _dot(b - a, b - a)).clamp(0, 1)
        w = torch.zeros_like(p)
        w[:, start], w[:, (start + 1) % 3] = 1 - share, share
        tried.append(w)
    options = torch.stack(tried, 1)
    away = (p.unsqueeze(1) - options @ t).square().sum(-1)
    edge = away.argmin(1)
    feature[flat] = edge + EDGES[0]
    weights[flat] = options[torch.arange(len(flat), device=edge.device), edge]
    return feature, weights


def pseudo_normals(triangles: Tensor, faces: Tensor) -> Tensor:
    """Normals (F, 7, 3), not of unit length, of every feature of triangles (F, 3, 3) that faces (F, 3) join.

    Of an edge the sum of the unit normals of the faces that have it, of a corner the sum weighted by the faces' angles
    there. Corners are joined by the vertex index; vertices that coincide must share it.
    """
    cross = _cross_of(triangles)
    normal = torch.nn.functional.normalize(cross, dim=-1)
    out = normal.unsqueeze(1).repeat(1, 7, 1)
    count = int(faces.max()) + 1
    corners = normal.new_zeros((count, 3))
    for k in range(3):
        at, after, before = (triangles[:, (k + i) % 3] for i in range(3))
        angle = torch.atan2(torch.linalg.vector_norm(cross, dim=-1), _dot(after - at, before - at))
        corners.index_add_(0, faces[:, k], normal * angle.unsqueeze(-1))
    out[:, CORNERS[0] :] = corners[faces]
    ends = torch.stack([faces, faces.roll(-1, 1)], -1)
    key = ends.amin(-1) * count + ends.amax(-1)
    _, edge = key.unique(return_inverse=True)
    sums = normal.new_zeros((int(edge.max()) + 1, 3))
    sums.index_add_(0, edge.flatten(), normal.unsqueeze(1).expand(-1, 3, -1).flatten(0, 1))
    out[:, EDGES[0] : EDGES[-1] + 1] = sums[edge]
    return out


def _cross_of(triangles: Tensor) -> Tensor:
    return torch.linalg.cross(triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0], dim=-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    # written out: a sum over a dim of 3 is slow
    return a[..., 0] * b[..., 0] + a[..., 1] * b[..., 1] + a[..., 2] * b[..., 2]


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part / torch.where(whole == 0, 1.0, whole)
