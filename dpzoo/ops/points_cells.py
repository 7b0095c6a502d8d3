"""Areas and normals of the cells of a surface: triangles, or flat polygons of any number of corners."""

from __future__ import annotations

import torch
from torch import Tensor


def cell_normals(vertices: Tensor, cells: Tensor) -> Tensor:
    """Unit normals of polygons, by the right-hand rule; zero for a polygon without area.

    Args:
        vertices: (V, 3).
        cells: (F, n) indices of the corners of flat n-gons, n >= 3, in order.

    Returns:
        (F, 3), differentiable by `vertices`.
    """
    area = _vector_areas(vertices, cells)
    size = torch.linalg.vector_norm(area, dim=-1, keepdim=True)
    return area / torch.where(size == 0, 1.0, size)


def cell_areas(vertices: Tensor, cells: Tensor) -> Tensor:
    """Areas of flat polygons, in the square of the vertices' unit; arguments as of :func:`cell_normals`. (F,)."""
    return torch.linalg.vector_norm(_vector_areas(vertices, cells), dim=-1)


def _vector_areas(vertices: Tensor, cells: Tensor) -> Tensor:
    """Half the sum of cross products around each polygon, from its first corner: a far origin costs no digits."""
    if vertices.ndim != 2 or vertices.shape[1] != 3 or cells.ndim != 2 or cells.shape[1] < 3:
        raise ValueError(
            f"cell_areas and cell_normals: vertices (V, 3) and cells (F, n) with n >= 3, got {tuple(vertices.shape)} "
            f"and {tuple(cells.shape)}"
        )
    corners = vertices[cells]
    edges = corners[:, 1:] - corners[:, :1]
    return torch.linalg.cross(edges[:, :-1], edges[:, 1:], dim=-1).sum(1) / 2
