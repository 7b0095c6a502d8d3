"""Put a sharded result together from what each rank holds, without the library's own gathering, so as to test it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import Partial, Replicate, Shard, ShardTensor
from dpzoo.testing.cutting import Cut
from dpzoo.testing.gathering import Coordinate


class ParityError(AssertionError):
    """A sharded run and its reference on one device differ; the message names the first thing that does."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor: its data (on the CPU) and, when sharded, what its spec claims."""

    local: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...] | None = None
    sizes: tuple[tuple[int, ...] | None, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor) -> Piece:
        """The piece of a plain tensor or a ShardTensor."""
        if not isinstance(tensor, ShardTensor):
            return cls(tensor.detach().cpu(), tuple(tensor.shape), tensor.dtype)
        placements = tuple(tensor.placements)
        shapes = tensor._spec.sharding_shapes()
        sizes = tuple(
            tuple(int(shape[placement.dim]) for shape in shapes[axis]) if isinstance(placement, Shard) else None
            for axis, placement in enumerate(placements)
        )
        local = tensor._local_tensor.detach().cpu()
        return cls(local, tuple(tensor.shape), tensor.dtype, placements, sizes)

    @property
    def is_partial(self) -> bool:
        """Whether the ranks' data still has to be reduced."""
        return any(isinstance(placement, Partial) for placement in self.placements or ())

    @property
    def cut(self) -> Cut | None:
        """How the piece says its tensor is cut; None for a plain tensor."""
        if self.placements is None:
            return None
        dims = tuple(placement.dim if isinstance(placement, Shard) else None for placement in self.placements)
        return Cut(dims, self.sizes)


def assemble(name: str, pieces: dict[Coordinate, Piece], mesh_shape: Sequence[int]) -> Tensor:
    """The global tensor that the pieces make; raises `ParityError` when they contradict their specs or each other."""
    first = next(iter(pieces.values()))
    for coordinate, piece in pieces.items():
        _check_piece(name, coordinate, piece, first)
    data = {coordinate: piece.local for coordinate, piece in pieces.items()}
    placements = first.placements if first.placements is not None else (Replicate(),) * len(mesh_shape)
    for axis in reversed(range(len(mesh_shape))):
        prefixes = itertools.product(*(range(size) for size in mesh_shape[:axis]))
        data = {
            prefix: _combine(
                f"{name}, mesh axis {axis}",
                [data[(*prefix, rank)] for rank in range(mesh_shape[axis])],
                placements[axis],
            )
            for prefix in prefixes
        }
    return data[()]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal in shape, dtype and every value, NaN being equal to NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def _check_piece(name: str, coordinate: Coordinate, piece: Piece, first: Piece) -> None:
    claims = (piece.shape, piece.dtype, piece.placements, piece.sizes)
    if claims != (first.shape, first.dtype, first.placements, first.sizes):
        raise ParityError(
            f"{name}: the ranks disagree about the layout: the first rank has {_describe(first)}, "
            f"the rank at mesh coordinate {coordinate} has {_describe(piece)}"
        )
    expected = list(piece.shape)
    for axis, placement in enumerate(piece.placements or ()):
        sizes = piece.sizes[axis]
        if isinstance(placement, Shard) and sizes is not None:
            expected[placement.dim] = sizes[coordinate[axis]]
            if sum(sizes) != piece.shape[placement.dim]:
                raise ParityError(f"{name}: sizes {sizes} do not sum to dim {placement.dim} of shape {piece.shape}")
    if tuple(piece.local.shape) != tuple(expected):
        raise ParityError(
            f"{name}: the spec says that the rank at mesh coordinate {coordinate} holds {tuple(expected)}, "
            f"its data has shape {tuple(piece.local.shape)}; {_describe(piece)}"
        )
    if piece.local.dtype != piece.dtype:
        raise ParityError(f"{name}: the spec says {piece.dtype}, the data at {coordinate} is {piece.local.dtype}")


def _combine(name: str, parts: list[Tensor], placement: Any) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim)
    if isinstance(placement, Partial):
        reduce: dict[str, Callable[..., Tensor]] = {
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
            "product": torch.prod,
        }
        stacked = torch.stack(parts)
        return stacked.mean(0) if placement.reduce_op == "avg" else reduce[placement.reduce_op](stacked, 0)
    for rank, part in enumerate(parts):
        if not same_bits(part, parts[0]):
            raise ParityError(
                f"{name}: every rank should hold the same bits, but those of rank 0 and rank {rank} differ"
            )
    return parts[0]


def _describe(piece: Piece) -> str:
    layout = "plain" if piece.placements is None else f"{piece.placements} sizes {piece.sizes}"
    return f"shape {piece.shape}, {piece.dtype}, {layout}"
