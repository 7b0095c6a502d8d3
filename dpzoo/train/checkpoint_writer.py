"""Writing checkpoints, all ranks together, while training waits or in the background.

A checkpoint is made in four steps. *Plan*: the ranks agree who writes what, replicas once. *Stage* (in the background
only): each rank copies what it has to write, and nothing else, to the CPU; training may then go on. *Write*: each rank
its own file, without a word to the others, which is why a thread may do it. *Publish*: the ranks tell each other what
they wrote, and the first makes the checkpoint count. All communication is in the calling thread, between two steps.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dpzoo import agreement
from dpzoo.agreement import Note
from dpzoo.train.checkpoint_files import FileRecord, folder_name, keep_newest, open_partial, publish
from dpzoo.train.team import Team

T = TypeVar("T")
U = TypeVar("U")
Written = tuple[list[WriteResult], list[FileRecord]]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used, or cannot be written; raised on all ranks."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time; all ranks make the same calls. Close it, or use it in `with`.

    Args:
        folder: of the run, seen by all ranks.
        keep: how many checkpoints stay, the newest.
        background: `save` returns when the state is copied. `settle` or the next `save` publishes the checkpoint. The
            copies stay in memory between checkpoints: of all that is saved, a rank's part.
    """

    def __init__(self, folder: Path, team: Team, keep: int = 2, background: bool = False) -> None:
        self.folder, self.team, self.keep, self.background = folder, team, keep, background
        self.newest: Path | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if background else None
        self._under_way: tuple[_Plan, Future[Written]] | None = None
        self._agreed: tuple[SavePlan, SavePlan, Metadata | None] | None = None
        self._copies: dict[MetadataIndex, Tensor] = {}

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint of `state`; returns where it is, or will be when it is finished.

        Args:
            state: of nested mappings, with tensors, DTensors, ShardTensors and other values that pickle.

        Raises:
            CheckpointError: on all ranks: a rank could not write this checkpoint, or the one before.
        """
        self.finish()
        plan = self._plan(step, dict(state))
        if self._thread is None:
            self._publish(plan, _written(plan))
        else:
            together(self.team, f"{plan.writer.path} cannot be copied", lambda: plan.planner.stage(plan.mine))
            self._under_way = plan, self._thread.submit(_write, plan)
        return self.folder / folder_name(step)

    def settle(self) -> None:
        """Publish the checkpoint that is being written, if all ranks are done with it; cheap, for between two steps."""
        if self._under_way is not None and not self.team.any(not self._under_way[1].done()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and publish it.

        Raises:
            CheckpointError: on all ranks, if one could not write.
        """
        if self._under_way is not None:
            (plan, future), self._under_way = self._under_way, None
            self._publish(plan, future)

    def close(self) -> None:
        """End the thread; a checkpoint that nobody has finished never counts."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:  # else other ranks may not come here
                self.finish()
        finally:
            self.close()

    def _plan(self, step: int, state: dict[str, Any]) -> "_Plan":
        target = self.folder / folder_name(step)
        problem = f"{target} cannot be written"

        def prepare() -> Path:
            return open_partial(self.folder, step) if self.team.is_first else target

        partial = self.team.from_first(together(self.team, problem, prepare))
        planner = _StagingPlanner(self._copies)
        writer = FileSystemWriter(partial)

        def local() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), self.team.is_first)
            writer.set_up_storage_writer(self.team.is_first, rank=self.team.rank)
            return writer.prepare_local_plan(planner.create_local_plan())

        mine = together(self.team, problem, local)
        if self._agreed is None or self.team.any(mine != self._agreed[0]):

            def part(plans: list[SavePlan]) -> list[tuple[SavePlan, Metadata | None]]:
                parts, metadata = planner.create_global_plan(plans)
                parts = writer.prepare_global_plan(parts)
                return [(part, metadata if rank == self.team.rank else None) for rank, part in enumerate(parts)]

            self._agreed = mine, *_by_first(self.team, problem, mine, part)
        _, final, metadata = self._agreed  # a plan as that of the last checkpoint needs no word to the others
        planner.finish_plan(final)
        return _Plan(step, planner, writer, final, metadata)

    def _publish(self, plan: "_Plan", written: "Future[Written]") -> None:
        target = self.folder / folder_name(plan.step)
        mine = together(self.team, f"{target} could not be written", written.result)

        def make_it_count(everyone: list[Written]) -> list[None]:
            assert plan.metadata is not None
            plan.writer.finish(plan.metadata, [results for results, _ in everyone])
            files = [record for _, records in everyone for record in records]
            publish(Path(plan.writer.path), files, {"step": plan.step, "torch": torch.__version__})
            keep_newest(self.folder, plan.step, self.keep)
            return [None] * len(everyone)

        _by_first(self.team, f"{target} could not be finished", mine, make_it_count)
        self.newest = target


@dataclass(frozen=True)
class _Plan:
    """Who writes what of one checkpoint: `mine` is this rank's part; the first rank's `metadata` tells of all of it."""

    step: int
    planner: "_StagingPlanner"
    writer: FileSystemWriter
    mine: SavePlan
    metadata: Metadata | None


class _StagingPlanner(DefaultSavePlanner):
    """Torch's planner, which gives copies of what a rank writes once they are made.

    Args:
        copies: of the last checkpoint, whose memory is used again where a shape is the same.
    """

    def __init__(self, copies: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self._copies = copies
        self._staged: dict[MetadataIndex, Any] = {}

    def stage(self, plan: SavePlan) -> None:
        """Copy what `plan` writes to the CPU, and let go of all else."""
        for item in plan.items:
            value = super().resolve_data(item)
            self._staged[item.index] = self._copied(item.index, value.detach()) if isinstance(value, Tensor) else value
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies were only asked for
        for index in self._copies.keys() - self._staged.keys():
            del self._copies[index]
        self.state_dict = {}

    def _copied(self, index: MetadataIndex, value: Tensor) -> Tensor:
        copy = self._copies.get(index)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._copies[index] = copy
        return copy.copy_(value, non_blocking=True)

    def resolve_data(self, write_item: WriteItem) -> Any:
        staged = self._staged.get(write_item.index)
        return super().resolve_data(write_item) if staged is None else staged


def _write(plan: _Plan) -> Written:
    """This rank's files and what they hold; needs no other rank."""
    pending = plan.writer.write_data(plan.mine, plan.planner)
    pending.wait()
    results = pending.value()
    names = sorted({result.storage_data.relative_path for result in results})
    return results, [FileRecord.of(Path(plan.writer.path) / name) for name in names]


def _written(plan: _Plan) -> "Future[Written]":
    """`_write` at once, as what a thread would have left."""
    future: Future[Written] = Future()
    try:
        future.set_result(_write(plan))
    except Exception as error:
        future.set_exception(error)
    return future


def together(team: Team, problem: str, work: Callable[[], T]) -> T:
    """`work()` on every rank; what it raises on one becomes a CheckpointError on all, which names rank and reason."""

    def tell(notes: list[Note], mine: Exception | None) -> CheckpointError:
        reasons = "; ".join(f"rank {note.rank}: {note.full}" for note in notes if note.kind is not None)
        return CheckpointError(f"{problem} ({reasons})")

    return agreement.together(work, team.mesh, tell)


def _by_first(team: Team, problem: str, value: T, share: Callable[[list[T]], list[U]]) -> U:
    """`team.through_first`, in which an error becomes a CheckpointError on all ranks."""

    def answers(values: list[T]) -> list[tuple[U | None, str | None]]:
        try:
            return [(answer, None) for answer in share(values)]
        except Exception as error:
            return [(None, f"{type(error).__name__}: {error}")] * len(values)

    answer, failure = team.through_first(value, answers)
    if failure:
        raise CheckpointError(f"{problem} ({failure})")
    return answer  # type: ignore[return-value]
