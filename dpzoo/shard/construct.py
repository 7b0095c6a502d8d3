"""Behind the public methods that make, leave and re-lay ShardTensors: checks, then one bridge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import as_sharded, from_shard, grad_spec, relayout, to_shard
from dpzoo.shard.errors import LayoutError, UndeterminedShardingError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, contiguous_stride
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, cut_of, default_sizes, placement_of, stride_like
from dpzoo.shard.synchronize import same_values
from dpzoo.shard.tensor import ShardTensor, wrap

ShapesArg = str | dict[int, Sequence[Sequence[int]]]


def cuts_of(layout: MeshLayout, placements: Sequence[Placement] | None, ndim: int) -> tuple[Cut, ...]:
    """Placements as cuts; all replicated when None."""
    if placements is None:
        return (REPLICATED,) * len(layout.shape)
    if isinstance(placements, Placement):
        placements = [placements]
    if len(placements) != len(layout.shape):
        raise LayoutError(
            f"{layout} has {len(layout.shape)} axes, but {len(placements)} placements were given: {list(placements)}"
        )
    return tuple(cut_of(p, ndim) for p in placements)


class _Claim(NamedTuple):
    """What one rank passed to `from_local`; compared between ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    asked: str


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
    if not isinstance(local, Tensor) or isinstance(local, (ShardTensor, DTensor)):
        raise LayoutError(f"from_local takes a plain tensor, got {type(local).__name__}")
    layout = MeshLayout.of(mesh)
    claims: list[_Claim] = []
    if run_check or sharding_shapes == "infer" or (sharding_shapes == "chunk" and global_shape is None):
        asked = repr((placements, global_shape and tuple(global_shape), sharding_shapes))
        needs = local.requires_grad and torch.is_grad_enabled()
        claims = comm.gather_over_mesh(_Claim(tuple(local.shape), local.dtype, needs, asked), layout)
        _check_arguments(layout, claims)
    cuts = cuts_of(layout, placements, local.ndim)
    if claims:
        _check_shapes(layout, claims, {cut for cut in cuts if isinstance(cut, int) and cut >= 0})
    sizes = _sizes_for(layout, cuts, sharding_shapes, global_shape, claims)
    shape = _global_shape(local.shape, cuts, sizes)
    if global_shape is not None and tuple(global_shape) != shape:
        raise LayoutError(f"global_shape {tuple(global_shape)} was given, but the shards make up {shape}")
    spec = ShardTensorSpec.make(layout, cuts, sizes, shape, local.dtype, stride_like(shape, local))
    _check_local(spec, layout.coords, tuple(local.shape))
    for index, claim in enumerate(claims):
        _check_local(spec, coordinates(layout, index), claim.shape)
    if local.requires_grad and torch.is_grad_enabled():
        grad_spec(spec)  # a partial value that has no gradient is refused here, not in backward
    if run_check:
        _check_replicas(local, spec)
    return from_shard(local, spec)


def _global_shape(local: Sequence[int], cuts: Sequence[Cut], sizes: Sequence[Sizes]) -> tuple[int, ...]:
    shape = list(local)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0:
            shape[cut] = sum(sizes[axis])
    return tuple(shape)


def _check_local(spec: ShardTensorSpec, coords: tuple[int, ...], found: tuple[int, ...]) -> None:
    wanted = list(spec.shape)
    for dim, axis in spec.cut_dims.items():
        wanted[dim] = spec.sizes[axis][coords[axis]]
    if found != tuple(wanted):
        raise LayoutError(
            f"the rank at {coords} of {spec.layout} passed a shard of shape {found}, but its layout "
            f"({spec.describe()}) says {tuple(wanted)}"
        )


def coordinates(layout: MeshLayout, index: int) -> tuple[int, ...]:
    """Mesh coordinates of the rank at `index` of `layout.ranks`."""
    out = []
    for n in reversed(layout.shape):
        index, c = divmod(index, n)
        out.append(c)
    return tuple(reversed(out))


def _sizes_for(
    layout: MeshLayout,
    cuts: tuple[Cut, ...],
    asked: ShapesArg,
    global_shape: Sequence[int] | None,
    claims: list[_Claim],
) -> tuple[Sizes, ...]:
    """The shard sizes of each axis, in the way that was asked for."""
    if isinstance(asked, dict):
        return _sizes_of_shapes(layout, cuts, asked)
    if asked == "chunk" and global_shape is not None:
        return default_sizes(layout, cuts, global_shape)
    if asked not in ("infer", "chunk"):
        raise UndeterminedShardingError(f"sharding_shapes takes 'infer', 'chunk' or a dict, got {asked!r}")
    found = tuple(
        _sizes_along(layout, claims, axis, cut) if isinstance(cut, int) and cut >= 0 else ()
        for axis, cut in enumerate(cuts)
    )
    chunks = default_sizes(layout, cuts, _global_shape(claims[0].shape, cuts, found))
    if asked == "chunk" and found != chunks:
        raise UndeterminedShardingError(
            f"sharding_shapes='chunk': the ranks of {layout} hold {found}, but torch.chunk would give {chunks}; pass "
            "'infer' or the shapes"
        )
    return found


def _sizes_of_shapes(
    layout: MeshLayout, cuts: Sequence[Cut], shapes: dict[int, Sequence[Sequence[int]]]
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


def given_sizes(
    layout: MeshLayout, cuts: Sequence[Cut], given: dict[int, Sequence[int]] | None, default: Sequence[Sizes]
) -> tuple[Sizes, ...]:
    """The default sizes, with those of some axes replaced; raises `LayoutError` for an axis that cuts nothing."""
    out = list(default)
    for axis, sizes in (given or {}).items():
        if axis not in layout.axes:
            raise LayoutError(f"sizes={given} names axis {axis}, but {layout} has {len(layout.shape)} axes")
        cut = cuts[axis]
        if isinstance(cut, str) or cut == REPLICATED:
            raise LayoutError(f"sizes={given} gives sizes for axis {axis} of {layout}, which cuts no dim")
        out[axis] = tuple(int(n) for n in sizes)
    return tuple(out)


def _check_arguments(layout: MeshLayout, claims: list[_Claim]) -> None:
    """Fails on all ranks when one of them passed other arguments than the rest."""
    for what, values in (
        ("placements, global_shape and sharding_shapes", [c.asked for c in claims]),
        ("tensors of different dtype or number of dims", [(c.dtype, len(c.shape)) for c in claims]),
        ("tensors of which only some need a gradient", [c.requires_grad for c in claims]),
    ):
        if any(v != values[0] for v in values):
            found = "; ".join(f"rank {r}: {v}" for r, v in zip(layout.ranks, values, strict=True))
            raise UndeterminedShardingError(f"from_local: the ranks of {layout} disagree, they passed {what}: {found}")


def _check_shapes(layout: MeshLayout, claims: list[_Claim], dims: set[int]) -> None:
    rest = [[n for d, n in enumerate(c.shape) if d not in dims] for c in claims]
    if any(r != rest[0] for r in rest):
        found = "; ".join(f"rank {r}: {c.shape}" for r, c in zip(layout.ranks, claims, strict=True))
        raise UndeterminedShardingError(
            f"from_local: the ranks of {layout} passed shards that do not form one tensor: {found}; only the cut dims "
            f"{sorted(dims)} may differ"
        )


def _sizes_along(layout: MeshLayout, claims: list[_Claim], axis: int, dim: int) -> Sizes:
    """The sizes of one axis; every line of ranks along it must agree."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for index, claim in enumerate(claims):
        at = coordinates(layout, index)
        lines.setdefault((*at[:axis], *at[axis + 1 :]), []).append(claim.shape[dim])
    found = list(lines.values())
    if any(line != found[0] for line in found):
        raise UndeterminedShardingError(
            f"from_local: sizes of dim {dim} along axis {axis} of {layout} differ between the other axes: {found}; "
            "shards must form a grid"
        )
    return tuple(found[0])


def _check_replicas(local: Tensor, spec: ShardTensorSpec) -> None:
    """Compare with the first rank along each axis that holds copies; a difference fails on all ranks of the mesh."""
    same = True
    for axis, cut in enumerate(spec.cuts):
        if cut == REPLICATED:
            first = comm.broadcast(local.detach(), 0, spec.layout.groups[axis])
            same = same and same_values(first, local.detach())
    everyone = comm.gather_over_mesh(same, spec.layout)
    if not all(everyone):
        others = [r for r, ok in zip(spec.layout.ranks, everyone, strict=True) if not ok]
        raise LayoutError(
            f"run_check: {spec.describe()} should be the same along the replicated axes, but ranks {others} passed "
            "other values"
        )


def to_local(x: ShardTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `ShardTensor.to_local`."""
    spec, layout = x._spec, x._spec.layout
    if grad_placements is not None:
        return to_shard(x, spec, _summed_axes(spec, grad_placements))
    unclear = [a for a, cut in enumerate(spec.cuts) if cut == REPLICATED and layout.shape[a] > 1]
    if unclear and x.requires_grad and torch.is_grad_enabled():
        raise UndeterminedShardingError(
            f"to_local() of {spec.describe()}, which needs a gradient: say what the gradient will be. Pass "
            "grad_placements=[Partial()] if each rank uses the value for its own part, [Replicate()] if all ranks do "
            "the same with it, or call full_tensor()"
        )
    return to_shard(x, spec)


def _summed_axes(spec: ShardTensorSpec, grad_placements: Sequence[Placement]) -> tuple[int, ...]:
    """The axes over which local gradients add up; raises `LayoutError` for a gradient that the value cannot have."""
    given = cuts_of(spec.layout, grad_placements, spec.ndim)
    for axis, (cut, g) in enumerate(zip(spec.cuts, given, strict=True)):
        possible = (REPLICATED, "sum") if cut == REPLICATED else (REPLICATED,) if isinstance(cut, str) else (cut,)
        if g not in possible:
            raise LayoutError(
                f"grad_placements {list(grad_placements)} of {spec.describe()}: along axis {axis} the gradient of the "
                f"local tensor can be {' or '.join(repr(placement_of(c)) for c in possible)}"
            )
    return tuple(a for a, g in enumerate(given) if g == "sum")


def full_tensor(x: ShardTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    """See `ShardTensor.full_tensor`."""
    whole = x._spec.replicated()
    return to_shard(x, whole, () if grad_placements is None else _summed_axes(whole, grad_placements))


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
            f"redistribute cannot change the mesh ({spec.layout} to {mesh}): gather with full_tensor() and scatter "
            "again"
        )
    cuts = spec.cuts if placements is None else cuts_of(spec.layout, placements, x.ndim)
    kept = tuple(
        spec.sizes[axis] if cuts[axis] == spec.cuts[axis] else new
        for axis, new in enumerate(default_sizes(spec.layout, cuts, x.shape))
    )
    return relayout(x, spec.like(cuts=cuts, sizes=given_sizes(spec.layout, cuts, sizes, kept)), fresh=True)


def as_gradient_of(x: ShardTensor, g: Tensor) -> Tensor:
    """What may be set as `x.grad`, in the layout of `x`; a plain tensor is the whole gradient, alike on all ranks."""
    with torch.no_grad():
        return relayout(as_sharded(g.detach() if not isinstance(g, ShardTensor) else g, x._spec), grad_spec(x._spec))


def as_tangent(g: ShardTensor, spec: ShardTensorSpec) -> ShardTensor:
    """A gradient in the one layout that a compiled graph takes: that of its tensor, contiguous."""
    wanted = grad_spec(spec).like(stride=contiguous_stride(spec.shape))
    return wrap(relayout(g, wanted)._local_tensor.contiguous(), wanted.of_dtype(g.dtype))


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
    if hasattr(local, "wait"):  # a collective of the DTensor that is still under way
        local = local.wait()
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
