"""Steps that can fail on one rank alone, made to fail on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import collectives as comm
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
        layout: Of the mesh, None without one.
        is_first: Is this the rank that reads for all?
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.layout = None if mesh is None else MeshLayout.of(mesh)
        self.is_first = self.layout is None or all(c == 0 for c in self.layout.coords)
        self.is_many = self.layout is not None and len(self.layout.ranks) > 1

    def gather(self, value: Any) -> list[Any]:
        """One picklable value of every rank, the first rank's first."""
        return [value] if self.layout is None else comm.gather_over_mesh(value, self.layout)

    def together(self, step: Callable[[], T], who: str = "all") -> T:
        """Run ``step`` on all ranks, or on the ``"first"`` alone (the others then get None), and compare notes.

        Raises:
            Exception: on every rank, what the lowest rank that failed has raised.
        """
        value: Any = None
        error: Exception | None = None
        if who == "all" or self.is_first:
            try:
                value = step()
            except Exception as caught:
                error = caught
        self.settle(error)
        return value

    def settle(self, error: Exception | None) -> None:
        """Raise on every rank if any rank brings an error."""
        if not self.is_many:
            if error is not None:
                raise error
            return
        assert self.layout is not None
        notes = self.gather(None if error is None else (type(error).__name__, str(error)))
        failed = [(rank, note) for rank, note in zip(self.layout.ranks, notes, strict=True) if note is not None]
        if not failed:
            return
        rank, (kind, message) = failed[0]
        where = "" if len({note for _, note in failed}) == 1 and len(failed) == len(notes) else f"rank {rank}: "
        text = message if kind in _KINDS else f"{kind}: {message}"
        raise _KINDS.get(kind, WeightsError)(where + text) from error
