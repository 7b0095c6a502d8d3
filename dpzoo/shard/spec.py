"""`ShardTensorSpec`: the whole layout of a tensor, always with every shard size of every rank.

Specs are interned and immutable: equal layouts are the same object, so that they compare and hash by identity
and plans can be cached on them. One tensor dim is cut by at most one mesh axis.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dpzoo.shard.errors import LayoutError
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, chunk_sizes, contiguous_stride, starts
from dpzoo.shard.tracing import numbers

REPLICATED = -1  # the cut of an axis: a tensor dim, REPLICATED, or the reduce op of a partial value ("sum", ...)
Cut = int | str

_POOL: weakref.WeakValueDictionary[tuple[Any, ...], ShardTensorSpec] = weakref.WeakValueDictionary()


class TensorMeta(NamedTuple):
    """Global shape, stride and dtype."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def cut_of(placement: Placement, ndim: int) -> Cut:
    """A placement as one number or word; raises `LayoutError` for a dim that does not exist."""
    if isinstance(placement, Shard):
        dim = placement.dim
        if type(placement) is not Shard:
            raise LayoutError(f"{placement} is not supported: use Shard(dim)")
        if not -ndim <= dim < ndim:
            raise LayoutError(f"{placement} asks for dim {dim}, but the tensor has {ndim} dims")
        return dim % ndim
    if isinstance(placement, Replicate):
        return REPLICATED
    if type(placement) is Partial:
        return placement.reduce_op
    raise LayoutError(f"unknown placement {placement!r}: use Shard(dim), Replicate() or Partial()")


def placement_of(cut: Cut) -> Placement:
    """The public placement of a cut."""
    if isinstance(cut, str):
        return Partial(cut)
    return Replicate() if cut == REPLICATED else Shard(cut)


class ShardTensorSpec:
    """Where every element of a global tensor lives.

    Attributes:
        layout: the interned mesh.
        cuts: per mesh axis the tensor dim it cuts, `REPLICATED`, or a reduce op.
        sizes: per mesh axis the shard length of each coordinate, or `()` when the axis cuts nothing.
        shape, stride, dtype: of the global tensor; the stride mirrors the memory order of the local shard.
        local_shape: shape of the shard on this rank.
        is_partial: some rank holds only a summand. is_replicated: every rank holds the whole tensor.
    """

    __slots__ = (
        "__weakref__",
        "_by_stride",
        "_dtypes",
        "cuts",
        "dtype",
        "is_contiguous",
        "is_partial",
        "is_replicated",
        "layout",
        "local_shape",
        "shape",
        "sizes",
        "stride",
    )

    layout: MeshLayout
    cuts: tuple[Cut, ...]
    sizes: tuple[Sizes, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    local_shape: torch.Size
    is_partial: bool
    is_replicated: bool
    is_contiguous: bool
    _dtypes: dict[torch.dtype, ShardTensorSpec]
    _by_stride: dict[tuple[int, ...], ShardTensorSpec]

    @staticmethod
    def make(
        layout: MeshLayout,
        cuts: Sequence[Cut],
        sizes: Sequence[Sizes],
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> ShardTensorSpec:
        """The interned spec; raises `LayoutError` when cuts, sizes and shape do not fit together."""
        shape = tuple(shape)
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        key = (layout, tuple(cuts), tuple(sizes), shape, dtype, stride)
        try:
            found = _POOL.get(key)
        except TypeError:  # sizes that a graph leaves open: symbols do not hash, and a plan needs integers
            cuts, sizes, shape, stride = numbers((key[1], key[2], shape, stride))
            return ShardTensorSpec.make(layout, cuts, sizes, shape, dtype, stride)
        if found is None:
            _check(layout, key[1], key[2], shape, dtype)
            found = ShardTensorSpec.__new__(ShardTensorSpec)
            found.layout, found.cuts, found.sizes = layout, key[1], key[2]
            found.shape, found.stride, found.dtype = torch.Size(shape), stride, dtype
            local = list(shape)
            for axis, cut in enumerate(found.cuts):
                if isinstance(cut, int) and cut >= 0:
                    local[cut] = found.sizes[axis][layout.coords[axis]]
            found.local_shape = torch.Size(local)
            found.is_replicated = all(cut == REPLICATED for cut in found.cuts)
            found.is_partial = any(isinstance(c, str) for c in found.cuts)
            found.is_contiguous = stride == contiguous_stride(shape)
            found._dtypes, found._by_stride = {}, {}
            _POOL[key] = found
        return found

    # ------------------------------------------------------------------ variations
    def like(
        self,
        *,
        cuts: Sequence[Cut] | None = None,
        sizes: Sequence[Sizes] | None = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> ShardTensorSpec:
        """The same spec with some parts replaced; a new shape without a stride gets a contiguous one."""
        if stride is None and shape is None:
            stride = self.stride
        return ShardTensorSpec.make(
            self.layout,
            self.cuts if cuts is None else cuts,
            self.sizes if sizes is None else sizes,
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            stride,
        )

    def of_dtype(self, dtype: torch.dtype) -> ShardTensorSpec:
        """The same layout for another dtype."""
        if dtype is self.dtype:
            return self
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = self.like(dtype=dtype)
        return found

    def replicated(self) -> ShardTensorSpec:
        """The spec of the whole tensor on every rank."""
        n = len(self.cuts)
        return self.like(cuts=(REPLICATED,) * n, sizes=((),) * n)

    def for_local(self, local: torch.Tensor) -> ShardTensorSpec:
        """This layout with the memory order and dtype of `local`."""
        if local.dtype is not self.dtype:
            return self.of_dtype(local.dtype).for_local(local)
        if self.is_contiguous and local.is_contiguous():
            return self
        found = self._by_stride.get(local.stride())
        if found is None:
            if len(self._by_stride) > 64:
                self._by_stride.clear()
            fits = same_order(self.stride, local)  # a shard without rows fits any order: it follows the others
            found = self if fits else self.like(stride=stride_like(self.shape, local))
            self._by_stride[local.stride()] = found
        return found

    def in_memory_format(self, memory_format: torch.memory_format) -> ShardTensorSpec:
        """This layout with the strides of an explicit memory format."""
        return self.like(stride=torch.empty(self.shape, device="meta", memory_format=memory_format).stride())

    # ------------------------------------------------------------------ questions
    def axis_of(self, dim: int) -> int | None:
        """The mesh axis that cuts `dim`, or None."""
        for axis, cut in enumerate(self.cuts):
            if cut == dim and isinstance(cut, int):
                return axis
        return None

    @property
    def cut_dims(self) -> dict[int, int]:
        """Tensor dim -> mesh axis, for the dims that are cut."""
        return {cut: axis for axis, cut in enumerate(self.cuts) if isinstance(cut, int) and cut >= 0}

    def local_start(self, axis: int) -> int:
        """First global index of this rank's shard along the dim that `axis` cuts."""
        return starts(self.sizes[axis])[self.layout.coords[axis]]

    # ------------------------------------------------------------------ public names
    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.layout.device_mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.layout.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return tuple(placement_of(cut) for cut in self.cuts)

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def tensor_meta(self) -> TensorMeta:
        """Global shape, stride and dtype."""
        return TensorMeta(self.shape, self.stride, self.dtype)

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Full local shape of every rank along a mesh axis, the other axes at this rank's coordinate.

        Returns `{mesh_dim: (shape, ...)}` for the axes that cut a dim, or the one tuple when `mesh_dim` is given.
        """
        found = {axis: self._shapes_along(axis) for axis in self.layout.axes if self.sizes[axis]}
        return found if mesh_dim is None else found[mesh_dim % len(self.cuts)]

    def _shapes_along(self, axis: int) -> tuple[torch.Size, ...]:
        dim = self.cuts[axis]
        assert isinstance(dim, int)
        return tuple(torch.Size([*self.local_shape[:dim], n, *self.local_shape[dim + 1 :]]) for n in self.sizes[axis])

    def offsets(self, mesh_dim: int | None = None) -> tuple[int, ...]:
        """Global index of this rank's first element per tensor dim; with `mesh_dim`, of every rank along that axis."""
        if mesh_dim is not None:
            return starts(self.sizes[mesh_dim])[:-1] if self.sizes[mesh_dim] else (0,) * self.layout.shape[mesh_dim]
        out = [0] * self.ndim
        for dim, axis in self.cut_dims.items():
            out[dim] = self.local_start(axis)
        return tuple(out)

    def describe(self) -> str:
        """Short text for errors: `f32(2, 17, 6) cut [dim 1 over 'domain': 12+4]`."""
        names = self.layout.names or tuple(str(a) for a in self.layout.axes)
        parts = []
        for axis, cut in enumerate(self.cuts):
            if isinstance(cut, str):
                parts.append(f"partial {cut} over '{names[axis]}'")
            elif cut >= 0:
                parts.append(f"dim {cut} over '{names[axis]}': {'+'.join(map(str, self.sizes[axis]))}")
        return f"{str(self.dtype).removeprefix('torch.')}{tuple(self.shape)} " + (
            "cut [" + "; ".join(parts) + "]" if parts else "replicated"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensorSpec:
        return self

    def __copy__(self) -> ShardTensorSpec:
        return self

    def __reduce__(self) -> Any:
        mesh, me = self.layout.device_mesh, dist.get_rank()
        return (_rebuild_spec, (mesh, me, self.cuts, self.sizes, tuple(self.shape), self.dtype, self.stride))

    def __repr__(self) -> str:
        return f"ShardTensorSpec({self.describe()}, {self.layout})"


def _rebuild_spec(mesh: DeviceMesh, rank: int, *parts: Any) -> ShardTensorSpec:
    if rank != dist.get_rank():
        raise LayoutError(
            f"this is the shard of rank {rank}, loaded on rank {dist.get_rank()}: each rank loads its own"
        )
    return ShardTensorSpec.make(MeshLayout.of(mesh), *parts)


torch.serialization.add_safe_globals([ShardTensorSpec, _rebuild_spec, DeviceMesh])


def _check_reduction(op: str, dtype: torch.dtype) -> None:
    known = ("sum", "avg", "max", "min", "product")
    if op not in known:
        raise LayoutError(f"Partial({op!r}) is not supported: use one of {', '.join(known)}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(f"Partial('avg') of {dtype}: an average of integers is not an integer; use Partial('sum')")
    if dtype.is_complex and op not in ("sum", "avg"):
        raise LayoutError(f"Partial({op!r}) of {dtype}: complex values can only be summed or averaged")


def _check(
    layout: MeshLayout, cuts: tuple[Cut, ...], sizes: tuple[Sizes, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise `LayoutError` unless the parts of a spec fit together."""
    if len(cuts) != len(layout.shape) or len(sizes) != len(cuts):
        raise LayoutError(f"{layout} has {len(layout.shape)} axes, but {len(cuts)} placements were given")
    seen: dict[int, int] = {}
    for axis, cut in enumerate(cuts):
        if isinstance(cut, str):
            _check_reduction(cut, dtype)
        if isinstance(cut, str) or cut == REPLICATED:
            continue
        if not 0 <= cut < len(shape):
            raise LayoutError(f"Shard({cut}) on a tensor of shape {shape}: there is no dim {cut}")
        if cut in seen:
            raise LayoutError(
                f"mesh axes {seen[cut]} and {axis} both cut dim {cut} of shape {shape}; one tensor dim may be cut by "
                "one mesh axis: use different dims, or one axis of both sizes multiplied"
            )
        seen[cut] = axis
        if len(sizes[axis]) != layout.shape[axis] or any(n < 0 for n in sizes[axis]):
            raise LayoutError(f"axis {axis} of {layout} needs {layout.shape[axis]} shard sizes >= 0, got {sizes[axis]}")
        if sum(sizes[axis]) != shape[cut]:
            raise LayoutError(
                f"shard sizes {sizes[axis]} of dim {cut} sum to {sum(sizes[axis])}, but the global shape is {shape}"
            )


def stride_like(shape: Sequence[int], local: torch.Tensor) -> tuple[int, ...]:
    """Global strides with the memory order of `local`; expanded (stride 0) dims stay so, gaps are closed."""
    if local.stride() == contiguous_stride(local.shape):
        return contiguous_stride(shape)
    strides = local.stride()
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    out, step = [0] * len(shape), 1
    for d in reversed(order):
        if strides[d] == 0 and local.shape[d] > 1:
            continue
        out[d] = step
        step *= max(shape[d], 1)
    return tuple(out)


def same_order(stride: Sequence[int], local: torch.Tensor) -> bool:
    """Do the dims of `local` lie in memory in the order of `stride`? Dims of one element, or none, say nothing."""
    if local.numel() == 0:
        return True
    told = [d for d, n in enumerate(local.shape) if n > 1]
    if any((stride[d] == 0) != (local.stride(d) == 0) for d in told):
        return False
    found = [local.stride(d) for d in sorted(told, key=lambda d: (-stride[d], d))]
    return found == sorted(found, reverse=True)


def default_sizes(layout: MeshLayout, cuts: Sequence[Cut], shape: Sequence[int]) -> tuple[Sizes, ...]:
    """`torch.chunk` sizes for every cut axis."""
    return tuple(
        chunk_sizes(shape[cut], layout.shape[axis]) if isinstance(cut, int) and cut >= 0 else ()
        for axis, cut in enumerate(cuts)
    )
