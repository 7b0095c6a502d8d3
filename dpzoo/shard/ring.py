"""A ring step for users' own handlers: pass a tensor of any size to the next rank, receive the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import collectives as comm
from dpzoo.shard.mesh import MeshLayout


@dataclass(frozen=True)
class RingPassingConfig:
    """How a ring turns.

    Attributes:
        mesh_dim: mesh axis of the ring.
        mesh_size: number of ranks on it.
        ring_direction: "forward" sends to the next rank, "backward" to the one before.
        communication_method: "p2p"; kept for scripts that name it.
    """

    mesh_dim: int
    mesh_size: int
    ring_direction: str = "forward"
    communication_method: str = "p2p"

    def __post_init__(self) -> None:
        if self.ring_direction not in ("forward", "backward"):
            raise ValueError(f"ring_direction is 'forward' or 'backward', got {self.ring_direction!r}")


def perform_ring_iteration(
    tensor: Tensor, mesh: DeviceMesh, ring_config: RingPassingConfig, recv_shape: Sequence[int] | None = None
) -> Tensor:
    """Send `tensor` one step along the ring and return what arrives (of `recv_shape`, the same shape by default).

    Differentiable: gradients travel one step back. Every rank of the ring must take part in backward, too.

    Raises:
        ValueError: the mesh has no such axis, or the axis has another size.
    """
    layout = MeshLayout.of(mesh)
    if not -len(layout.shape) <= ring_config.mesh_dim < len(layout.shape):
        raise ValueError(
            f"ring_config names axis {ring_config.mesh_dim}, there is no axis {ring_config.mesh_dim} in {layout}"
        )
    axis = ring_config.mesh_dim % len(layout.shape)
    if layout.shape[axis] != ring_config.mesh_size:
        raise ValueError(
            f"ring_config says {ring_config.mesh_size} ranks, axis {axis} of {layout} has {layout.shape[axis]}"
        )
    if layout.shape[axis] == 1:
        return tensor
    step = 1 if ring_config.ring_direction == "forward" else -1
    shape = tuple(tensor.shape) if recv_shape is None else tuple(recv_shape)
    return _RingStep.apply(tensor, shape, layout.groups[axis], step)  # type: ignore[no-any-return]


class _RingStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: tuple[int, ...], group: str, step: int) -> Tensor:
        ctx.home = (tuple(tensor.shape), group, -step)
        return comm.shift(tensor, shape, group, step).wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        return _RingStep.apply(g, *ctx.home), None, None, None
