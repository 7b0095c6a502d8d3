"""Make a module's parameters and buffers the same on every rank of a mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import collectives as comm
from dpzoo.shard.errors import ShardError
from dpzoo.shard.mesh import MeshLayout


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Copy parameters and buffers from one rank of the mesh to all others, in place.

    Args:
        src_mesh_rank: position of the source in the flattened mesh.
        verify: do not copy, only check that all ranks already agree.

    Raises:
        ShardError: on every rank, when `verify` finds a tensor that differs; it is named.
    """
    layout = MeshLayout.of(mesh)
    source, rest = [], src_mesh_rank
    for n in reversed(layout.shape):
        rest, c = divmod(rest, n)
        source.insert(0, c)
    differing = []
    with torch.no_grad():
        for name, t in [*module.named_parameters(), *module.named_buffers()]:
            value = t.detach()
            for axis in layout.axes:
                value = comm.broadcast(value, source[axis], layout.groups[axis])
            if verify and not torch.equal(torch.nan_to_num(value), torch.nan_to_num(t)):
                differing.append(name)
            elif not verify and value is not t:
                t.copy_(value)
    if verify:
        found = [differing]
        for axis in layout.axes:
            found = [x for group in comm.gather_objects(found, layout.groups[axis]) for x in group]  # type: ignore[attr-defined]
        names = sorted({n for names in found for n in names})
        if names:
            raise ShardError(
                f"these parameters or buffers differ between the ranks of {layout}: {', '.join(names)}; call sync_module_over_mesh without verify"
            )
