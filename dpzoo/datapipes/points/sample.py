"""One sample as a model sees it: names -> tensors, cut over the domain ranks or whole on each."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.agreement import gather
from dpzoo.datapipes.agreement import device_of
from dpzoo.datapipes.points.dataset import CarPart
from dpzoo.shard import Replicate, Shard, ShardTensor, scatter_tensor


@dataclass(frozen=True)
class PointSample:
    """A car, the same on all ranks of a domain group.

    Attributes:
        name: the car.
        tensors: field -> `(rows, columns)` or `(rows,)`. ShardTensors on a mesh (cut along dim 0, or replicated for
            replicated clouds and whole fields), plain tensors without one.
        globals: the numbers known of the car (Cd, Cl, stream_velocity, ...), equal on all ranks.
        attributes: all attributes of the file (units, column names, ...).
        totals: cloud -> rows in the file; the sample may hold fewer.
        is_repeat: the car was seen before in this epoch and fills up the last step of the data-parallel ranks.
    """

    name: str
    tensors: Mapping[str, Tensor]
    globals: Mapping[str, float]
    attributes: Mapping[str, Any]
    totals: Mapping[str, int]
    is_repeat: bool = False

    def __getitem__(self, field: str) -> Tensor:
        return self.tensors[field]

    def batched(self, field: str) -> Tensor:
        """The field as a batch of one, `(1, rows, columns)`."""
        return self.tensors[field].unsqueeze(0)


def layout_digest(part: CarPart) -> int:
    """A number that is equal on all ranks of a domain group if they see the same car with the same sizes."""
    if part.one_reader:
        return zlib.crc32(part.name.encode())
    described = [
        (f, part.sizes[f], a.shape[1:] if part.sizes[f] else a.shape, str(a.dtype)) for f, a in part.arrays.items()
    ]
    return zlib.crc32(repr((part.name, described, part.totals)).encode())


def make_sample(
    part: CarPart, domain: DeviceMesh | None, device: torch.device | None = None, is_repeat: bool = False
) -> PointSample:
    """Tensors of what the ranks of `domain` read. Communicates only for formats that one rank reads alone.

    Args:
        part: this rank's arrays; every rank's must have been found good (`raise_together`).
        domain: the 1-D mesh of the group; None for plain tensors.
        device: where the tensors go; the mesh's own device by default.
    """
    if part.one_reader and domain is not None and domain.size() > 1:
        tensors = _scattered(part, domain)
    else:
        target = device if domain is None else device_of(domain)
        tensors = {name: _tensor(array, part.sizes[name], domain, target) for name, array in part.arrays.items()}
    numbers = {k: float(v) for k, v in part.attributes.items() if isinstance(v, (int, float)) and type(v) is not bool}
    return PointSample(part.name, tensors, numbers, part.attributes, part.totals, is_repeat)


def _tensor(
    array: np.ndarray, sizes: tuple[int, ...] | None, domain: DeviceMesh | None, device: torch.device | None
) -> Tensor:
    local = torch.from_numpy(array)
    if device is not None and device.type != "cpu":
        local = local.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else local.to(device)
    if domain is None:
        return local
    # The ranks have agreed on names and sizes already.
    if sizes is None:
        return ShardTensor.from_local(local, domain, [Replicate()], sharding_shapes={}, run_check=False)
    shapes: dict[int, Sequence[Sequence[int]]] = {0: [(rows, *local.shape[1:]) for rows in sizes]}
    return ShardTensor.from_local(local, domain, [Shard(0)], sharding_shapes=shapes, run_check=False)


def _scattered(part: CarPart, domain: DeviceMesh) -> dict[str, Tensor]:
    """Send each rank its rows; `part` of the first rank holds them all, and it learns the rest here."""
    first = int(domain.mesh.flatten()[0])
    told = gather((part.sizes, part.totals, part.attributes), domain)[0]
    part.sizes, part.totals, part.attributes = told  # type: ignore[misc]
    tensors: dict[str, Tensor] = {}
    for name, sizes in part.sizes.items():
        whole = torch.from_numpy(part.arrays[name]) if part.arrays else None
        given: dict[int, Sequence[int]] = {} if sizes is None else {0: sizes}
        tensors[name] = scatter_tensor(whole, first, domain, [Shard(0) if given else Replicate()], sizes=given)
    return tensors
