"""Behind the public methods that leave and re-lay ShardTensors: checks, then one bridge. `from_local.py` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard.bridges import as_sharded, from_shard, grad_spec, relayout, to_shard
from dpzoo.shard.errors import LayoutError, UndeterminedShardingError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, contiguous_stride
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, cut_of, default_sizes, placement_of, stride_like
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing


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


def coordinates(layout: MeshLayout, index: int) -> tuple[int, ...]:
    """Mesh coordinates of the rank at `index` of `layout.ranks`."""
    out = []
    for n in reversed(layout.shape):
        index, c = divmod(index, n)
        out.append(c)
    return tuple(reversed(out))


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
    if mesh is not None and not MeshLayout.of(mesh).equals(spec.layout):
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


def plain_tangent(g: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A gradient that is whole, and alike on every rank, in the layout that a compiled graph takes."""
    return as_tangent(as_sharded(g.detach(), spec), spec)


def from_dtensor(d: DTensor) -> ShardTensor:
    """See `ShardTensor.from_dtensor`."""
    private = [isinstance(p, Partial) and type(p) is not Partial for p in d.placements]
    if any(private):  # parts of a norm, or of a masked sum: only DTensor knows how they add up
        d = d.redistribute(placements=[Replicate() if x else p for x, p in zip(private, d.placements, strict=True)])
    layout = MeshLayout.of(d.device_mesh)
    cuts = cuts_of(layout, d.placements, d.ndim)
    sizes = default_sizes(layout, cuts, d.shape)
    local = d.to_local(
        grad_placements=[Replicate() if isinstance(c, str) else p for c, p in zip(cuts, d.placements, strict=True)]
    )
    if hasattr(local, "wait"):  # a collective of the DTensor that is still under way
        local = local.wait()
    if local.requires_grad and torch.is_grad_enabled() and not is_tracing():
        # Memory of its own: autograd sees that a gradient is shared with another operand, but not inside a DTensor.
        local.register_hook(Tensor.clone)
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
