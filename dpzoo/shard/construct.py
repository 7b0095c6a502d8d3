"""Behind the public methods that make, leave and re-lay ShardTensors: checks, then one bridge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import from_shard, relayout, to_shard
from dpzoo.shard.errors import LayoutError, UndeterminedShardingError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, cut_of, default_sizes, stride_like
from dpzoo.shard.tensor import ShardTensor

ShapesArg = str | dict[int, Sequence[Sequence[int]]]


def cuts_of(layout: MeshLayout, placements: Sequence[Placement] | None, ndim: int) -> tuple[Cut, ...]:
    """Placements as cuts; all replicated when None."""
    if placements is None:
        return (REPLICATED,) * len(layout.shape)
    if isinstance(placements, Placement):
        placements = [placements]
    if len(placements) != len(layout.shape):
        raise LayoutError(
            f"{layout} has {len(layout.shape)} axes, but {len(placements)} placements were given: {placements}"
        )
    return tuple(cut_of(p, ndim) for p in placements)


def from_local(
    local: Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sharding_shapes: ShapesArg,
    global_shape: Sequence[int] | None,
    run_check: bool,
) -> ShardTensor:
    """See `ShardTensor.from_local`."""
    if mesh is None:
        raise LayoutError("from_local needs a device_mesh: see torch.distributed.device_mesh.init_device_mesh")
    if isinstance(local, ShardTensor):
        raise LayoutError("from_local takes a plain tensor, got a ShardTensor")
    layout = MeshLayout.of(mesh)
    cuts = cuts_of(layout, placements, local.ndim)
    if sharding_shapes == "infer":
        sizes = _inferred_sizes(layout, cuts, local)
    elif sharding_shapes == "chunk":
        sizes = _chunk_sizes(layout, cuts, local, global_shape)
    elif isinstance(sharding_shapes, dict):
        sizes = _given_sizes(layout, cuts, sharding_shapes, local)
    else:
        raise UndeterminedShardingError(f"sharding_shapes takes 'infer', 'chunk' or a dict, got {sharding_shapes!r}")
    shape = list(local.shape)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0:
            shape[cut] = sum(sizes[axis])
    if global_shape is not None and tuple(global_shape) != tuple(shape):
        raise LayoutError(f"global_shape {tuple(global_shape)} was given, but the shards make up {tuple(shape)}")
    spec = ShardTensorSpec.make(layout, cuts, sizes, shape, local.dtype, stride_like(shape, local))
    if spec.local_shape != local.shape:
        raise LayoutError(
            f"rank {layout.coords} of {layout} passed a shard of shape {tuple(local.shape)}, but its layout "
            f"({spec.describe()}) says {tuple(spec.local_shape)}"
        )
    if run_check:
        _check_replicas(local, spec)
    return from_shard(local, spec)


def _given_sizes(
    layout: MeshLayout, cuts: Sequence[Cut], shapes: dict[int, Sequence[Sequence[int]]], local: Tensor
) -> tuple[Sizes, ...]:
    """Sizes along each cut dim, from full shard shapes (whose other dims may be those of another tensor)."""
    out: list[Sizes] = []
    for axis, cut in enumerate(cuts):
        if not (isinstance(cut, int) and cut >= 0):
            out.append(())
            continue
        if axis not in shapes:
            raise UndeterminedShardingError(
                f"placements cut dim {cut} over mesh axis {axis}, but sharding_shapes has no entry {axis}"
            )
        given = [tuple(s) for s in shapes[axis]]
        if len(given) != layout.shape[axis] or any(cut >= len(s) for s in given):
            raise UndeterminedShardingError(
                f"sharding_shapes[{axis}] must hold {layout.shape[axis]} shapes with more than {cut} dims, got {given}"
            )
        out.append(tuple(int(s[cut]) for s in given))
    return tuple(out)


def _chunk_sizes(
    layout: MeshLayout, cuts: Sequence[Cut], local: Tensor, global_shape: Sequence[int] | None
) -> tuple[Sizes, ...]:
    shape = list(local.shape)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0:
            shape[cut] = global_shape[cut] if global_shape is not None else local.shape[cut] * layout.shape[axis]
    return default_sizes(layout, cuts, shape)


def _inferred_sizes(layout: MeshLayout, cuts: Sequence[Cut], local: Tensor) -> tuple[Sizes, ...]:
    """Ask the ranks along every axis for their shapes; a rank that does not fit fails on all of them."""
    mine = (tuple(local.shape), str(local.dtype), tuple(cuts))
    sizes: list[Sizes] = []
    known: Any = mine
    for axis, cut in enumerate(cuts):
        if layout.shape[axis] == 1:
            sizes.append((local.shape[cut],) if isinstance(cut, int) and cut >= 0 else ())
            known = [known]
            continue
        known = comm.gather_objects(known, layout.groups[axis])
        sizes.append(())
    flat = _flatten(known, len(cuts))
    dims = {cut for cut in cuts if isinstance(cut, int) and cut >= 0}
    _check_agreement(layout, flat, dims)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0 and layout.shape[axis] > 1:
            sizes[axis] = _sizes_along(layout, flat, axis, cut)
    return tuple(sizes)


def _flatten(nested: Any, depth: int) -> list[Any]:
    for _ in range(depth - 1):
        nested = [x for group in nested for x in group]
    return list(nested)


def _check_agreement(layout: MeshLayout, flat: list[Any], dims: set[int]) -> None:
    first = flat[0]
    for shape, dtype, cuts in flat:
        rest = [n for d, n in enumerate(shape) if d not in dims]
        if (
            (dtype, cuts) != first[1:]
            or len(shape) != len(first[0])
            or rest != [n for d, n in enumerate(first[0]) if d not in dims]
        ):
            found = "; ".join(f"{d.removeprefix('torch.')}{s}" for s, d, _ in flat)
            raise UndeterminedShardingError(
                f"the ranks of {layout} passed shards that do not form one tensor: {found} (placements {[c for *_, c in flat]}); "
                "only the cut dims may differ"
            )


def _sizes_along(layout: MeshLayout, flat: list[Any], axis: int, dim: int) -> Sizes:
    """The sizes of one axis; every line of ranks along it must agree. `flat` runs with the last axis outermost."""
    grid = torch.tensor([shape[dim] for shape, *_ in flat]).view(tuple(reversed(layout.shape)))
    lines = grid.movedim(len(layout.shape) - 1 - axis, 0).reshape(layout.shape[axis], -1)
    if not (lines == lines[:, :1]).all():
        raise UndeterminedShardingError(
            f"sizes of dim {dim} along axis {axis} of {layout} differ between the other axes: {lines.t().tolist()}; "
            "shards must form a grid"
        )
    return tuple(lines[:, 0].tolist())


def _check_replicas(local: Tensor, spec: ShardTensorSpec) -> None:
    for axis, cut in enumerate(spec.cuts):
        if cut == REPLICATED:
            first = comm.broadcast(local.detach(), 0, spec.layout.groups[axis])
            same = torch.equal(torch.nan_to_num(first), torch.nan_to_num(local.detach()))
            if not all(comm.gather_objects(same, spec.layout.groups[axis])):
                raise LayoutError(
                    f"Replicate() over axis {axis} of {spec.layout}, but the ranks passed different values"
                )


def to_local(x: ShardTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `ShardTensor.to_local`."""
    spec, layout = x._spec, x._spec.layout
    if grad_placements is not None:
        cuts = cuts_of(layout, grad_placements, x.ndim)
        for axis, (cut, given) in enumerate(zip(spec.cuts, cuts, strict=True)):
            if given != cut and not (cut == REPLICATED and given == "sum") and not isinstance(cut, str):
                raise LayoutError(f"grad_placements {grad_placements} of {spec.describe()}: axis {axis} cannot be that")
        return to_shard(x, spec, tuple(a for a, c in enumerate(cuts) if c == "sum" and spec.cuts[a] == REPLICATED))
    unclear = [a for a, cut in enumerate(spec.cuts) if cut == REPLICATED and layout.shape[a] > 1]
    if unclear and x.requires_grad and torch.is_grad_enabled():
        raise UndeterminedShardingError(
            f"to_local() of {spec.describe()}, which needs a gradient: say what the gradient will be. Pass "
            "grad_placements=[Partial()] if each rank uses the value for its own part, [Replicate()] if all ranks do the "
            "same with it, or call full_tensor()"
        )
    return to_shard(x, spec)


def full_tensor(x: ShardTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `ShardTensor.full_tensor`."""
    axes: tuple[int, ...] = ()
    if grad_placements is not None:
        cuts = cuts_of(x._spec.layout, grad_placements, x.ndim)
        axes = tuple(a for a, c in enumerate(cuts) if c == "sum")
    return to_shard(x, x._spec.replicated(), axes)


def redistribute(
    x: ShardTensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sizes: dict[int, Sequence[int]] | None,
) -> ShardTensor:
    """See `ShardTensor.redistribute`."""
    spec = x._spec
    if mesh is not None and MeshLayout.of(mesh) is not spec.layout:
        raise LayoutError(
            f"redistribute cannot change the mesh ({spec.layout} to {mesh}): gather with full_tensor() and scatter again"
        )
    cuts = spec.cuts if placements is None else cuts_of(spec.layout, placements, x.ndim)
    new = list(default_sizes(spec.layout, cuts, x.shape))
    for axis in spec.layout.axes:
        if cuts[axis] == spec.cuts[axis] and spec.sizes[axis]:
            new[axis] = spec.sizes[axis]
        if sizes and axis in sizes:
            new[axis] = tuple(int(n) for n in sizes[axis])
    if any(isinstance(c, str) and c != spec.cuts[a] and spec.cuts[a] != REPLICATED for a, c in enumerate(cuts)):
        raise LayoutError(
            f"{spec.describe()} cannot become {placements}: only a replicated value can be split into summands"
        )
    return relayout(x, spec.like(cuts=cuts, sizes=new))


def from_dtensor(d: DTensor) -> ShardTensor:
    """See `ShardTensor.from_dtensor`."""
    layout = MeshLayout.of(d.device_mesh)
    cuts = cuts_of(layout, d.placements, d.ndim)
    sizes = default_sizes(layout, cuts, d.shape)
    local = d.to_local(
        grad_placements=[
            torch.distributed.tensor.Replicate() if isinstance(c, str) else p
            for c, p in zip(cuts, d.placements, strict=True)
        ]
    )
    return from_shard(local, ShardTensorSpec.make(layout, cuts, sizes, d.shape, d.dtype, stride_like(d.shape, local)))


def to_dtensor(x: ShardTensor) -> DTensor:
    """See `ShardTensor.to_dtensor`."""
    spec = x._spec
    if spec.sizes != default_sizes(spec.layout, spec.cuts, spec.shape):
        raise LayoutError(
            f"{spec.describe()} is not a layout a DTensor can hold: redistribute to the sizes "
            f"{default_sizes(spec.layout, spec.cuts, spec.shape)} first"
        )
    local = to_shard(x, spec)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)
