"""The libraries that the cases can be run on.  An adapter is everything the runner knows about one.

The runner reads shards itself: ``describe`` gives what one rank holds, and ``judge`` assembles it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor: ``kind`` is "shard", "replicate", "partial:<op>" or "plain"."""

    local: torch.Tensor
    kind: str
    dim: int
    shape: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...] | None
    dtype: torch.dtype
    local_dtype: torch.dtype


class Target:
    """One library on a one-dimensional mesh."""

    name = ""
    layouts: tuple[str, ...] = ("even", "uneven", "empty")

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank = mesh.get_local_rank()

    def shard(self, full: torch.Tensor, dim: int, sizes: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
        """A leaf whose rank r holds ``sizes[r]`` rows of ``dim``."""
        raise NotImplementedError

    def plain(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        """A leaf that every rank holds whole, as users of the library would pass it."""
        return full.detach().clone().requires_grad_(requires_grad)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """A module whose parameters every rank holds whole."""
        return module

    def like(self, full: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
        """``full`` in the layout of ``model``, an output of the library: a cotangent."""
        raise NotImplementedError

    def describe(self, tensor: torch.Tensor) -> Piece:
        """What this rank holds of ``tensor``."""
        raise NotImplementedError

    def refuses(self, error: BaseException) -> bool:
        """Whether the library says that it does not do this, as opposed to breaking."""
        raise NotImplementedError

    def gathered(self, caught: list[warnings.WarningMessage]) -> str:
        """The warning that says that the library gathered a tensor, "" if there is none."""
        return ""

    def before_case(self) -> None:
        """Forget what was warned about, so that each case warns for itself."""


class DpzooTarget(Target):
    """The library of this repository."""

    name = "dpzoo"

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        import dpzoo.shard as library

        self.library: Any = library
        self._forget: Callable[[], None] = library.reset_warnings

    def shard(self, full: torch.Tensor, dim: int, sizes: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
        return self._from_sizes(full, dim, sizes).detach().requires_grad_(requires_grad)

    def _from_sizes(self, full: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
        local = _rows(full, dim, sizes, self.rank)
        shapes = tuple((*full.shape[:dim], size, *full.shape[dim + 1 :]) for size in sizes)
        placements = [self.library.Shard(dim)]
        return self.library.ShardTensor.from_local(local, self.mesh, placements, sharding_shapes={0: shapes})

    def like(self, full: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
        if not isinstance(model, self.library.ShardTensor):
            return full
        placement = model._spec.placements[0]
        if placement.is_shard():
            shapes = model._spec.sharding_shapes()[0]
            return self._from_sizes(full, placement.dim, tuple(shape[placement.dim] for shape in shapes))
        return self.library.ShardTensor.from_local(full.clone(), self.mesh, [self.library.Replicate()])

    def describe(self, tensor: torch.Tensor) -> Piece:
        if not isinstance(tensor, self.library.ShardTensor):
            return _plain_piece(tensor)
        placement = tensor._spec.placements[0]
        shapes = tensor._spec.sharding_shapes().get(0) if placement.is_shard() else None
        return _piece(tensor, placement, None if shapes is None else tuple(tuple(shape) for shape in shapes))

    def refuses(self, error: BaseException) -> bool:
        return isinstance(error, self.library.ShardError)

    def gathered(self, caught: list[warnings.WarningMessage]) -> str:
        found = (str(w.message) for w in caught if issubclass(w.category, self.library.GatherWarning))
        return next(found, "")

    def before_case(self) -> None:
        self._forget()


class DTensorTarget(Target):
    """torch's DTensor; it knows ``torch.chunk`` sizes only and does not mix with plain tensors."""

    name = "dtensor"
    layouts = ("even",)

    def shard(self, full: torch.Tensor, dim: int, sizes: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
        from torch.distributed.tensor import Shard

        return self._make(full, Shard(dim)).requires_grad_(requires_grad)

    def _make(self, full: torch.Tensor, placement: Any) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        local = full.detach().clone()
        if placement.is_shard():
            chunk = -(-full.shape[placement.dim] // self.mesh.size())
            first = min(self.rank * chunk, full.shape[placement.dim])
            last = min(first + chunk, full.shape[placement.dim])
            local = full.detach().narrow(placement.dim, first, last - first).clone()
        return DTensor.from_local(local, self.mesh, [placement], shape=full.shape, stride=full.stride()).detach()

    def plain(self, full: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        from torch.distributed.tensor import Replicate

        return self._make(full, Replicate()).requires_grad_(requires_grad)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        from torch.distributed.tensor import distribute_module

        return distribute_module(module, self.mesh)

    def like(self, full: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(model, DTensor):
            return full
        placement = model.placements[0]
        return self._make(full, Replicate() if placement.is_partial() else placement)

    def describe(self, tensor: torch.Tensor) -> Piece:
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(tensor, DTensor):
            return _plain_piece(tensor)
        if tensor.placements[0].is_partial():  # what a partial means is the library's own (norms are not sums)
            tensor = tensor.redistribute(placements=[Replicate()])
        return _piece(tensor, tensor.placements[0], None)

    def refuses(self, error: BaseException) -> bool:
        text = str(error)
        spoken = ("sharding strategy", "mixed torch.Tensor and DTensor", "sharding rule", "not supported")
        return isinstance(error, NotImplementedError) or any(words in text for words in spoken)


TARGETS: dict[str, type[Target]] = {target.name: target for target in (DpzooTarget, DTensorTarget)}


def _rows(full: torch.Tensor, dim: int, sizes: tuple[int, ...], rank: int) -> torch.Tensor:
    return full.detach().narrow(dim, sum(sizes[:rank]), sizes[rank]).clone()


def _plain_piece(tensor: torch.Tensor) -> Piece:
    return Piece(readable(tensor.detach()), "plain", -1, tuple(tensor.shape), None, tensor.dtype, tensor.dtype)


_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a form that pickles and compares: no lazy conjugate or negative bit, no rare type."""
    if tensor.dtype == torch.complex32:
        return tensor.to(torch.complex64)
    if tensor.dtype in _SAME_BITS:
        return tensor.view(_SAME_BITS[tensor.dtype])
    if tensor.is_floating_point() and tensor.itemsize == 1:
        return tensor.float()
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() or tensor.is_neg() else tensor


def _piece(tensor: Any, placement: Any, local_shapes: tuple[tuple[int, ...], ...] | None) -> Piece:
    kind, dim = "replicate", -1
    if placement.is_shard():
        kind, dim = "shard", placement.dim
    elif placement.is_partial():
        kind = f"partial:{placement.reduce_op}"
    local = tensor._local_tensor.detach()
    if hasattr(local, "wait"):
        local = local.wait()
    return Piece(readable(local), kind, dim, tuple(tensor.shape), local_shapes, tensor.dtype, local.dtype)
