"""The two clouds of a car: what a point tells the model, and which fields the model predicts at it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpzoo.datapipes.points import SURFACE, VOLUME, Cloud, PointSample, Statistics
from dpzoo.ops import signed_distance


@dataclass(frozen=True)
class Kind:
    """A cloud.

    Args:
        cloud: arrays to read.
        centers, targets: names of the positions and of the fields to predict.
        fields: reported field -> its columns in `targets`.
        space_dim: 3 coordinates and what else `describe` gives.
        describe: (sample, statistics) -> `(points, space_dim)`: normalised coordinates, then the rest.
        whole: further arrays that `describe` needs, whole on every rank.
    """

    cloud: Cloud
    centers: str
    targets: str
    fields: Mapping[str, slice]
    space_dim: int
    describe: Callable[[PointSample, Statistics], Tensor]
    whole: tuple[str, ...] = ()

    @property
    def out_dim(self) -> int:
        """Columns of `targets`."""
        return max(columns.stop for columns in self.fields.values())


def with_frequencies(points: Tensor, frequencies: int) -> Tensor:
    """Points `(n, d)`, coordinates first, with `6 * frequencies` sines and cosines of the coordinates added."""
    if not frequencies:
        return points
    angles = [points[:, :3] * (2.0**octave) for octave in range(frequencies)]
    return torch.cat([points, *(wave(angle) for angle in angles for wave in (torch.sin, torch.cos))], dim=-1)


def _on_the_surface(sample: PointSample, statistics: Statistics) -> Tensor:
    """Position, and the direction in which the surface looks."""
    position = statistics.normalise("surface_mesh_centers", sample["surface_mesh_centers"])
    return torch.cat([position, sample["surface_normals"]], dim=-1)


def _in_the_air(sample: PointSample, statistics: Statistics) -> Tensor:
    """Position, signed distance to the surface, and the direction from there."""
    centers = sample["volume_mesh_centers"]
    vertices, faces = sample["stl_coordinates"].to(centers.dtype), sample["stl_faces"].long().view(-1, 3)
    distances, closest = signed_distance(centers, vertices, faces)
    away = torch.nn.functional.normalize(centers - closest, dim=-1)
    scale = float(statistics.fields["volume_mesh_centers"].std.max())
    position = statistics.normalise("volume_mesh_centers", centers)
    # Most of what happens, happens near the wall: a root spreads the small distances.
    depth = distances.abs().div(scale).sqrt() * distances.sign()
    return torch.cat([position, depth.unsqueeze(-1), away], dim=-1)


KINDS = {
    "surface": Kind(
        SURFACE,
        "surface_mesh_centers",
        "surface_fields",
        {"p": slice(0, 1)} | {f"wall_shear_{axis}": slice(i, i + 1) for i, axis in enumerate("xyz", 1)},
        6,
        _on_the_surface,
    ),
    "volume": Kind(
        VOLUME,
        "volume_mesh_centers",
        "volume_fields",
        {"U": slice(0, 3), "p": slice(3, 4), "nut": slice(4, 5)},
        7,
        _in_the_air,
        ("stl_coordinates", "stl_faces"),
    ),
}
