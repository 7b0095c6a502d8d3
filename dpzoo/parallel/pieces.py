"""A parameter, gradient or state tensor as this rank holds it: its local tensor, and over whose ranks it is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dpzoo.shard import ShardTensor


class Piece(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        local: this rank's memory of the tensor itself; of a sum of parts, this rank's part.
        groups: names of the process groups whose ranks hold different parts of the dims. On all other ranks the tensor
            is the same.
        mesh: the device mesh, None for a plain tensor.
    """

    local: Tensor
    groups: tuple[str, ...]
    mesh: Any


def piece_of(tensor: Tensor) -> Piece:
    """The piece of a plain tensor, a DTensor or a ShardTensor. No communication."""
    if isinstance(tensor, ShardTensor):
        layout = tensor._spec.layout
        groups = tuple(g for g, cut in zip(layout.groups, tensor._spec.cuts, strict=True) if _cuts(cut))
        return Piece(tensor._local_tensor, groups, layout)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        cut = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
        return Piece(tensor._local_tensor, tuple(mesh.get_group(axis).group_name for axis in cut), mesh)
    return Piece(tensor, (), None)


def _cuts(cut: int | str) -> bool:
    return isinstance(cut, int) and cut >= 0


def dtensor_like(local: Tensor, p: DTensor) -> DTensor:
    """The DTensor in the layout of `p` whose shard on this rank is `local`."""
    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def is_partial(tensor: Tensor) -> bool:
    """Is the tensor a sum (or another reduction) of what the ranks hold?"""
    return isinstance(tensor, (DTensor, ShardTensor)) and any(p.is_partial() for p in tensor.placements)


def reduced(tensor: Tensor) -> Tensor:
    """The tensor with nothing left to add up: where it was a sum of parts, every rank gets the whole. Communicates."""
    if not is_partial(tensor):
        return tensor
    assert isinstance(tensor, (DTensor, ShardTensor))
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
