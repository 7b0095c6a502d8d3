"""Cut full tensors into ShardTensors as a test says: a dim or placement per mesh axis, sizes or a named layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import Replicate, Shard, ShardTensor
from dpzoo.testing.layouts import check_sizes, layout_sizes

AxisPlacement = int | Shard | Replicate | None
InputPlacement = AxisPlacement | Sequence[AxisPlacement]
AxisSizes = str | Sequence[int] | None
InputSizes = AxisSizes | Sequence[AxisSizes]


@dataclass(frozen=True)
class Cut:
    """How one input lies on the mesh: per axis the dim that is cut (None: replicated) and, when cut, its sizes."""

    dims: tuple[int | None, ...]
    sizes: tuple[tuple[int, ...] | None, ...]

    def __str__(self) -> str:
        return ", ".join(
            "Replicate" if dim is None else f"Shard({dim}) sizes {sizes}"
            for dim, sizes in zip(self.dims, self.sizes, strict=True)
        )

    @property
    def placements(self) -> list[Shard | Replicate]:
        """One placement per mesh axis."""
        return [Replicate() if dim is None else Shard(dim) for dim in self.dims]


def plan_cut(
    shape: Sequence[int], mesh_shape: Sequence[int], placement: InputPlacement, sizes: InputSizes, turn: int = 0
) -> Cut | None:
    """The cut of a tensor of `shape`, or None for a plain tensor. Integers only.

    Args:
        placement: None leaves the tensor plain. On a mesh of one axis a dim or a placement, else one entry per axis,
            in which None means replicated.
        sizes: a layout's name for every axis that cuts, or sizes (mesh of one axis), or one of these per axis.
        turn: rotates named layouts over the ranks.

    Raises:
        ValueError: the entries do not fit the mesh or the shape.
    """
    if placement is None:
        return None
    axes = len(mesh_shape)
    per_axis = list(placement) if isinstance(placement, Sequence) else [placement]
    if len(per_axis) != axes:
        raise ValueError(
            f"placement {placement!r} has {len(per_axis)} entries for a mesh of {axes} axes; give one per axis"
        )
    dims = tuple(_dim_of(entry, len(shape)) for entry in per_axis)
    entries = _sizes_per_axis(sizes, axes)
    if len(entries) != axes:
        raise ValueError(f"sizes {sizes!r} has {len(entries)} entries for a mesh of {axes} axes; give one per axis")
    cuts = [
        None if dim is None else _axis_sizes(shape[dim], ranks, entry, turn)
        for dim, ranks, entry in zip(dims, mesh_shape, entries, strict=True)
    ]
    return Cut(dims, tuple(cuts))


def cut_tensor(full: Tensor, mesh: DeviceMesh, cut: Cut) -> ShardTensor:
    """This rank's shard of `full`, which every rank has, as a ShardTensor; no communication."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"this rank is not in {mesh}"
    local = full.detach()
    shapes: dict[int, Sequence[Sequence[int]]] = {}
    for axis, (dim, sizes) in enumerate(zip(cut.dims, cut.sizes, strict=True)):
        if dim is not None and sizes is not None:
            begin = sum(sizes[: coordinate[axis]])
            local = local.narrow(dim, begin, sizes[coordinate[axis]])
    for axis, (dim, sizes) in enumerate(zip(cut.dims, cut.sizes, strict=True)):
        if dim is not None and sizes is not None:
            shapes[axis] = tuple((*local.shape[:dim], size, *local.shape[dim + 1 :]) for size in sizes)
    return ShardTensor.from_local(local.clone(), mesh, cut.placements, sharding_shapes=shapes)


def owner_of(index: Sequence[int], cut: Cut) -> tuple[int | None, ...]:
    """The mesh coordinate that holds the element at `index`; None on axes that replicate."""
    return tuple(
        None
        if dim is None or sizes is None
        else next(r for r, end in enumerate(itertools.accumulate(sizes)) if index[dim] < end)
        for dim, sizes in zip(cut.dims, cut.sizes, strict=True)
    )


def _dim_of(entry: AxisPlacement, ndim: int) -> int | None:
    if entry is None or isinstance(entry, Replicate):
        return None
    dim = entry.dim if isinstance(entry, Shard) else entry
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise ValueError(
            f"can not cut dim {dim!r} of a tensor with {ndim} dims; use a dim, Shard(dim), Replicate() or None"
        )
    return dim % ndim


def _sizes_per_axis(sizes: InputSizes, axes: int) -> list[Any]:
    if sizes is None or isinstance(sizes, str):
        return [sizes] * axes
    is_one_cut = axes == 1 and all(isinstance(size, int) for size in sizes)
    return [sizes] if is_one_cut else list(sizes)


def _axis_sizes(n: int, ranks: int, entry: AxisSizes | int, turn: int) -> tuple[int, ...]:
    if entry is None or isinstance(entry, str):
        return layout_sizes(n, ranks, entry or "even", turn)
    if isinstance(entry, int):
        raise ValueError(f"sizes: found the number {entry} where one mesh axis needs the sizes of {ranks} ranks")
    return check_sizes(n, ranks, entry)
