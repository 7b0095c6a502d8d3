"""An error on one rank becomes an error on all of them.

A rank that meets a bad file and raises alone leaves the others waiting in their next collective. So the ranks ask each
other whether all is well: one all-reduce of three integers per mesh axis. Text is exchanged only if it is not. Which
error is raised, and in which words, is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import collectives as comm
from dpzoo.shard.mesh import MeshLayout

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """What one rank tells the others.

    Attributes:
        rank: its number in the world; 0 of a rank that is alone.
        kind, text: of its error, the name of the class and the message; None, "" if it has none.
        digest: its number to compare.
    """

    rank: int
    kind: str | None
    text: str
    digest: int = 0

    @property
    def full(self) -> str:
        """Kind and message of an error."""
        return f"{self.kind}: {self.text}"


Telling = Callable[[list[Note], Exception | None], Exception]
"""Of the notes of all ranks (at least one has an error, or digests differ) and this rank's own error, what to raise."""


def raise_together(
    error: Exception | None,
    mesh: DeviceMesh | None,
    telling: Telling,
    digest: int = 0,
    digest_axes: Collection[str] | None = None,
) -> None:
    """Return if no rank has an error and the digests agree; raise what `telling` makes of it on all ranks otherwise.

    Args:
        error: what this rank met, or None.
        mesh: the ranks that call this together; None: this process alone.
        telling: the same on all ranks, up to what it returns where its second argument is that very error.
        digest: a number below 2**62 that has to be equal on the ranks along `digest_axes` (names; None: all axes).
    """
    if mesh is None or mesh.size() == 1:
        if error is None:
            return
        notes = [_note(0, error, digest)]
    else:
        layout = MeshLayout.of(mesh)
        if _all_well(error is not None, layout, digest, digest_axes):
            return
        notes = comm.gather_over_mesh(_note(dist.get_rank(), error, digest), layout)
    told = telling(notes, error)
    if told is error:
        raise told
    raise told from error


def together(work: Callable[[], T], mesh: DeviceMesh | None, telling: Telling) -> T:
    """`work()` on every rank; if one of them fails all raise, see `raise_together`."""
    found: T | None = None
    error: Exception | None = None
    try:
        found = work()
    except Exception as caught:
        error = caught
    raise_together(error, mesh, telling)
    return found  # type: ignore[return-value]  # no rank has failed


def gather(value: T, mesh: DeviceMesh) -> list[T]:
    """One picklable value of every rank of the mesh, in its order, on all of them; slow, for set-up and errors."""
    return comm.gather_over_mesh(value, MeshLayout.of(mesh))


def _note(rank: int, error: Exception | None, digest: int) -> Note:
    return Note(rank, None if error is None else type(error).__name__, "" if error is None else str(error), digest)


def _all_well(failed: bool, layout: MeshLayout, digest: int, digest_axes: Collection[str] | None) -> bool:
    device = comm.device_of(layout.device_type)
    names = layout.names or ("",) * len(layout.shape)
    bad = int(failed)
    for axis, name in enumerate(names):
        compared = digest if digest_axes is None or name in digest_axes else 0
        verdict = torch.tensor([bad, compared, -compared], device=device)
        bad, highest, negated_lowest = comm.all_reduce(verdict, layout.groups[axis], "max").tolist()
        bad = int(bad or highest != -negated_lowest)
    # A disagreement seen on the last axis has not travelled along the first ones yet.
    for axis in range(len(names) - 1):
        bad = int(comm.all_reduce(torch.tensor([bad], device=device), layout.groups[axis], "max").item())
    return not bad
