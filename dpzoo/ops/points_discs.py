"""A tree over the triangles of a surface, searched for many points at once, level by level, on any device.

A node bounds its triangles by a disc with a thickness, across their mean normal. On a smooth surface such a disc is
thin (its thickness falls with the square of its radius), so that far fewer nodes are near a point than with boxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_CHILDREN = 8
_BEAM = 8
_SLACK = 1e-9  # (relative) of bounds, against their rounding


class Discs(NamedTuple):
    """Centres (n, 3), unit axes (n, 3), half thicknesses (n,) and radii (n,)."""

    centre: Tensor
    axis: Tensor
    thickness: Tensor
    radius: Tensor

    def squared_gap(self, points: Tensor, nodes: Tensor) -> Tensor:
        """At most the squared distance from each point (..., 3) to what lies in the node (...) beside it."""
        offset = points - self.centre[nodes]
        axis = self.axis[nodes]
        height = offset[..., 0] * axis[..., 0] + offset[..., 1] * axis[..., 1] + offset[..., 2] * axis[..., 2]
        length = offset[..., 0].square() + offset[..., 1].square() + offset[..., 2].square()
        across = length.sub_(height * height).clamp_(min=0).sqrt_()
        above = height.abs_().sub_(self.thickness[nodes]).clamp_(min=0)
        beside = across.sub_(self.radius[nodes]).clamp_(min=0)
        return above.square_().add_(beside.square_())


class DiscTree:
    """Triangles (F, 3, 3) in groups of 8 along a space-filling curve, groups of groups, and so on to one root level.

    Attributes:
        order: the curve: which triangle is where at the lowest level.
        levels: the nodes of each level, single triangles first.
    """

    def __init__(self, triangles: Tensor) -> None:
        self.order = _along_curve(triangles.mean(1))
        corners = triangles[self.order]
        self.levels = [_discs_around(corners)]
        while len(corners) > _CHILDREN:
            missing = -len(corners) % _CHILDREN
            if missing:  # a group that is not full holds its last triangle several times
                corners = torch.cat([corners, corners[-1:].expand(missing, -1, -1)])
            corners = corners.unflatten(0, (-1, _CHILDREN)).flatten(1, 2)
            self.levels.append(_discs_around(corners))

    def guess(self, points: Tensor) -> Tensor:
        """For each point (M, 3) some triangles that are likely to be near: (M, up to 8)."""
        nodes = torch.arange(self._count(-1), device=points.device).expand(len(points), -1)
        for level in range(len(self.levels) - 1, -1, -1):
            to_centre = (points.unsqueeze(1) - self.levels[level].centre[nodes]).square().sum(-1)
            key = self.levels[level].squared_gap(points.unsqueeze(1), nodes) + 0.01 * to_centre
            nodes = nodes.gather(1, key.topk(min(_BEAM, nodes.shape[1]), largest=False).indices)
            if level:
                nodes = self._children(nodes).clamp(max=self._count(level - 1) - 1)
        return self.order[nodes]

    def within(self, points: Tensor, squared: Tensor) -> tuple[Tensor, Tensor]:
        """All pairs of a point and a triangle that may be nearer to it than its bound: rows of `points`, and triangles.

        Args:
            squared: (M,) squared distances.
        """
        bound = (squared.sqrt() + _SLACK * (squared.sqrt() + self.levels[-1].radius.max())).square()
        rows = torch.arange(len(points), device=points.device)
        roots = self._count(-1)
        nodes = torch.arange(roots, device=points.device).repeat(len(rows))
        rows = rows.repeat_interleave(roots)
        for level in range(len(self.levels) - 1, -1, -1):
            near = self.levels[level].squared_gap(points[rows], nodes) <= bound[rows]
            rows, nodes = rows[near], nodes[near]
            if level:
                nodes = self._children(nodes.unsqueeze(1))
                rows, nodes = rows.unsqueeze(1).expand_as(nodes).flatten(), nodes.flatten()
                real = nodes < self._count(level - 1)
                rows, nodes = rows[real], nodes[real]
        return rows, self.order[nodes]

    def _count(self, level: int) -> int:
        return len(self.levels[level].radius)

    def _children(self, nodes: Tensor) -> Tensor:
        """(M, n) nodes -> (M, 8 n) of the level below; past its end where a group is not full."""
        inside = torch.arange(_CHILDREN, device=nodes.device)
        return (nodes.unsqueeze(-1) * _CHILDREN + inside).flatten(1)


def _discs_around(corners: Tensor) -> Discs:
    """Bounds of groups of triangles, given as corners (n, 3 triangles, 3)."""
    centre = (corners.amin(1) + corners.amax(1)) / 2
    a, b, c = corners.unflatten(1, (-1, 3)).unbind(2)
    axis = torch.nn.functional.normalize(torch.linalg.cross(b - a, c - a, dim=-1).sum(1), dim=-1)
    offset = corners - centre.unsqueeze(1)
    height = (offset * axis.unsqueeze(1)).sum(-1)
    across = (offset.square().sum(-1) - height.square()).clamp(min=0).sqrt()
    return Discs(centre, axis, height.abs().amax(1), across.amax(1))


def _along_curve(centres: Tensor) -> Tensor:
    """The order of points (F, 3) along a Morton curve of 2^20 steps a dim."""
    low = centres.amin(0)
    size = (centres.amax(0) - low).max().clamp(min=torch.finfo(centres.dtype).tiny)
    steps = ((centres - low) / size * (2**20 - 1)).to(torch.int64)
    code = torch.zeros_like(steps[:, 0])
    for bit in range(20):
        for dim in range(3):
            code |= ((steps[:, dim] >> bit) & 1) << (3 * bit + dim)
    return code.argsort(stable=True)
