"""The ranks that load together: steps that can fail on one of them alone fail on all, with an error of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from dpzoo import agreement
from dpzoo.agreement import Note
from dpzoo.shard.mesh import MeshLayout
from dpzoo.weights import DamagedWeightsError, UnsafeWeightsError, WeightsError, WeightsMismatchError

T = TypeVar("T")
# What is raised again under its own class on the other ranks; everything else becomes a WeightsError.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (DamagedWeightsError, UnsafeWeightsError, WeightsMismatchError, WeightsError, ValueError, TypeError)
}


class Team:
    """The ranks that load together; without a mesh this process alone.

    Attributes:
        mesh, layout: None without one.
        is_first: Is this the rank that reads for all?
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.layout = None if mesh is None else MeshLayout.of(mesh)
        self.is_first = self.layout is None or all(c == 0 for c in self.layout.coords)
        self.is_many = self.layout is not None and len(self.layout.ranks) > 1

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of every rank, the first rank's first."""
        return [value] if self.mesh is None else agreement.gather(value, self.mesh)

    def together(self, step: Callable[[], T], who: str = "all") -> T:
        """Run ``step`` on all ranks, or on the ``"first"`` alone (the others then get None), and compare notes.

        Raises:
            Exception: on every rank, what the lowest rank that failed has raised.
        """
        skips = who == "first" and not self.is_first
        return agreement.together((lambda: None) if skips else step, self.mesh, _tell)  # type: ignore[arg-type, return-value]

    def settle(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error."""
        agreement.raise_together(error, self.mesh, _tell)


def _tell(notes: list[Note], mine: Exception | None) -> Exception:
    if len(notes) == 1 and mine is not None:
        return mine
    failed = [note for note in notes if note.kind is not None]
    first = failed[0]
    alike = len(failed) == len(notes) and len({note.full for note in failed}) == 1
    where = "" if alike else f"rank {first.rank}: "
    kind = _KINDS.get(first.kind or "")
    return WeightsError(where + first.full) if kind is None else kind(where + first.text)
