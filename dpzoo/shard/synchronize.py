"""Make a module's parameters and buffers the same on every rank of a mesh."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import collectives as comm
from dpzoo.shard.errors import LayoutError, ShardError
from dpzoo.shard.mesh import MeshLayout


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Copy parameters and buffers from one rank of the mesh to all others, in place.

    Args:
        module: the same kind of module on every rank; its parameters and buffers are plain tensors.
        src_mesh_rank: position of the source in the flattened mesh.
        verify: do not copy, only check that all ranks already agree.

    Raises:
        ShardError: on every rank, when `verify` finds a tensor that differs; it is named.
        LayoutError: on every rank, when the modules have different tensors, or there is no such source.
    """
    layout = MeshLayout.of(mesh)
    if not 0 <= src_mesh_rank < len(layout.ranks):
        raise LayoutError(f"src_mesh_rank={src_mesh_rank} is no position in {layout} of {len(layout.ranks)} ranks")
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    _check_names(tensors, layout)
    differing = []
    with torch.no_grad():
        for name, t in tensors.items():
            value = _from_source(t.detach(), layout, src_mesh_rank)
            if not same_values(value, t.detach()):
                differing.append(name)
                if not verify:
                    t.copy_(value)
    if verify and (names := sorted({n for found in comm.gather_over_mesh(differing, layout) for n in found})):
        raise ShardError(
            f"these parameters or buffers differ between the ranks of {layout}: {', '.join(names)}; call "
            "sync_module_over_mesh without verify"
        )


def _from_source(value: Tensor, layout: MeshLayout, source: int) -> Tensor:
    """The value of the rank at position `source` of the flattened mesh."""
    rest = source
    for axis in reversed(layout.axes):
        rest, at = divmod(rest, layout.shape[axis])
        value = comm.broadcast(value, at, layout.groups[axis])
    return value


def _check_names(tensors: dict[str, Tensor], layout: MeshLayout) -> None:
    mine = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    everyone = comm.gather_over_mesh(mine, layout)
    for rank, other in zip(layout.ranks, everyone, strict=True):
        if other != everyone[0]:
            unlike = sorted({str(entry) for entry in set(other) ^ set(everyone[0])}) or ["their order"]
            raise LayoutError(
                f"sync_module_over_mesh: rank {rank} has another module than rank {layout.ranks[0]} of {layout}; what "
                f"differs: {', '.join(unlike)}"
            )


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal everywhere, a NaN being equal to a NaN."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
