"""All ranks of a mesh go on together, or all of them raise a `DataError`; each sample is agreed upon before use."""

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from dpzoo import agreement
from dpzoo.agreement import Note
from dpzoo.datapipes.errors import DataError

T = TypeVar("T")


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def raise_together(
    error: Exception | None, mesh: DeviceMesh | None, digest: int = 0, digest_axis: str | Collection[str] | None = None
) -> None:
    """Return if no rank of `mesh` has an error and the digests agree; raise `DataError` on all of them otherwise.

    Args:
        error: what this rank met, or None.
        digest: a number below 2**62 that has to be equal on the ranks along `digest_axis` (one or several; None: all).

    Raises:
        DataError: on every rank, with the message of each rank that failed.
    """
    axes = (digest_axis,) if isinstance(digest_axis, str) else digest_axis
    agreement.raise_together(error, mesh, _tell, digest, axes)


def together(work: Callable[[], T], mesh: DeviceMesh | None) -> T:
    """`work()` on every rank of `mesh`; if one of them fails all raise a `DataError`, as in `raise_together`."""
    return agreement.together(work, mesh, _tell)


def as_data_error(error: Exception) -> DataError:
    """The error itself if it is a `DataError`, else one that was caused by it."""
    if isinstance(error, DataError):
        return error
    wrapped = DataError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _tell(notes: list[Note], mine: Exception | None) -> DataError:
    if len(notes) == 1 and mine is not None:
        return as_data_error(mine)
    failed: dict[str, list[int]] = {}
    for note in notes:
        if note.kind is not None:
            failed.setdefault(note.text if note.kind == DataError.__name__ else note.full, []).append(note.rank)
    if failed:
        return DataError("; ".join(f"{found} [met on rank {', '.join(map(str, on))}]" for found, on in failed.items()))
    return DataError(
        "the ranks of one domain group see different data (rank, digest of names and sizes): "
        f"{[(note.rank, note.digest) for note in notes]}; check that all of them read the same files and configuration"
    )
