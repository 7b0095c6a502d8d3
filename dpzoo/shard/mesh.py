"""The mesh as the core sees it: names and integers, so that a spec can be hashed, copied and pickled.

A `MeshLayout` is interned: the same device mesh gives the same object, a mesh that was built twice gives two that are
equal (`equals`). It keeps no ProcessGroup alive, also not through a DeviceMesh: caches would hold the groups beyond
`destroy_process_group`, and their threads would still run when the process ends (it then aborts now and then). Groups
are found by name; the mesh is made anew from them if it is gone.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard.errors import LayoutError
from dpzoo.shard.tracing import is_tracing, off_the_graph

_POOL: dict[tuple[Any, ...], "MeshLayout"] = {}


class MeshLayout:
    """Shape, group names and this rank's coordinates of one `DeviceMesh`."""

    __slots__ = ("__weakref__", "_mesh", "axes", "coords", "device_type", "groups", "names", "ranks", "shape")

    _mesh: weakref.ref[DeviceMesh]
    device_type: str
    shape: tuple[int, ...]
    axes: range
    names: tuple[str, ...] | None
    ranks: tuple[int, ...]
    groups: tuple[str, ...]
    coords: tuple[int, ...]

    @staticmethod
    def of(mesh: DeviceMesh) -> "MeshLayout":
        """The interned layout of `mesh`; raises `LayoutError` on a rank outside the mesh."""
        if is_tracing():  # a mesh keeps its ranks in tensors, which a graph would take for its own
            with off_the_graph():
                return MeshLayout._of(mesh)
        return MeshLayout._of(mesh)

    @staticmethod
    def _of(mesh: DeviceMesh) -> "MeshLayout":
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(f"expected a torch DeviceMesh (see init_device_mesh), got {type(mesh).__name__}")
        coords = mesh.get_coordinate()
        if coords is None:
            raise LayoutError(
                f"rank {dist.get_rank()} is not part of {mesh}; only ranks of the mesh may use its tensors"
            )
        groups = tuple(mesh.get_group(axis).group_name for axis in range(mesh.ndim))
        ranks = tuple(mesh.mesh.flatten().tolist())
        names = mesh.mesh_dim_names
        key = (mesh.device_type, tuple(mesh.shape), names, ranks, groups, tuple(coords))
        found = _POOL.get(key)
        if found is None:
            found = MeshLayout.__new__(MeshLayout)
            found.device_type, found.names = mesh.device_type, names
            found.shape, found.axes, found.ranks = tuple(mesh.shape), range(mesh.ndim), ranks
            found.groups, found.coords = groups, tuple(coords)
            if len(_POOL) >= 1024:
                _POOL.clear()
            _POOL[key] = found
            found._mesh = weakref.ref(mesh)
        elif found._mesh() is None:
            found._mesh = weakref.ref(mesh)
        return found

    def equals(self, other: "MeshLayout") -> bool:
        """Is it the same mesh, perhaps built anew over groups of its own? As torch compares meshes.

        Each keeps its groups: a mesh may have been built twice so that two threads can communicate side by side. Where
        tensors of both meet, all ranks use the groups of the same operand.
        """
        return self is other or (self.device_type, self.shape, self.names, self.ranks) == (
            other.device_type,
            other.shape,
            other.names,
            other.ranks,
        )

    def groups_over(self, axes: Iterable[int]) -> tuple[str, ...]:
        """Names of the groups of these axes; those of one rank alone are left out."""
        return tuple(self.groups[axis] for axis in axes if self.shape[axis] > 1)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The user's mesh while it lives, else an equal one over the same groups."""
        mesh = self._mesh()
        if mesh is None:
            groups = [dist.distributed_c10d._resolve_process_group(name) for name in self.groups]  # type: ignore[arg-type]
            ranks = torch.tensor(self.ranks).view(self.shape)
            given: Any = groups[0] if len(groups) == 1 else groups
            mesh = DeviceMesh.from_group(given, self.device_type, ranks, mesh_dim_names=self.names)
            self._mesh = weakref.ref(mesh)
        return mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> "MeshLayout":
        return self

    def __repr__(self) -> str:
        names = self.names or tuple(f"axis {i}" for i in self.axes)
        return "mesh(" + ", ".join(f"{n}={s}" for n, s in zip(names, self.shape, strict=True)) + ")"
