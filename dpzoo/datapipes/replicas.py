"""Which part of a mesh cuts a sample, and which samples a data-parallel rank takes."""

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.errors import DataError


def parted(mesh: DeviceMesh | None, domain_axes: tuple[str, ...]) -> tuple[DeviceMesh | None, int, int]:
    """The domain mesh (its axes in the order of the mesh), this rank's number among the replicas, and their number.

    A 1-D mesh without a name is a domain mesh.

    Raises:
        DataError: an axis is absent, or this rank is not part of the mesh.
    """
    if mesh is None:
        return None, 0, 1
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and len(domain_axes) == 1 and domain_axes[0] not in names:
        return mesh, 0, 1
    if absent := [axis for axis in domain_axes if axis not in names]:
        raise DataError(
            f"the mesh has axes {names or mesh.ndim}, none of them is {absent[0]!r}: name it, or name the axes that "
            "cut a sample"
        )
    replica, replicas, coordinates = 0, 1, mesh.get_coordinate()
    if coordinates is None:
        raise DataError(f"this rank is not part of {mesh}")
    for axis, name in enumerate(names):
        if name not in domain_axes:
            replica, replicas = replica * mesh.size(axis) + coordinates[axis], replicas * mesh.size(axis)
    inside = tuple(name for name in names if name in domain_axes)
    return mesh if len(inside) == mesh.ndim else mesh[inside if len(inside) > 1 else inside[0]], replica, replicas


def steps_per_epoch(samples: int, replicas: int, last: str) -> int:
    """Steps that every replica makes; `last="drop"` leaves out samples that do not divide, "repeat" repeats some."""
    return samples // replicas if last == "drop" else -(-samples // replicas)


def steps_of(
    samples: int, replica: int, replicas: int, last: str, order_seed: tuple[int, ...] | None
) -> list[tuple[int, bool]]:
    """(sample, is it a repeat) of each step of one replica; the order is shuffled by the seed, None for as stored."""
    order = np.arange(samples) if order_seed is None else np.random.default_rng(order_seed).permutation(samples)
    places = range(replica, steps_per_epoch(samples, replicas, last) * replicas, replicas)
    return [(int(order[place % samples]), place >= samples) for place in places]
