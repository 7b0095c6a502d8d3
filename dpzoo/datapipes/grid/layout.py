"""How a grid lies on the ranks: which mesh axis cuts rows, which columns, and the block of each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.read import Box
from dpzoo.shard import Shard, ShardTensor

GridDim = Literal["y", "x"]


@dataclass(frozen=True)
class GridLayout:
    """The blocks of a grid on a domain mesh.

    Attributes:
        domain: 1-D or 2-D mesh; None for one process.
        dims: the grid dim that each mesh axis cuts.
        sizes: rows or columns per rank along each mesh axis.
        box: this rank's block.
    """

    domain: DeviceMesh | None
    dims: tuple[GridDim, ...]
    sizes: tuple[tuple[int, ...], ...]
    box: Box

    @staticmethod
    def make(
        domain: DeviceMesh | None, dims: Sequence[GridDim], grid: tuple[int, int], sizes: Sequence[tuple[int, ...]]
    ) -> "GridLayout":
        """The layout for given sizes per axis of the domain mesh."""
        spans = {"y": (0, grid[0]), "x": (0, grid[1])}
        coordinates: Sequence[int] | None = [] if domain is None else domain.get_coordinate()
        if coordinates is None:
            raise DataError(f"this rank is not part of {domain}")
        for dim, of_axis, place in zip(dims, sizes, coordinates, strict=True):
            spans[dim] = (sum(of_axis[:place]), sum(of_axis[: place + 1]))
        return GridLayout(domain, tuple(dims), tuple(sizes), Box(*spans["y"], *spans["x"]))

    def shard(self, local: Tensor) -> Tensor:
        """This rank's block `(..., rows, columns)` as a part of the whole; plain without a mesh."""
        if self.domain is None:
            return local
        shapes: dict[int, Sequence[Sequence[int]]] = {}
        placements = []
        for axis, (dim, sizes) in enumerate(zip(self.dims, self.sizes, strict=True)):
            cut = local.ndim - (2 if dim == "y" else 1)
            placements.append(Shard(cut))
            shapes[axis] = [(*local.shape[:cut], n, *local.shape[cut + 1 :]) for n in sizes]
        return ShardTensor.from_local(local, self.domain, placements, sharding_shapes=shapes, run_check=False)


def grid_dims(cut: Mapping[str, GridDim], domain: DeviceMesh | None) -> tuple[GridDim, ...]:
    """The grid dim that each axis of the domain mesh cuts.

    Raises:
        DataError: a dim is not "y" or "x", or is cut by two axes.
    """
    if not cut or any(dim not in ("y", "x") for dim in cut.values()) or len(set(cut.values())) < len(cut):
        raise DataError(f'cut={dict(cut)} must name a mesh axis for "y", for "x", or one for each')
    if domain is None:
        return ()
    names = domain.mesh_dim_names or ()
    return tuple(cut[n] for n in names) if set(names) == set(cut) else tuple(cut.values())


def to_device(local: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on the device, through pinned memory to CUDA."""
    if device is None or device.type == "cpu":
        return local
    return local.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else local.to(device)
