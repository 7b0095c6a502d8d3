"""The ranks that train together: those of a domain group share a sample, replicas have samples of their own."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
U = TypeVar("U")


class Team:
    """All ranks of a mesh, or one process without a mesh.

    Args:
        mesh: holds every rank of the world; one axis, or one named `domain_axis` and data-parallel axes.
        domain_axis: the axis over which samples are cut.

    Attributes:
        replica, replicas: number of this domain group among all of them.
        is_first: this rank writes what is written once.

    Raises:
        ValueError: on all ranks, for a mesh that is not of this kind.
    """

    def __init__(self, mesh: DeviceMesh | None = None, domain_axis: str = "domain") -> None:
        self.mesh, self.replica, self.replicas, self.is_first = mesh, 0, 1, True
        self.data_axes: tuple[int, ...] = ()
        if mesh is None:
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(f"there are {dist.get_world_size()} ranks and no mesh: pass mesh=")
            return
        if mesh.size() != dist.get_world_size():
            raise ValueError(f"{mesh} holds {mesh.size()} of {dist.get_world_size()} ranks; training needs all of them")
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1 and domain_axis not in names:
            raise ValueError(f"the axes of the mesh are {names or mesh.ndim}, none is {domain_axis!r}; name the axes")
        self.is_first = dist.get_rank() == self._first
        self.data_axes = tuple(a for a, n in enumerate(names) if n != domain_axis) if mesh.ndim > 1 else ()
        coordinates = mesh.get_coordinate()
        assert coordinates is not None
        for axis in self.data_axes:
            self.replica = self.replica * mesh.size(axis) + coordinates[axis]
            self.replicas *= mesh.size(axis)

    @property
    def device_type(self) -> str:
        """Where the ranks compute."""
        return "cpu" if self.mesh is None else self.mesh.device_type

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is true on one."""
        if self.mesh is None or self.mesh.size() == 1:
            return flag
        found = torch.tensor([int(flag)], device=self._device)
        for axis in range(self.mesh.ndim):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        return bool(found.item())

    def mean(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Sums of all replicas over the sum of their weights; the same names everywhere. Nothing for no weight."""
        table = torch.tensor([*sums.values(), weight], dtype=torch.float64, device=self._device)
        for axis in self.data_axes:
            assert self.mesh is not None
            dist.all_reduce(table, group=self.mesh.get_group(axis))
        *values, total = table.tolist()
        return {name: value / total for name, value in zip(sums, values, strict=True)} if total else {}

    def from_first(self, value: T) -> T:
        """What the first rank passed in, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._first)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """What every rank passed in, in the order of ranks, on all of them; any objects that pickle."""
        if self.size == 1:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value)
        return cast(list[T], found)

    def through_first(self, value: T, share: Callable[[list[T]], list[U]]) -> U:
        """`share` on the first rank alone, of what every rank passed in; each rank gets its entry of the answer."""
        if self.size == 1:
            return share([value])[0]
        first = self._first
        found: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, found, dst=first)
        box: list[Any] = [None]
        dist.scatter_object_list(box, share(found) if found is not None else None, src=first)
        return box[0]

    @property
    def size(self) -> int:
        """Ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank's number in `gather`."""
        return 0 if self.size == 1 else dist.get_rank()

    @property
    def _first(self) -> int:
        return 0 if self.mesh is None else int(self.mesh.mesh.flatten()[0])

    @property
    def _device(self) -> torch.device:
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, cast(int, torch.get_device_module(self.device_type).current_device()))
