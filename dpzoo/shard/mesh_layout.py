"""The arithmetic of mesh sizes: which shape of mesh the user meant, given how many processes there are.

No process group is needed, so a wrong request fails on every rank with the same sentence before anything communicates.
"""

from collections.abc import Sequence
from math import prod

INFERRED = -1


def resolve_mesh_shape(
    mesh_shape: Sequence[int], mesh_dim_names: Sequence[str], world_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh shape with its one ``-1`` (if any) filled in, and the axis names, both as tuples.

    Args:
        mesh_shape: size of each mesh axis; at most one may be ``-1``, "whatever is left".
        mesh_dim_names: one distinct name per axis.
        world_size: number of processes the mesh has to use up.

    Raises:
        ValueError: if the sizes cannot be laid over ``world_size`` processes; the message names the numbers.
    """
    sizes, names = tuple(mesh_shape), _checked_names(mesh_dim_names)
    if len(sizes) != len(names):
        raise ValueError(
            f"mesh_shape {sizes} has {len(sizes)} axes but mesh_dim_names {names} has {len(names)} names; "
            "give one name per axis"
        )
    _check_sizes(sizes)
    if INFERRED in sizes:
        sizes = _fill_inferred(sizes, world_size)
    if prod(sizes) != world_size:
        raise ValueError(
            f"mesh_shape {sizes} needs {' x '.join(map(str, sizes))} = {prod(sizes)} processes but there are "
            f"{world_size}; change a size, let one be -1, or start {prod(sizes)} processes"
        )
    return sizes, names


def _checked_names(mesh_dim_names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(mesh_dim_names, str):
        raise ValueError(
            f"mesh_dim_names is the string {mesh_dim_names!r}; give a sequence of names, e.g. ({mesh_dim_names!r},)"
        )
    names = tuple(mesh_dim_names)
    if len(set(names)) != len(names):
        raise ValueError(f"mesh_dim_names {names} names an axis twice; each axis needs its own name")
    return names


def _check_sizes(sizes: tuple[int, ...]) -> None:
    if not sizes:
        raise ValueError("mesh_shape is empty; a mesh has at least one axis, e.g. (-1,) for all processes")
    for axis, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != INFERRED):
            raise ValueError(f"mesh_shape {sizes}: axis {axis} is {size!r}; a size is a positive integer, or -1 once")
    if sizes.count(INFERRED) > 1:
        raise ValueError(f"mesh_shape {sizes} has {sizes.count(INFERRED)} axes of size -1; only one can be inferred")


def _fill_inferred(sizes: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    known = prod(size for size in sizes if size != INFERRED)
    if world_size % known:
        raise ValueError(
            f"mesh_shape {sizes}: {world_size} processes cannot be divided by {known}, the product of the known "
            "sizes, so the -1 has no whole value; change a size or the number of processes"
        )
    return tuple(world_size // known if size == INFERRED else size for size in sizes)
