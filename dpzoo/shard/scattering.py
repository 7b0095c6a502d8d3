"""Bring a whole tensor from one rank onto the mesh: each rank receives only its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard import collectives as comm
from dpzoo.shard.construct import coordinates, cuts_of, given_sizes
from dpzoo.shard.errors import LayoutError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import starts
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec, default_sizes
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
        global_shape, dtype: what the tensor should be; checked.
        requires_grad: make the result a leaf that needs a gradient.
        sizes: `{mesh_dim: shard sizes}`; the sizes of `torch.chunk` otherwise.

    Returns:
        A leaf ShardTensor.

    Raises:
        LayoutError: on every rank, for a dim, size or source that does not fit, or ranks that ask for different
            things, before any data moves.
    """
    layout = MeshLayout.of(mesh)
    shape, dtype = _agree(tensor, global_src, layout, placements, global_shape, dtype, sizes)
    cuts = cuts_of(layout, placements, len(shape))
    if any(isinstance(c, str) for c in cuts):
        raise LayoutError(f"scatter_tensor takes Shard and Replicate, got {list(placements)}")
    cut_sizes = given_sizes(layout, cuts, sizes, default_sizes(layout, cuts, shape))
    spec = ShardTensorSpec.make(layout, cuts, cut_sizes, shape, dtype)
    local = _hand_out(tensor, spec, layout.ranks.index(global_src))
    for axis, cut in enumerate(cuts):
        if cut == REPLICATED:
            local = comm.broadcast(
                local, coordinates(layout, layout.ranks.index(global_src))[axis], layout.groups[axis]
            )
    return wrap(local, spec, requires_grad)


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
    if len(per_axis) != len(dims):
        raise LayoutError(f"scatter: dim={dim} names {len(dims)} mesh axes, sizes={sizes} has {len(per_axis)} entries")
    placements = [Replicate() if d is None else Shard(d) for d in dims]
    given = {axis: s for axis, s in enumerate(per_axis) if s is not None}
    first = MeshLayout.of(mesh).ranks[0] if src is None else src
    return scatter_tensor(tensor, first, mesh, placements, requires_grad=requires_grad, sizes=given)


def _agree(
    tensor: Tensor | None,
    source: int,
    layout: MeshLayout,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    dtype: torch.dtype | None,
    sizes: dict[int, Sequence[int]] | None,
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensor, on every rank; ranks that call with other arguments fail on all of them."""
    asked = (
        source,
        repr(placements),
        shape and tuple(shape),
        dtype,
        sizes and sorted((a, *s) for a, s in sizes.items()),
    )
    found: Any = None
    if layout.ranks[_index(layout)] == source:
        is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, (ShardTensor, DTensor))
        found = (tuple(tensor.shape), tensor.dtype) if is_plain and tensor is not None else type(tensor).__name__
    everyone = comm.gather_over_mesh((asked, found), layout)
    if any(other != asked for other, _ in everyone):
        raise LayoutError(
            "scatter_tensor: the ranks asked for different things (source, placements, global_shape, dtype, sizes): "
            f"{dict(zip(layout.ranks, [other for other, _ in everyone], strict=True))}"
        )
    if source not in layout.ranks:
        raise LayoutError(
            f"scatter_tensor: rank {source} holds the tensor but is not one of the ranks {layout.ranks} of {layout}"
        )
    found = everyone[layout.ranks.index(source)][1]
    if isinstance(found, str):
        raise LayoutError(
            f"scatter_tensor: rank {source} should hold a plain tensor, got {found}; a ShardTensor is moved by "
            "redistribute()"
        )
    found_shape, found_dtype = found
    if (shape is not None and tuple(shape) != found_shape) or (dtype is not None and dtype is not found_dtype):
        raise LayoutError(
            f"scatter_tensor was told global_shape={shape}, dtype={dtype}, but rank {source} holds a tensor of "
            f"{found_shape} {found_dtype}"
        )
    return found_shape, found_dtype


def _index(layout: MeshLayout) -> int:
    """This rank's place in the flattened mesh."""
    index = 0
    for n, c in zip(layout.shape, layout.coords, strict=True):
        index = index * n + c
    return index


def _hand_out(tensor: Tensor | None, spec: ShardTensorSpec, source: int) -> Tensor:
    """This rank's part, sent by the source one rank at a time; copies go to one rank and are left for a broadcast."""
    layout, device = spec.layout, comm.device_of(spec.layout.device_type)
    origin = coordinates(layout, source)
    copied = [axis for axis, cut in enumerate(spec.cuts) if cut == REPLICATED]
    if layout.coords != origin:
        if spec.local_shape.numel() and all(layout.coords[a] == origin[a] for a in copied):
            return comm.receive(spec.local_shape, spec.dtype, device, layout.ranks[source])
        return torch.empty(spec.local_shape, dtype=spec.dtype, device=device)
    assert tensor is not None
    for index, rank in enumerate(layout.ranks):
        at = coordinates(layout, index)
        part = _part(tensor, spec, at)
        if at != origin and part.numel() and all(at[a] == origin[a] for a in copied):
            comm.send(part, rank, device)
    return _part(tensor, spec, origin).detach().to(device).clone(memory_format=torch.contiguous_format)


def _part(tensor: Tensor, spec: ShardTensorSpec, at: tuple[int, ...]) -> Tensor:
    """The shard of the rank at mesh coordinates `at`."""
    for dim, axis in spec.cut_dims.items():
        tensor = tensor.narrow(dim, starts(spec.sizes[axis])[at[axis]], spec.sizes[axis][at[axis]])
    return tensor
