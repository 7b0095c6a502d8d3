"""Make a module's parameters and buffers the same on every rank of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.errors import LayoutError, ShardError
from dpzoo.shard.mesh import MeshLayout

PIECE_BYTES = 25 * 2**20


def sync_module_over_mesh(module: nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False) -> None:
    """Copy parameters and buffers from one rank of the mesh to all others, in place.

    Args:
        module: the same kind of module on every rank; its parameters and buffers are plain tensors.
        src_mesh_rank: position of the source in the flattened mesh.
        verify: do not copy, only check that all ranks already agree.

    Raises:
        ShardError: on every rank, when `verify` finds a tensor that differs; it is named.
        LayoutError: on every rank, when the modules have different tensors, one is sharded, or there is no such source.
    """
    layout = MeshLayout.of(mesh)
    if not 0 <= src_mesh_rank < len(layout.ranks):
        raise LayoutError(f"src_mesh_rank={src_mesh_rank} is no position in {layout} of {len(layout.ranks)} ranks")
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    sharded = [name for name, t in tensors.items() if isinstance(t, DTensor)]
    if sharded:
        raise LayoutError(f"sync_module_over_mesh is for plain tensors; these are sharded over ranks: {sharded}")
    _check_names(tensors, layout)
    differing, named = [], list(tensors.items())
    with torch.no_grad():
        for at, value in _from_source([t for _, t in named], layout, src_mesh_rank):
            name, t = named[at]
            if not same_values(value, t.detach()):
                differing.append(name)
                if not verify:
                    t.copy_(value)
    if verify and (names := sorted({n for found in comm.gather_over_mesh(differing, layout) for n in found})):
        raise ShardError(
            f"these parameters or buffers differ between the ranks of {layout}: {', '.join(names)}; call "
            "sync_module_over_mesh without verify"
        )


def broadcast_tensors(tensors: Sequence[Tensor], layout: MeshLayout, source: int) -> None:
    """Copy plain tensors from one position of the flattened mesh to all others, in place.

    Autograd does not count it as a change: a step that has them in its graph goes on.
    """
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        for at, value in _from_source(tensors, layout, source):
            tensors[at].copy_(value)


def _from_source(tensors: Sequence[Tensor], layout: MeshLayout, source: int) -> Iterator[tuple[int, Tensor]]:
    """Number and value at `source` of every tensor, in any order; those of one dtype and device travel together."""
    open_pieces: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for at, t in enumerate(tensors):
        piece = open_pieces.setdefault((t.dtype, t.device), [])
        piece.append(at)
        if sum(tensors[i].nbytes for i in piece) >= PIECE_BYTES:
            yield from _piece_from_source(open_pieces.pop((t.dtype, t.device)), tensors, layout, source)
    for piece in open_pieces.values():
        yield from _piece_from_source(piece, tensors, layout, source)


def _piece_from_source(
    piece: Sequence[int], tensors: Sequence[Tensor], layout: MeshLayout, source: int
) -> Iterator[tuple[int, Tensor]]:
    flat = torch.cat([tensors[i].detach().reshape(-1) for i in piece])
    rest = source
    for axis in reversed(layout.axes):
        rest, at = divmod(rest, layout.shape[axis])
        flat = comm.broadcast(flat, at, layout.groups[axis])
    values = flat.split([tensors[i].numel() for i in piece])
    for i, value in zip(piece, values, strict=True):
        yield i, value.view(tensors[i].shape)


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
