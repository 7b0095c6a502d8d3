"""Which part of a parameter a rank holds, and the memory it holds it in."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dpzoo.shard import ShardTensor
from dpzoo.weights import WeightsError


class Part(NamedTuple):
    """This rank's part of a sharded tensor: its memory, and (start, stop) of each dim of the whole."""

    local: Tensor
    bounds: tuple[tuple[int, int], ...]


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """The mesh that a tensor is laid out on, None for a plain one."""
    return tensor.device_mesh if isinstance(tensor, (ShardTensor, DTensor)) else None


def part_of(name: str, tensor: ShardTensor | DTensor) -> Part:
    """Where this rank's part of ``tensor`` lies.

    Raises:
        WeightsError: a partial sum, which no file can fill.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise WeightsError(f"{name} is a partial sum over its mesh; redistribute it before loading")
    local: Tensor = tensor._local_tensor
    if isinstance(tensor, ShardTensor):
        offsets = tensor._spec.offsets()
    else:
        shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        if tuple(shape) != tuple(local.shape):
            held = f"{tuple(local.shape)} of {tuple(tensor.shape)}"
            raise WeightsError(f"{name}: this rank holds {held}, where its placements say {tuple(shape)}")
    return Part(local.detach(), tuple((start, start + n) for start, n in zip(offsets, local.shape, strict=True)))
