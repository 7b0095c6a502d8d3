"""Bring what every rank of a mesh found to all of them: one message a rank, in which tensors travel as their bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Coordinate = tuple[int, ...]


def gather_over_mesh(value: object, mesh: DeviceMesh) -> dict[Coordinate, Any]:
    """{coordinate: value} of all ranks of the mesh, on each of them. Values are pickled; tensors arrive contiguous."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"this rank is not in {mesh}"
    found: dict[Coordinate, bytes] = {tuple(coordinate): _dumps(value)}
    for axis in range(mesh.ndim):
        everyone = _gather_bytes(pickle.dumps(found), mesh, axis)
        found = {key: kept for part in everyone for key, kept in pickle.loads(part).items()}
    return {key: pickle.loads(data) for key, data in sorted(found.items())}


def _gather_bytes(mine: bytes, mesh: DeviceMesh, axis: int) -> list[bytes]:
    """The bytes of every rank along one mesh axis, in rank order."""
    group = mesh.get_group(axis)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [mine]
    length = torch.tensor(len(mine), device=mesh.device_type)
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    padded = padded.to(mesh.device_type)
    everyone = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everyone, padded, group=group)
    return [row[: int(n)].cpu().numpy().tobytes() for row, n in zip(everyone, lengths, strict=True)]


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Tensors as bytes: torch's own pickling writes and reads a zip archive for each of them, which is most of the time
    of a small test."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        # A copy, since a dim of one element may have any stride and yet count as contiguous.
        plain = obj.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).flatten()
        return _tensor_of, (obj.dtype, tuple(obj.shape), plain.view(torch.uint8).numpy().tobytes())


def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
