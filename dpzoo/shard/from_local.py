"""Shards that are there already, made into one tensor: `ShardTensor.from_local`.

What each rank passed is its claim. Ranks that ask the others for their sizes exchange the claims; ranks that know the
sizes agree by one number each that theirs are the same and fit, and exchange the claims only to say what is wrong.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import from_shard, grad_spec
from dpzoo.shard.construct import coordinates, cuts_of
from dpzoo.shard.errors import LayoutError, ShardError, UndeterminedShardingError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, default_sizes, stride_like
from dpzoo.shard.synchronize import same_values
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing

ShapesArg = str | dict[int, Sequence[Sequence[int]]]


class _Claim(NamedTuple):
    """What one rank passed, and what is wrong with it as far as that rank can tell alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool
    asked: str
    error: str | None = None


def from_local(
    local: Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    sharding_shapes: ShapesArg,
    global_shape: Sequence[int] | None,
    run_check: bool | str | None,
) -> ShardTensor:
    """See `ShardTensor.from_local`."""
    if mesh is None:
        raise LayoutError("from_local needs a device_mesh: see torch.distributed.device_mesh.init_device_mesh")
    layout = MeshLayout.of(mesh)
    if run_check is None:
        run_check = not (_inside.handler or is_tracing())
    claim = _claim_of(local, placements, sharding_shapes, global_shape)
    if sharding_shapes == "infer" or (sharding_shapes == "chunk" and global_shape is None):
        spec = _spec_of_claims(layout, local, placements, sharding_shapes, global_shape, claim)
    else:
        spec = _spec_of_arguments(layout, local, placements, sharding_shapes, global_shape, claim, bool(run_check))
    if run_check == "values":
        _check_replicas(local, spec)
    return from_shard(local, spec)


def _claim_of(local: Any, placements: Any, shapes: ShapesArg, global_shape: Sequence[int] | None) -> _Claim:
    asked = repr((placements, global_shape and tuple(global_shape), shapes))
    if not isinstance(local, Tensor) or isinstance(local, (ShardTensor, DTensor)):
        return _Claim((), None, False, asked, f"from_local takes a plain tensor, got {type(local).__name__}")
    return _Claim(tuple(local.shape), local.dtype, local.requires_grad and torch.is_grad_enabled(), asked)


# ---------------------------------------------------------------------- sizes that the ranks tell each other
def _spec_of_claims(
    layout: MeshLayout,
    local: Tensor,
    placements: Sequence[Placement] | None,
    asked: ShapesArg,
    global_shape: Sequence[int] | None,
    mine: _Claim,
) -> ShardTensorSpec:
    claims = comm.gather_over_mesh(mine, layout)
    _check_claims(layout, claims)
    cuts = cuts_of(layout, placements, local.ndim)
    _check_shapes(layout, claims, {cut for cut in cuts if isinstance(cut, int) and cut >= 0})
    sizes = tuple(
        _sizes_along(layout, claims, axis, cut) if isinstance(cut, int) and cut >= 0 else ()
        for axis, cut in enumerate(cuts)
    )
    chunks = default_sizes(layout, cuts, _global_shape(local.shape, cuts, sizes))
    if asked == "chunk" and sizes != chunks:
        raise UndeterminedShardingError(
            f"sharding_shapes='chunk': the ranks of {layout} hold {sizes}, but torch.chunk would give {chunks}; pass "
            "'infer' or the shapes"
        )
    return _make_spec(layout, local, cuts, sizes, global_shape, mine)


def _make_spec(
    layout: MeshLayout,
    local: Tensor,
    cuts: tuple[Cut, ...],
    sizes: tuple[Sizes, ...],
    global_shape: Sequence[int] | None,
    mine: _Claim,
) -> ShardTensorSpec:
    shape = _global_shape(local.shape, cuts, sizes)
    if global_shape is not None and tuple(global_shape) != shape:
        raise LayoutError(f"global_shape {tuple(global_shape)} was given, but the shards make up {shape}")
    spec = ShardTensorSpec.make(layout, cuts, sizes, shape, local.dtype, stride_like(shape, local))
    if mine.requires_grad:
        grad_spec(spec)  # a partial value that has no gradient is refused here, not in backward
    return spec


# ---------------------------------------------------------------------- sizes that every rank was told
def _spec_of_arguments(
    layout: MeshLayout,
    local: Tensor,
    placements: Sequence[Placement] | None,
    asked: ShapesArg,
    global_shape: Sequence[int] | None,
    mine: _Claim,
    agree: bool,
) -> ShardTensorSpec:
    spec, error = None, None
    try:
        if mine.error:
            raise LayoutError(mine.error)
        cuts = cuts_of(layout, placements, local.ndim)
        spec = _make_spec(layout, local, cuts, _sizes_for(layout, cuts, asked, global_shape), global_shape, mine)
        _check_local(spec, layout.coords, mine.shape)
    except (ShardError, ValueError, TypeError) as found:
        error = found
    if agree and not _all_alike(layout, spec, error, mine):
        everyone = comm.gather_over_mesh(mine._replace(error=str(error) if error else None), layout)
        if error is None or any(claim.error is None for claim in everyone):
            _check_claims(layout, everyone)
    if error is not None:
        raise error
    assert spec is not None
    return spec


def _all_alike(layout: MeshLayout, spec: ShardTensorSpec | None, error: Exception | None, mine: _Claim) -> bool:
    """One small reduction per mesh axis: did every rank come to the same layout without an error?"""
    if all(n == 1 for n in layout.shape):
        return True
    text = repr((spec and (spec.cuts, spec.sizes, tuple(spec.shape)), mine.dtype, mine.requires_grad))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    flags = torch.tensor([digest, -digest, int(error is None)], device=comm.device_of(layout.device_type))
    for group in layout.groups:
        flags = comm.all_reduce(flags, group, "min")
    low, high, fine = flags.tolist()
    return low == -high and fine == 1


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


def _sizes_for(
    layout: MeshLayout, cuts: tuple[Cut, ...], asked: ShapesArg, global_shape: Sequence[int] | None
) -> tuple[Sizes, ...]:
    """The shard sizes of each axis, as they were given or as `torch.chunk` makes them."""
    if isinstance(asked, dict):
        return _sizes_of_shapes(layout, cuts, asked)
    if asked != "chunk" or global_shape is None:
        raise UndeterminedShardingError(f"sharding_shapes takes 'infer', 'chunk' or a dict, got {asked!r}")
    return default_sizes(layout, cuts, global_shape)


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


# ---------------------------------------------------------------------- what is wrong, on every rank alike
def _check_claims(layout: MeshLayout, claims: list[_Claim]) -> None:
    """Fails on all ranks when one of them passed other arguments than the rest, or something that does not fit."""
    for what, values in (
        ("placements, global_shape and sharding_shapes", [c.asked for c in claims]),
        ("tensors of different dtype or number of dims", [(c.dtype, len(c.shape)) for c in claims]),
        ("tensors of which only some need a gradient", [c.requires_grad for c in claims]),
    ):
        if any(v != values[0] for v in values):
            found = "; ".join(f"rank {r}: {v}" for r, v in zip(layout.ranks, values, strict=True))
            raise UndeterminedShardingError(f"from_local: the ranks of {layout} disagree, they passed {what}: {found}")
    wrong = [f"rank {r}: {c.error}" for r, c in zip(layout.ranks, claims, strict=True) if c.error is not None]
    if wrong:
        raise LayoutError(f"from_local: {'; '.join(wrong)}")


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
            f"from_local: {spec.describe()} should be the same along the replicated axes, but ranks {others} passed "
            "other values"
        )


# ---------------------------------------------------------------------- inside handlers
class _Inside(threading.local):
    handler = False


_inside = _Inside()


def unchecked(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A user's handler; inside it `from_local` does not check by default, since layouts there are those of operands."""

    @wraps(handler)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, _inside.handler = _inside.handler, True
        try:
            return handler(*args, **kwargs)
        finally:
            _inside.handler = before

    return call
