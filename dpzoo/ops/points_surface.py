"""Signed distance from points to a surface of triangles, exact, without the matrix of all pairs.

A tree over the triangles proposes near ones, whose distance then rules out all parts of the tree that are farther. The
sign comes from the angle-weighted pseudo-normal of the nearest corner, edge or face, which is right for every closed
surface (Baerentzen and Aanaes 2005, "Signed distance computation using the angle weighted pseudonormal").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dpzoo.ops.points_discs import DiscTree
from dpzoo.ops.points_search import PointIndex, check_finite, measured, squared_distances
from dpzoo.ops.points_triangles import closest_on_triangles, place_on, pseudo_normals

_PAIRS = 2**18  # point-triangle pairs worked on at once
_POINTS = 2**13  # points that descend the tree together


class SurfaceDistance(NamedTuple):
    """Distance to a surface and where it is reached."""

    distances: Tensor
    closest: Tensor


def signed_distance(points: Tensor, vertices: Tensor, faces: Tensor) -> SurfaceDistance:
    """Distance of each point to the nearest place on a surface: negative inside, where the normals point away.

    Args:
        points: (M, 3).
        vertices: (V, 3), in the unit of `points`.
        faces: (F, 3) indices of corners, ordered so that normals (right-hand rule) point outwards; triangles without
            area count as the edges and points that they are, but say nothing about inside and outside. For a surface
            with holes the sign is that of the side of the nearest triangle.

    Returns:
        distances (M,) and closest (M, 3), differentiable by points and vertices.

    Raises:
        ValueError: shapes that do not fit, no faces, coordinates that are not finite.
        IndexError: a face names a vertex that does not exist.
    """
    if has_torch_function((points, vertices, faces)):
        return handle_torch_function(signed_distance, (points, vertices, faces), points, vertices, faces)
    check_surface(points, vertices, faces)
    check_finite("signed_distance", points, vertices)
    triangles = vertices[faces]
    with torch.no_grad():
        wide = measured(triangles)
        face, feature, weights = _nearest_places(measured(points), wide)
        normals = pseudo_normals(wide, faces)
        offset = measured(points) - place_on(wide[face], weights)
        side = (offset * normals[face, feature]).sum(-1)
        sign = torch.where(side < 0, -1.0, 1.0)
    closest = place_on(triangles[face], weights.to(vertices.dtype))
    return SurfaceDistance(sign.to(points.dtype) * torch.linalg.vector_norm(points - closest, dim=-1), closest)


def check_surface(points: Tensor, vertices: Tensor, faces: Tensor) -> None:
    """Raise ValueError unless these are points and a surface."""
    fits = points.ndim == vertices.ndim == faces.ndim == 2 and points.shape[1] == vertices.shape[1] == 3
    if not fits or faces.shape[1] != 3 or not len(faces):
        raise ValueError(
            "signed_distance: points (M, 3), vertices (V, 3) and faces (F, 3) with F > 0, got "
            f"{tuple(points.shape)}, {tuple(vertices.shape)} and {tuple(faces.shape)}"
        )


def _nearest_places(points: Tensor, triangles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Face, feature (see `closest_on_triangles`) and barycentric weights of the nearest place, for (M, 3) points."""
    tree, centres = DiscTree(triangles), PointIndex(triangles.mean(1))
    found = []
    for part in points.split(_POINTS):
        best = _Best(part, triangles)
        guesses = tree.guess(part) if centres.tree is None else centres.nearest(part, 1)[1]
        rows = torch.arange(len(part), device=part.device).unsqueeze(1)
        best.improve(rows.expand_as(guesses).flatten(), guesses.flatten())
        best.improve(*tree.within(part, best.squared))
        found.append((best.face, best.feature, best.weights))
    face, feature, weights = (torch.cat(parts) for parts in zip(*found, strict=True))
    return face, feature, weights


class _Best:
    """The nearest triangle known so far for each point; of equally near ones the one with the smaller index."""

    def __init__(self, points: Tensor, triangles: Tensor) -> None:
        self.points, self.triangles = points, triangles
        self.squared = points.new_full((len(points),), torch.inf)
        self.face = torch.full((len(points),), len(triangles), dtype=torch.int64, device=points.device)
        self.feature = torch.zeros_like(self.face)
        self.weights = points.new_zeros((len(points), 3))

    def improve(self, rows: Tensor, faces: Tensor) -> None:
        """Try pairs of a point and a triangle."""
        for r, f in zip(rows.split(_PAIRS), faces.split(_PAIRS), strict=True):
            self._improve(r, f)

    def _improve(self, rows: Tensor, faces: Tensor) -> None:
        if not len(rows):
            return
        feature, weights = closest_on_triangles(self.points[rows], self.triangles[faces])
        squared = squared_distances(self.points[rows], place_on(self.triangles[faces], weights))
        before = self.squared.clone()
        self.squared.scatter_reduce_(0, rows, squared, "amin")
        nearest = squared == self.squared[rows]
        gone = torch.where(self.squared < before, len(self.triangles), self.face)
        self.face = gone.scatter_reduce(0, rows[nearest], faces[nearest], "amin")
        chosen = nearest & (faces == self.face[rows])
        self.feature[rows[chosen]], self.weights[rows[chosen]] = feature[chosen], weights[chosen]
