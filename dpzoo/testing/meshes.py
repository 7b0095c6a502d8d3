"""The device meshes that a communication test has to walk: one axis, two axes, and groups that are not the first.

Call them inside a rank task. Groups are made once per process and kept.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dpzoo.testing.torchrun import device_type

_made: dict[tuple[object, tuple[int, ...]], DeviceMesh] = {}
_lines: dict[tuple[object, str], DeviceMesh] = {}


def domain_mesh(ranks: int | None = None) -> DeviceMesh:
    """All ranks of the task on one axis named "domain". `ranks`, when given, must be the task's number of ranks."""
    world = dist.get_world_size()
    if ranks is not None and ranks != world:
        raise ValueError(
            f"domain_mesh({ranks}): this task runs on {world} ranks; ask for ranks={ranks} when you start it"
        )
    return _mesh((world,), ("domain",))


def grid_mesh(shape: tuple[int, int] = (2, 2)) -> DeviceMesh:
    """Two axes, ("ddp", "domain"); needs a task on shape[0] * shape[1] ranks (4 by default)."""
    world = dist.get_world_size()
    if shape[0] * shape[1] != world:
        raise ValueError(f"grid_mesh({shape}) needs {shape[0] * shape[1]} ranks; this task runs on {world}")
    return _mesh(shape, ("ddp", "domain"))


def row_mesh() -> DeviceMesh:
    """This rank's row of the (2, 2) grid: {0, 1} or {2, 3}. Ranks 2 and 3 test a sub-group that is not the first."""
    return _line_of_grid("domain")


def column_mesh() -> DeviceMesh:
    """This rank's column of the (2, 2) grid: {0, 2} or {1, 3}, groups whose global ranks have a stride."""
    return _line_of_grid("ddp")


def _line_of_grid(axis: str) -> DeviceMesh:
    grid = grid_mesh()
    key = (dist.group.WORLD, axis)
    if key not in _lines:
        _lines[key] = grid[axis]
    return _lines[key]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    key = (dist.group.WORLD, shape)
    if key not in _made:
        _made[key] = init_device_mesh(device_type(), shape, mesh_dim_names=names)
    return _made[key]
