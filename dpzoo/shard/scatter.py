"""Bring a whole tensor from one rank onto the mesh: each rank receives only its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard import collectives as comm
from dpzoo.shard.construct import cuts_of
from dpzoo.shard.errors import LayoutError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes
from dpzoo.shard.spec import ShardTensorSpec, default_sizes
from dpzoo.shard.tensor import ShardTensor, wrap


def scatter_tensor(
    tensor: Tensor | None,
    global_src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    *,
    sizes: dict[int, Sequence[int]] | None = None,
) -> ShardTensor:
    """Send each rank of the mesh its part of a tensor that only one rank holds.

    Args:
        tensor: the whole tensor on `global_src`; ignored elsewhere (None is usual).
        global_src: global rank that holds it; it must be a rank of the mesh.
        placements: `Shard(dim)` or `Replicate()` per mesh axis.
        global_shape, dtype: checked against the tensor; given by all ranks they save the exchange of the shape.
        requires_grad: make the result a leaf that needs a gradient.
        sizes: `{mesh_dim: shard sizes}`; the sizes of `torch.chunk` otherwise.

    Returns:
        A leaf ShardTensor.

    Raises:
        LayoutError: on every rank, for a dim, size or source that does not fit, before any data moves.
    """
    layout = MeshLayout.of(mesh)
    if global_src not in layout.ranks:
        raise LayoutError(
            f"scatter_tensor: rank {global_src} holds the tensor but is not one of the ranks {layout.ranks} of {layout}"
        )
    source = _coordinates(layout, layout.ranks.index(global_src))
    shape, dtype = _agree(tensor, layout, source, global_shape, dtype)
    cuts = cuts_of(layout, placements, len(shape))
    if any(isinstance(c, str) for c in cuts):
        raise LayoutError(f"scatter_tensor takes Shard and Replicate, got {list(placements)}")
    cut_sizes = list(default_sizes(layout, cuts, shape))
    for axis, given in (sizes or {}).items():
        cut_sizes[axis] = tuple(int(n) for n in given)
    spec = ShardTensorSpec.make(layout, cuts, cut_sizes, shape, dtype)
    local = tensor.detach().to(mesh.device_type) if layout.coords == source and tensor is not None else None
    for axis in layout.axes:  # first along axis 0 among the ranks that share the source's other coordinates, and so on
        if layout.coords[axis + 1 :] == source[axis + 1 :]:
            local = _scatter_axis(local, spec, axis, source[axis])
    assert local is not None
    return wrap(local.contiguous(), spec, requires_grad)


def scatter(
    tensor: Tensor | None,
    mesh: DeviceMesh,
    dim: int | tuple[int | None, ...] = 0,
    sizes: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    *,
    src: int | None = None,
    requires_grad: bool = False,
) -> ShardTensor:
    """Short form of `scatter_tensor`: cut `tensor` along `dim` over `mesh`.

    Args:
        tensor: the whole tensor on the source rank; None is allowed elsewhere.
        dim: the dim to cut; for an n-D mesh one per axis, None for an axis that should hold copies.
        sizes: shard sizes (one list per axis for an n-D mesh); the sizes of `torch.chunk` otherwise.
        src: global rank of the source; the first rank of the mesh by default.

    >>> x = scatter(image, mesh, dim=2)                       # rows of (B, C, H, W) over a 1-D mesh
    >>> x = scatter(image, mesh2d, dim=(2, 3))                # rows and columns over a 2-D mesh
    """
    dims = dim if isinstance(dim, tuple) else (dim,)
    per_axis: Sequence[Any] = [sizes] if not isinstance(dim, tuple) else (sizes or [None] * len(dims))
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    given = {axis: s for axis, s in enumerate(per_axis) if s is not None}
    first = MeshLayout.of(mesh).ranks[0] if src is None else src
    return scatter_tensor(tensor, first, mesh, placements, requires_grad=requires_grad, sizes=given)


def _coordinates(layout: MeshLayout, index: int) -> tuple[int, ...]:
    out = []
    for n in reversed(layout.shape):
        index, c = divmod(index, n)
        out.append(c)
    return tuple(reversed(out))


def _agree(
    tensor: Tensor | None,
    layout: MeshLayout,
    source: tuple[int, ...],
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype on every rank; a mismatch with what was declared fails on every rank."""
    mine = layout.coords == source
    if mine and not isinstance(tensor, Tensor):
        problem: Any = f"rank {layout.ranks} at {source} should hold the tensor, got {type(tensor).__name__}"
    elif mine and isinstance(tensor, ShardTensor):
        problem = "scatter_tensor takes a plain tensor; use redistribute() on a ShardTensor"
    else:
        problem = (tuple(tensor.shape), tensor.dtype) if mine and tensor is not None else None
    for axis in layout.axes:
        if layout.shape[axis] > 1:
            problem = comm.gather_objects(problem, layout.groups[axis])[source[axis]]
    if isinstance(problem, str):
        raise LayoutError(problem)
    found_shape, found_dtype = problem
    if (shape is not None and tuple(shape) != found_shape) or (dtype is not None and dtype is not found_dtype):
        raise LayoutError(f"scatter_tensor was told {shape} {dtype}, but the source holds {found_shape} {found_dtype}")
    return found_shape, found_dtype


def _scatter_axis(local: Tensor | None, spec: ShardTensorSpec, axis: int, source: int) -> Tensor:
    """Hand out one axis: the source splits (or copies) what it has, the others receive."""
    layout, cut = spec.layout, spec.cuts[axis]
    assert isinstance(cut, int)
    shape = list(spec.shape)
    for earlier in range(axis):
        if (dim := spec.cuts[earlier]) != -1 and isinstance(dim, int):
            shape[dim] = spec.sizes[earlier][layout.coords[earlier]]
    if cut < 0:
        like = local if local is not None else torch.empty(shape, dtype=spec.dtype, device=layout.device_type)
        return comm.broadcast(like, source, layout.groups[axis])
    sizes: Sizes = spec.sizes[axis]
    return comm.scatter_v(local, cut, sizes, shape, spec.dtype, layout.device_type, source, layout.groups[axis])
