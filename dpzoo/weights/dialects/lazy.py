"""Tensors that are not read yet, and what can be made of them without reading.

Renaming, cutting and joining pass a slab on to what is stored, so that a rank reads only what it keeps; the rest is
computed from whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpzoo.weights.source import Slab, WeightsMismatchError, WeightSource


class Lazy(Protocol):
    """A tensor whose shape is known before it is read; ``sliceable`` as in :class:`~dpzoo.weights.WeightSource`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sliceable(self) -> bool: ...

    def read(self, slab: Slab | None = None) -> Tensor:
        """The tensor, or the slab of it: a slice of step 1 for each leading dim."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor of a source, under its name there."""

    source: WeightSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.source.shape(self.name))

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype(self.name)

    @property
    def sliceable(self) -> bool:
        return self.source.sliceable(self.name)

    def read(self, slab: Slab | None = None) -> Tensor:
        return self.source.read(self.name, slab)


@dataclass(frozen=True)
class _Rearranged:
    """Entries of one other tensor."""

    tensor: Lazy

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def sliceable(self) -> bool:
        return self.tensor.sliceable


@dataclass(frozen=True)
class Permuted(_Rearranged):
    """``tensor.permute(dims)``."""

    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[d] for d in self.dims)

    def read(self, slab: Slab | None = None) -> Tensor:
        if slab is None:
            return self.tensor.read().permute(self.dims)
        wanted = dict(zip(self.dims, bounds(self, slab), strict=True))
        return self.tensor.read(tuple(slice(*wanted[d]) for d in range(len(self.dims)))).permute(self.dims)


@dataclass(frozen=True)
class Part(_Rearranged):
    """``tensor.narrow(dim, start, size)``."""

    dim: int
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def read(self, slab: Slab | None = None) -> Tensor:
        wanted = bounds(self, slab or ())
        low, high = wanted[self.dim]
        wanted[self.dim] = (self.start + low, self.start + high)
        return self.tensor.read(tuple(slice(*pair) for pair in wanted))


@dataclass(frozen=True)
class Joined:
    """``torch.cat(parts, dim)``."""

    parts: tuple[Lazy, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(p.shape[self.dim] for p in self.parts), *first[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.parts[0].dtype
        for part in self.parts[1:]:
            dtype = torch.promote_types(dtype, part.dtype)
        return dtype

    @property
    def sliceable(self) -> bool:
        return all(part.sliceable for part in self.parts)

    def read(self, slab: Slab | None = None) -> Tensor:
        wanted = bounds(self, slab or ())
        low, high = wanted[self.dim]
        found: list[Tensor] = []
        start = 0
        for part in self.parts:
            size = part.shape[self.dim]
            piece = (min(max(low - start, 0), size), min(max(high - start, 0), size))
            if piece[0] < piece[1] or (not found and start + size == self.shape[self.dim]):
                found.append(part.read(tuple(slice(*pair) for pair in _replaced(wanted, self.dim, piece))))
            start += size
        return torch.cat(found, dim=self.dim).to(self.dtype)


@dataclass(frozen=True)
class Constant:
    """One value everywhere: for what another library does not have, because it changes nothing."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float = 0.0
    sliceable: bool = True

    def read(self, slab: Slab | None = None) -> Tensor:
        sizes = [high - low for low, high in bounds(self, slab or ())]
        return torch.full(sizes, self.value, dtype=self.dtype)


@dataclass(frozen=True)
class Same:
    """One of several copies, after reading has shown that they are equal."""

    copies: tuple[Lazy, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.copies[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.copies[0].dtype

    @property
    def sliceable(self) -> bool:
        return len(self.copies) == 1 and self.copies[0].sliceable

    def read(self, slab: Slab | None = None) -> Tensor:
        if len(self.copies) == 1:
            return self.copies[0].read(slab)
        first = self.copies[0].read()
        for i, other in enumerate(self.copies[1:], start=1):
            if not torch.equal(first, other.read()):
                names = (getattr(copy, "name", f"copy {at}") for at, copy in ((0, self.copies[0]), (i, other)))
                raise WeightsMismatchError(f"{' and '.join(names)} should hold the same values, but differ")
        return cut(first, slab)


@dataclass(frozen=True)
class Computed:
    """``function(*inputs)``, read as a whole."""

    shape: tuple[int, ...]
    inputs: tuple[Lazy, ...]
    function: Callable[..., Tensor]
    sliceable: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    def read(self, slab: Slab | None = None) -> Tensor:
        return cut(self.function(*(t.read() for t in self.inputs)).to(self.dtype), slab)


def summed(*tensors: Lazy) -> Lazy:
    """The sum of tensors that broadcast to the first one's shape; zeros are left out."""
    rest = tuple(t for t in tensors[1:] if not (isinstance(t, Constant) and t.value == 0))
    if not rest:
        return tensors[0]
    return Computed(tensors[0].shape, (tensors[0], *rest), lambda first, *more: sum(more, first))


def split(tensor: Lazy, count: int, dim: int = 0) -> tuple[Lazy, ...]:
    """``count`` equal parts along a dim.

    Raises:
        WeightsMismatchError: the dim is not a multiple of it.
    """
    size, rest = divmod(tensor.shape[dim], count)
    if rest:
        raise WeightsMismatchError(f"a tensor of shape {tensor.shape} is not {count} equal parts along dim {dim}")
    return tuple(Part(tensor, dim, i * size, size) for i in range(count))


def is_all_zero(tensor: Lazy) -> bool:
    """Read it, and tell whether every entry is zero."""
    return math.prod(tensor.shape) == 0 or not bool(tensor.read().any())


def bounds(tensor: Lazy, slab: Sequence[slice]) -> list[tuple[int, int]]:
    """(start, stop) of a slab for every dim of the tensor."""
    wanted = [slice(None)] * len(tensor.shape)
    wanted[: len(slab)] = slab
    ends = [s.indices(n)[:2] for s, n in zip(wanted, tensor.shape, strict=True)]
    return [(low, max(low, high)) for low, high in ends]


def cut(tensor: Tensor, slab: Slab | None) -> Tensor:
    """A slab of a tensor that is there."""
    return tensor if slab is None else tensor[slab]


def _replaced(pairs: list[tuple[int, int]], at: int, pair: tuple[int, int]) -> list[tuple[int, int]]:
    return [*pairs[:at], pair, *pairs[at + 1 :]]
