"""Tensors that lie in a file: read straight from their bytes, whole or a slab, without mapping the file into memory.

A safetensors file and the storages of a torch zip file are both rows of plain numbers at a known place. Reading them by
``seek`` and ``readinto`` keeps a rank's memory at what it asked for; pages of a mapped file would count as its own.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dpzoo.weights.source import DamagedWeightsError, Slab, WeightsError

Bounds = list[tuple[int, int]]
# Slabs whose rows are short are cut out of larger reads of at most this many bytes.
SCRATCH_BYTES = 8 << 20


@dataclass(frozen=True)
class Region:
    """Where a tensor lies.

    Attributes:
        path: The file.
        start: Byte of its first element.
        shape, stride: In elements.
    """

    path: Path
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_row_major(self) -> bool:
        return all(n == 1 or s == r for n, s, r in zip(self.shape, self.stride, row_major(self.shape), strict=True))


class RegionSource:
    """Regions of one or more files, behind the protocol :class:`~dpzoo.weights.source.WeightSource`."""

    def __init__(self, regions: Mapping[str, Region], origin: str, config: Mapping[str, Any] | None = None) -> None:
        self._regions, self.origin, self.config = dict(regions), origin, config
        _check_inside(self._regions)

    def names(self) -> tuple[str, ...]:
        return tuple(self._regions)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._regions[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._regions[name].dtype

    def sliceable(self, name: str) -> bool:
        return self._regions[name].is_row_major

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        return read_region(self._regions[name], slab)


def read_region(region: Region, slab: Slab | None = None) -> Tensor:
    """A new tensor with the region's values, or with those of ``slab``.

    Raises:
        DamagedWeightsError: the file ends before the tensor does.
    """
    bounds = bounds_of(slab, region.shape)
    with open(region.path, "rb", buffering=0) as file:
        if region.is_row_major:
            out = torch.empty([b - a for a, b in bounds], dtype=region.dtype)
            _fill(file, region.start, bounds, region.shape, out)
            return out
        flat = torch.empty(region.span // region.dtype.itemsize, dtype=region.dtype)
        _read_into(file, region.start, flat)
    return flat.as_strided(region.shape, region.stride)[tuple(slice(a, b) for a, b in bounds)]


def bounds_of(slab: Slab | None, shape: Sequence[int]) -> Bounds:
    """(start, stop) per dim; dims that the slab does not name are whole.

    Raises:
        WeightsError: a slab of more dims, of another step than 1, or that is not inside the shape.
    """
    slab = () if slab is None else slab
    named = list(zip(slab, shape, strict=False))
    bounds = [(0 if s.start is None else s.start, n if s.stop is None else s.stop) for s, n in named]
    inside = all(0 <= a <= b <= n for (a, b), (_, n) in zip(bounds, named, strict=True))
    if len(slab) > len(shape) or not inside or any(s.step not in (None, 1) for s in slab):
        raise WeightsError(f"slab {slab} is no part of a tensor of shape {tuple(shape)}")
    return bounds + [(0, n) for n in shape[len(bounds) :]]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _fill(file: BinaryIO, at: int, bounds: Bounds, shape: Sequence[int], out: Tensor) -> None:
    """Read ``bounds`` of the contiguous tensor of ``shape`` that begins at byte ``at`` into ``out``."""
    if not out.numel():
        return
    if not shape:
        _read_into(file, at, out)
        return
    (first, last), rest = bounds[0], bounds[1:]
    row = math.prod(shape[1:]) * out.element_size()
    if all(b == (0, n) for b, n in zip(rest, shape[1:], strict=True)):
        _read_into(file, at + first * row, out)
    elif (last - first) * row <= SCRATCH_BYTES:
        scratch = torch.empty([last - first, *shape[1:]], dtype=out.dtype)
        _read_into(file, at + first * row, scratch)
        out.copy_(scratch[(slice(None), *(slice(a, b) for a, b in rest))])
    else:
        for i in range(first, last):
            _fill(file, at + i * row, rest, shape[1:], out[i - first])


def _read_into(file: BinaryIO, at: int, out: Tensor) -> None:
    """Fill the contiguous ``out`` from byte ``at`` on."""
    if not out.numel():
        return
    view: memoryview = out.view(-1).view(torch.uint8).numpy().data
    file.seek(at)
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])  # type: ignore[attr-defined]  # of every unbuffered file
        if not got:
            raise DamagedWeightsError(f"{file.name} ends at byte {at + done}, inside a tensor; was it cut off?")
        done += got


def _check_inside(regions: Mapping[str, Region]) -> None:
    if sys.byteorder != "little":
        raise WeightsError("weights are stored little-endian; this machine is big-endian")
    sizes = {path: path.stat().st_size for path in {r.path for r in regions.values()}}
    for name, region in regions.items():
        whole = min((region.start, *region.shape, *region.stride), default=0) >= 0
        if not whole or region.start + region.span > sizes[region.path]:
            raise DamagedWeightsError(
                f"{region.path}: {name} {region.shape} should end at byte {region.start + region.span}, but the file "
                f"has {sizes[region.path]}; was it cut off?"
            )
