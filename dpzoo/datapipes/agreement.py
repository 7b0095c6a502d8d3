"""All ranks of a mesh go on together, or all of them raise.

A rank that meets a bad file and raises alone leaves the others waiting in their next collective. So each sample is
agreed upon before use: one all-reduce of three integers per mesh axis, and text is exchanged only when something is
wrong.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.errors import DataError


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def raise_together(
    error: Exception | None, mesh: DeviceMesh | None, digest: int = 0, digest_axis: str | tuple[str, ...] | None = None
) -> None:
    """Return if no rank of `mesh` has an error and the digests agree; raise `DataError` on all of them otherwise.

    Args:
        error: what this rank met, or None.
        digest: a number below 2**62 that has to be equal on the ranks along `digest_axis` (one or several; None: all).

    Raises:
        DataError: on every rank, with the message of each rank that failed.
    """
    if mesh is None or mesh.size() == 1:
        if error is not None:
            raise as_data_error(error)
        return
    if not _all_well(error is not None, mesh, digest, digest_axis):
        _tell(error, mesh, digest)


def as_data_error(error: Exception) -> DataError:
    """The error itself if it is a `DataError`, else one that was caused by it."""
    if isinstance(error, DataError):
        return error
    wrapped = DataError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def gather_objects(value: object, mesh: DeviceMesh) -> list[object]:
    """One picklable value of every rank of the mesh, in mesh order; slow, for set-up and errors."""
    found = [value]
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        parts: list[list[object]] = [[] for _ in range(group.size())]
        dist.all_gather_object(parts, found, group=group)
        found = [item for part in parts for item in part]
    return found


def _all_well(failed: bool, mesh: DeviceMesh, digest: int, digest_axis: str | tuple[str, ...] | None) -> bool:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    axes = (digest_axis,) if isinstance(digest_axis, str) else digest_axis or ()
    bad = int(failed)
    for axis, name in enumerate(names):
        if mesh.size(axis) == 1:
            continue
        compared = digest if digest_axis is None or name in axes else 0
        verdict = torch.tensor([bad, compared, -compared], dtype=torch.int64, device=device_of(mesh))
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        bad, highest, negated_lowest = verdict.tolist()
        bad = int(bad or highest != -negated_lowest)
    # A disagreement seen on the last axis has not travelled along the first ones yet.
    for axis in range(mesh.ndim - 1):
        if mesh.size(axis) == 1:
            continue
        verdict = torch.tensor([bad], dtype=torch.int64, device=device_of(mesh))
        dist.all_reduce(verdict, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        bad = int(verdict.item())
    return not bad


def _tell(error: Exception | None, mesh: DeviceMesh, digest: int) -> None:
    text = None if error is None else str(as_data_error(error))
    everyone = cast(list[tuple[int, str | None, int]], gather_objects((dist.get_rank(), text, digest), mesh))
    failed: dict[str, list[int]] = {}
    for rank, found, _ in everyone:
        if found is not None:
            failed.setdefault(found, []).append(rank)
    if failed:
        message = "; ".join(f"{found} [met on rank {', '.join(map(str, ranks))}]" for found, ranks in failed.items())
    else:
        message = (
            "the ranks of one domain group see different data (rank, digest of names and sizes): "
            f"{[(rank, d) for rank, _, d in everyone]}; check that all of them read the same files and configuration"
        )
    raise DataError(message) from error
