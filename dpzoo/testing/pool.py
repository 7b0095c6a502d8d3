"""`RankPool`: gloo ranks that start once, keep their process groups, and run one short task after another.

Starting a rank costs an import of torch (seconds); running a task on ranks that wait costs milliseconds. A pool holds
one *crew* of n processes for each n that is asked for. A task that fails or hangs ends with every rank's traceback and
its crew is replaced, so that the next task finds a healthy group.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dpzoo.testing.outcome import Report, failure_of
from dpzoo.testing.torchrun import leave_launched_group, run_in_this_process, under_torchrun
from dpzoo.testing.transport import pack, unpack
from dpzoo.testing.worker import RankSettings, die_with_parent, run_rank

MAX_RANKS = 4
START_TIMEOUT_S = 180.0
# Slicing a device mesh imports dynamo; without it here every rank would pay for that import.
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.tensor", "dpzoo.testing"]
# Likewise what tests of models need; only when this process has it, since it is then known to be there and wanted.
_PRELOAD_IF_HERE = ["pytest", "timm.models", "torchvision", "dpzoo.models", "dpzoo.train"]
_SHOWN_OUTPUT = 4000


class RankPool:
    """Runs functions on 1 to `max_ranks` gloo ranks of this machine.

    Args:
        max_ranks: the largest number of ranks a task may ask for.
        group_timeout: seconds after which a collective that a peer does not join raises in the ranks.
        grace: seconds the other ranks get to report, once one rank has raised.

    Under `torchrun` no process is started: a task on WORLD_SIZE ranks runs in the processes that exist (nccl on CUDA),
    a task on another number of ranks is skipped.
    """

    def __init__(self, max_ranks: int = MAX_RANKS, group_timeout: float = 20.0, grace: float = 5.0) -> None:
        self.max_ranks, self.group_timeout, self.grace = max_ranks, group_timeout, grace
        self._crews: dict[int, _Crew] = {}

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int,
        timeout: float = 30.0,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on ranks 0..ranks-1 and return what each rank returned, in rank order.

        Inside, the default process group has exactly `ranks` members and torch's seed is the same on each. `fn` is a
        function at the top level of a module (a test module too); arguments and results are pickled.

        Raises:
            RankError: a rank raised; the message has every rank's traceback, the first to fail on top.
            RankTimeout: some rank did not return within `timeout` seconds; the message has every rank's stack.
            ValueError: `ranks` is not in 1..max_ranks.
        """
        __tracebackhide__ = True
        name = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', fn)}"
        if under_torchrun():
            return run_in_this_process(name, fn, args, dict(kwargs or {}), ranks, timeout)
        if not 1 <= ranks <= self.max_ranks:
            raise ValueError(
                f"ranks={ranks}: a RankPool(max_ranks={self.max_ranks}) runs tasks on 1 to {self.max_ranks} ranks"
            )
        task = pack((list(sys.path), pack((fn, args, dict(kwargs or {})))))
        crew = self._crew(ranks)
        try:
            return crew.perform(name, task, timeout, self.grace)
        except BaseException:
            self._crews.pop(ranks).close(kill=True)
            raise

    def process_ids(self, ranks: int) -> list[int]:
        """Ids of the processes that serve tasks on `ranks` ranks; starts them when they are not there yet."""
        return [process.pid or 0 for process in self._crew(ranks).processes]

    def close(self) -> None:
        """End all ranks. The pool can be used again afterwards; it starts anew."""
        while self._crews:
            self._crews.popitem()[1].close()
        leave_launched_group()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _crew(self, ranks: int) -> _Crew:
        crew = self._crews.get(ranks)
        if crew is not None and not crew.alive():
            self._crews.pop(ranks).close(kill=True)
            crew = None
        if crew is None:
            crew = self._crews[ranks] = _Crew(ranks, self.group_timeout)
        return crew


@functools.cache
def session_pool() -> RankPool:
    """The pool shared by all tests of this process; closed at exit, or earlier by its `close()`."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


class _Crew:
    """n rank processes with one process group."""

    def __init__(self, ranks: int, group_timeout: float) -> None:
        self.folder = tempfile.mkdtemp(prefix="dpzoo-ranks-")
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.settings = [RankSettings(rank, ranks, self.folder, group_timeout) for rank in range(ranks)]
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []
        with _start_environment():
            for settings in self.settings:
                self._start(settings)
        try:
            self._await_start()
        except BaseException:
            self.close(kill=True)
            raise

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def perform(self, name: str, task: bytes, timeout: float, grace: float) -> list[Any]:
        """Send `task` to every rank and collect the values; raises when a rank raises, dies or is late."""
        __tracebackhide__ = True
        for connection in self.connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send_bytes(task)
        deadline = time.monotonic() + timeout
        returned = self._collect(deadline, grace)
        if not self._all(returned, "returned"):
            raise self._failure(name, returned, timeout)
        at_rest = self._collect(max(deadline, time.monotonic() + grace), grace)
        if not self._all(at_rest, "at rest"):
            raise self._failure(
                f"{name} returned, but left a collective that not every rank made: it", at_rest, timeout
            )
        return [unpack(returned[rank].value) for rank in range(len(self.processes))]

    def close(self, kill: bool = False) -> None:
        """Ask the ranks to leave, or kill them at once, and remove their files."""
        for process, connection in zip(self.processes, self.connections, strict=True):
            with contextlib.suppress(OSError):
                process.kill() if kill else connection.send_bytes(b"")
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        self._remove_folder()

    def _start(self, settings: RankSettings) -> None:
        context: Any = multiprocessing.get_context(_start_method())
        ours, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(settings, theirs), daemon=True, name=f"rank {settings.rank}")
        process.start()
        theirs.close()
        self.processes.append(process)
        self.connections.append(ours)

    def _all(self, reports: Mapping[int, Report], kind: str) -> bool:
        return len(reports) == len(self.processes) and all(report.kind == kind for report in reports.values())

    def _failure(self, name: str, reports: Mapping[int, Report], timeout: float) -> BaseException:
        waiting = [rank for rank in range(len(self.processes)) if rank not in reports]
        return failure_of(name, reports, self._stacks(waiting), timeout, self._output())

    def _await_start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, connection in enumerate(self.connections):
            with contextlib.suppress(EOFError):
                if connection.poll(max(0.0, deadline - time.monotonic())) and connection.recv_bytes():
                    continue
            stacks = self._stacks([rank] if self.processes[rank].is_alive() else [])
            raise RuntimeError(f"rank {rank} of {len(self.processes)} did not start. {stacks}\n{self._output()}")

    def _collect(self, deadline: float, grace: float) -> dict[int, Report]:
        """Reports by rank, until all are in or time is up; once a rank has failed the others have `grace` seconds."""
        reports: dict[int, Report] = {}
        pending = dict(zip(self.connections, itertools.count()))
        while pending and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(pending), left):
                assert isinstance(ready, Connection)
                rank = pending.pop(ready)
                reports[rank] = self._receive(rank, ready)
                if reports[rank].kind not in ("returned", "at rest"):
                    deadline = min(deadline, time.monotonic() + grace)
        return reports

    def _receive(self, rank: int, connection: Connection) -> Report:
        try:
            report = unpack(connection.recv_bytes())
            assert isinstance(report, Report)
            return report
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            text = f"the process of rank {rank} ended with exit code {self.processes[rank].exitcode}"
            return Report("raised", text=text, error_type="process ended")
        except pickle.UnpicklingError as error:
            return Report(
                "raised", text=f"the report of rank {rank} can not be read: {error}", error_type="UnpicklingError"
            )

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Ask `ranks` for their Python stacks and read them."""
        if not hasattr(signal, "SIGUSR1"):
            return dict.fromkeys(ranks, "still running (no stacks on this platform)")
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        dumps = {rank: _read_settled(self.settings[rank].stack_file) for rank in ranks}
        return {rank: "still running, at:\n" + _without_watchdog(dump) for rank, dump in dumps.items()}

    def _output(self) -> str:
        """What each rank printed during the task, the tail of it."""
        parts = []
        for settings in self.settings:
            text = settings.output_file.read_text(errors="replace") if settings.output_file.exists() else ""
            if text.strip():
                parts.append(f"--- output of rank {settings.rank} ---\n{text[-_SHOWN_OUTPUT:].rstrip()}")
        return "\n".join(parts)


def _start_method() -> str:
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@contextlib.contextmanager
def _start_environment() -> Iterator[None]:
    """What new ranks inherit: one OpenMP thread, this process's search path, torch imported once in the fork server."""
    if _start_method() == "forkserver":
        here = [name for name in _PRELOAD_IF_HERE if name in sys.modules]
        multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD, *here])
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _without_watchdog(dump: str) -> str:
    """A stack dump less the thread that every rank has to notice the end of its parent."""
    threads = dump.split("\n\n")
    return "\n\n".join(thread for thread in threads if f"in {die_with_parent.__name__}" not in thread)


def _read_settled(file: Path, wait_s: float = 2.0) -> str:
    """The text of `file` once it has some and stops growing; a stack dump is written by a signal handler."""
    deadline, before = time.monotonic() + wait_s, ""
    while time.monotonic() < deadline:
        text = file.read_text(errors="replace") if file.exists() else ""
        if text and text == before:
            return text
        before = text
        time.sleep(0.05)
    return before or "(no stack was written)"
