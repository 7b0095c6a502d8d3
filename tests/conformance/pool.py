"""Rank processes, forked from a parent that has imported everything: a renewed pool costs a fraction of a second.

The parent watches: when no message arrives and no rank uses any processor time, the ranks wait for each other for ever.
Then it reads every rank's stack, kills the processes and starts new ones.
The parent must never run a backward pass or open a process group: forks inherit neither.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.catalog import Entry
from tests.conformance.judge import Outcome
from tests.conformance.targets import TARGETS
from tests.conformance.worker import Rank, Selection

MOST_STOPS = 6  # hangs and crashes of one entry, after which the rest of it is left for another run
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class _Process:
    process: Any
    pipe: Connection
    phase: str = "idle"
    key: str = ""
    stack: Path = field(default_factory=Path)

    def cpu_seconds(self) -> float:
        """Processor time used so far, 0 when the process is gone."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS


class Pool:
    """``ranks`` processes that run entries of the database on ``target``.

    A case is a hang after ``timeout`` seconds, or after ``idle`` seconds in which no rank used processor time.
    """

    def __init__(
        self, target: str, ranks: int, entries: dict[str, Entry], timeout: float = 30.0, idle: float = 3.0
    ) -> None:
        self.target, self.ranks, self.entries, self.timeout = target, ranks, entries, timeout
        self.idle = idle
        self.processes: list[_Process] = []
        self.folder = tempfile.TemporaryDirectory(prefix="conformance-")
        self.generation = 0

    def start(self) -> None:
        """Fork the ranks."""
        context = mp.get_context("fork")
        self.generation += 1
        base = Path(self.folder.name)
        peers = _pipes_between(context, self.ranks)
        for rank in range(self.ranks):
            near, far = context.Pipe()
            stack = base / f"stack-{self.generation}-{rank}"
            store = base / f"store-{self.generation}"
            arguments = (self.target, rank, self.ranks, str(store), str(stack), far, peers[rank], self.entries)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            far.close()
            self.processes.append(_Process(process, near, stack=stack))
        for pipe in (pipe for row in peers for pipe in row if pipe is not None):
            pipe.close()

    def stop(self) -> None:
        """Kill the ranks."""
        for member in self.processes:
            member.process.kill()
        for member in self.processes:
            member.process.join()
            member.pipe.close()
        self.processes = []

    def run(self, entry: Entry, selection: Selection) -> Iterator[dict[str, Any]]:
        """Records of the entry's cases, as they come; a hang is a record as well, and is left out of the rest."""
        skip = set(selection.skip)
        tried: set[str] = set()
        stops = 0
        while True:
            if not self.processes:
                self.start()
            for member in self.processes:
                member.pipe.send((entry.key, replace(selection, skip=frozenset(skip))))
            failed = None
            for record in self._listen(entry):
                if record["outcome"] in (Outcome.HANG, Outcome.ONE_RANK, Outcome.CRASH):
                    failed = record
                    break
                skip.add(record["key"])
                yield record
            if failed is None:
                return
            self.stop()
            if failed["key"] in tried or failed["outcome"] == Outcome.ONE_RANK:
                skip.add(failed["key"])
                stops += 1
                yield failed
                if stops == MOST_STOPS:
                    return
            tried.add(failed["key"])

    def _listen(self, entry: Entry) -> Iterator[dict[str, Any]]:
        last, used = time.monotonic(), self._cpu()
        quiet = last
        while True:
            ready = wait([member.pipe for member in self.processes], timeout=0.5)
            now = time.monotonic()
            for member in self.processes:
                if member.pipe not in ready:
                    continue
                try:
                    kind, key, payload = member.pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield self._failure(entry, Outcome.CRASH, "a process died")
                    return
                if kind == "done":
                    if member is self.processes[0]:
                        return
                elif kind == "record":
                    yield payload
                else:
                    member.key, member.phase = key, kind if payload is None else payload
            if ready:
                last = quiet = now
                used = self._cpu()
                continue
            if self._cpu() - used > 0.05 * (now - quiet):
                quiet, used = now, self._cpu()
            if now - quiet > self.idle or now - last > self.timeout:
                yield self._hang(entry)
                return

    def _cpu(self) -> float:
        return sum(member.cpu_seconds() for member in self.processes)

    def _hang(self, entry: Entry) -> dict[str, Any]:
        key = self.processes[0].key
        raised = {
            rank: member.phase
            for rank, member in enumerate(self.processes)
            if member.key == key and member.phase.startswith("raised ")
        }
        if raised and len(raised) < self.ranks:
            rank, text = next(iter(raised.items()))
            return self._failure(entry, Outcome.ONE_RANK, f"only on rank {rank}, the others wait: {text[7:]}")
        return self._failure(entry, Outcome.HANG, " / ".join(self._stacks()))

    def _stacks(self) -> list[str]:
        for member in self.processes:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        found = []
        for rank, member in enumerate(self.processes):
            lines = member.stack.read_text().splitlines() if member.stack.exists() else []
            places = [line.strip() for line in lines if "dpzoo" in line or "distributed_c10d" in line]
            found.append(f"rank {rank} ({member.phase.split()[0]}): " + "; ".join(p[-70:] for p in places[:3]))
        return found

    def _failure(self, entry: Entry, outcome: Outcome, detail: str) -> dict[str, Any]:
        key = self.processes[0].key
        return {
            "key": key,
            "op": entry.name,
            "variant": entry.variant,
            "family": entry.family,
            "outcome": str(outcome),
            "detail": detail,
        }


def _pipes_between(context: Any, ranks: int) -> list[list[Connection | None]]:
    """A pipe for each pair of ranks: ``result[a][b]`` is rank a's end of the one to b."""
    ends: list[list[Connection | None]] = [[None] * ranks for _ in range(ranks)]
    for low in range(ranks):
        for high in range(low + 1, ranks):
            ends[low][high], ends[high][low] = context.Pipe()
    return ends


def _broken(entry: Entry, error: Exception) -> dict[str, Any]:
    record = {"key": f"{entry.key}|-", "op": entry.name, "variant": entry.variant, "family": entry.family}
    return record | {"outcome": str(Outcome.SKIPPED), "detail": f"the database's own code raises {error!r:.200}"}


def _serve(
    target: str,
    rank: int,
    ranks: int,
    store: str,
    stack: str,
    pipe: Connection,
    peers: list[Connection | None],
    entries: dict[str, Entry],
) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stack_file = open(stack, "w")  # noqa: SIM115 - stays open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))

    def mark(key: str, phase: str) -> None:
        if rank == 0 or phase.startswith("raised"):
            pipe.send(("phase", key, phase))

    def report(record: dict[str, Any]) -> None:
        if rank == 0:
            pipe.send(("record", record["key"], record))

    member = Rank(TARGETS[target](mesh), peers, mark)
    while True:
        key, selection = pipe.recv()
        try:
            member.run_entry(entries[key], selection, report)
        except Exception as error:
            pipe.send(("record", f"{key}|-", _broken(entries[key], error)))
        pipe.send(("done", "", None))
