"""Which ranks share a sample and which hold replicas: a mesh split by the names of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import LayoutError
from dpzoo.shard.mesh import MeshLayout

AxisNames = str | Sequence[str]


@dataclass(frozen=True)
class Axes:
    """The two kinds of axes of a mesh.

    Attributes:
        mesh: all ranks that train together.
        domain: its part over which samples are cut, or None if they are not.
        ddp: its part with replicas, or None if there are none.
    """

    mesh: DeviceMesh
    domain: DeviceMesh | None
    ddp: DeviceMesh | None

    @property
    def replicas(self) -> int:
        """Number of domains, each with samples of its own."""
        return 1 if self.ddp is None else self.ddp.size()

    @property
    def domain_groups(self) -> dict[str, int]:
        """Name and size of the groups over which the parts of a gradient are summed."""
        if self.domain is None:
            return {}
        layout = MeshLayout.of(self.domain)
        return dict(zip(layout.groups, layout.shape, strict=True))

    def all_ranks(self) -> DeviceMesh:
        """The mesh as one axis."""
        return flat(self.mesh)


def split_axes(mesh: DeviceMesh, ddp_axis: AxisNames, domain_axis: AxisNames) -> Axes:
    """Sort the axes of a mesh into data-parallel and domain axes.

    Args:
        mesh: its axes are named; a mesh of one axis without a name is all domain.
        ddp_axis, domain_axis: one name or several. A name that the mesh lacks counts as an axis of one rank.

    Raises:
        LayoutError: on every rank, for an axis of the mesh that is neither.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(f"parallelize needs a torch DeviceMesh (see init_device_mesh), got {type(mesh).__name__}")
    ddp, domain = (((names,) if isinstance(names, str) else tuple(names)) for names in (ddp_axis, domain_axis))
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim == 1:
        return Axes(mesh, mesh, None)
    unknown = [n for n in names or () if (n in ddp) + (n in domain) != 1]
    if names is None or unknown:
        raise LayoutError(
            f"the axes of {mesh} are named {names}; each must be one of the data-parallel axes {ddp} or of the domain "
            f"axes {domain}: pass ddp_axis= and domain_axis=, or a part of the mesh"
        )
    return Axes(mesh, _part(mesh, domain), _part(mesh, ddp))


def _part(mesh: DeviceMesh, wanted: Sequence[str]) -> DeviceMesh | None:
    found = tuple(n for n in mesh.mesh_dim_names or () if n in wanted)
    if not found:
        return None
    return mesh if len(found) == mesh.ndim else mesh[found]


def flat(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh along one axis; the same object at every call, so that groups are made once."""
    return mesh if mesh.ndim == 1 else mesh._flatten()
