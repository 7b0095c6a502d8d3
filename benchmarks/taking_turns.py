"""Measure settings that take turns, each in processes of its own: rounds of samples, and ratios within a round.

A setting is a function that builds a step, in a process alone or in the ranks of a gloo group. All processes are
started at first and wait; in a round each setting runs a step, or some, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# glibc hands freed memory back to the system and pays for every page anew in the next step, or does not, as it lies:
# the same step varied by a tenth. With these it keeps what a step will need again.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * 2**20))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(16 * 2**30))
os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler has much to say on a machine without a GPU
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Step = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        build: `build(job, rank, mesh)` makes the step of a rank; a function of a module. Alone, `mesh` is None.
        ranks: processes that do it together; 0 for one process without a group.
        given: `given(job, rank, mesh)` makes what the step reads, whose memory is not to count; `build(job, given)`
            then makes the step.
        python: the interpreter of its processes; None for this one.
        steps: steps in a row in a turn; the first of several finds cold caches and is left out.
    """

    name: str
    build: Callable[..., Step]
    ranks: int = 0
    given: Callable[..., Any] | None = None
    python: str | None = None
    steps: int = 1


@dataclass(frozen=True)
class Sample:
    """One turn of one process.

    Attributes:
        wall, cpu: seconds a step.
        memory: the most resident bytes above the level before the step was built (Linux); it depends on what the C
            library keeps of what was freed, and wavers.
        allocated: the most bytes that torch's allocator handed out during a step; 0 if that was not asked for.
        value: what the step returned.
    """

    wall: float
    cpu: float
    memory: int
    value: Any
    allocated: int = 0


def measure(
    settings: Sequence[Setting], job: Any, rounds: int, allocated: bool = False
) -> list[dict[str, list[Sample]]]:
    """Rounds of samples, per setting one of each process; a first round is warm-up and left out.

    Args:
        allocated: run one more step after the last, to find what torch's allocator hands out.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        lines: dict[str, list[Connection]] = {}
        processes = []
        for setting in settings:
            lines[setting.name] = []
            for rank in range(max(1, setting.ranks)):
                ours, theirs = context.Pipe()
                lines[setting.name].append(ours)
                context.set_executable(setting.python or sys.executable)
                processes.append(context.Process(target=_serve, args=(setting, job, rank, folder, theirs)))
                processes[-1].start()
                theirs.close()
        try:
            found = []
            for number in range(rounds + 1):
                found.append(_round(lines, number, "allocated" if allocated and number == rounds else "turn"))
                print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            return found[1:]
        finally:
            for line in (line for group in lines.values() for line in group):
                with suppress(OSError):  # a process that failed is gone
                    line.send("")
            for process in processes:
                process.join()


def _round(lines: dict[str, list[Connection]], number: int, order: str) -> dict[str, list[Sample]]:
    samples, names = {}, list(lines)
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        for line in lines[name]:
            line.send(order)
        samples[name] = [line.recv() for line in lines[name]]
    return {name: samples[name] for name in names}


def _serve(setting: Setting, job: Any, rank: int, folder: str, line: Connection) -> None:
    torch.set_num_threads(1)
    mesh = join(f"{folder}/{setting.name}", rank, setting.ranks) if setting.ranks else None
    if setting.given is None:
        level = resident("VmRSS")
        step = setting.build(job, rank, mesh)
    else:
        given = setting.given(job, rank, mesh)
        level = resident("VmRSS")
        step = setting.build(job, given)
    while order := line.recv():
        sample = _timed(step, level, setting.steps)
        line.send(replace(sample, allocated=_most_allocated(step)) if order == "allocated" else sample)
    if setting.ranks:
        dist.destroy_process_group()


def join(store: str, rank: int, ranks: int) -> DeviceMesh:
    """Of this process and the others of a gloo group, which meet in the file `store`: a mesh of one axis."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    group = {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
    dist.init_process_group("gloo", **group, timeout=timedelta(seconds=600))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))


def _timed(step: Step, level: int, steps: int) -> Sample:
    if steps > 1:
        step()
    measured = max(1, steps - 1)
    reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(measured):
        value = step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall / measured, cpu / measured, resident("VmHWM") - level, value)


def _most_allocated(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = peak = 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def reset_peak() -> None:
    """Let ``VmHWM`` begin anew, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident(what: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the last reset; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), 0)


def summarize(rounds: list[dict[str, list[Sample]]], reference: str) -> dict[str, dict[str, Any]]:
    """Per setting medians, and medians of the ratios to `reference` within a round."""
    table: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        wall = [max(s.wall for s in r[name]) for r in rounds]
        cpu = [sum(s.cpu for s in r[name]) for r in rounds]
        base = [r[reference][0] for r in rounds]
        table[name] = {
            "wall_s": statistics.median(wall),
            "cpu_s": statistics.median(cpu),
            "memory_mib": statistics.median(max(s.memory for s in r[name]) for r in rounds) / 2**20,
            "speedup": statistics.median(b.wall / w for b, w in zip(base, wall, strict=True)),
            "cpu_ratio": statistics.median(c / b.cpu for c, b in zip(cpu, base, strict=True)),
            "memory_ratio": statistics.median(
                max(s.memory for s in r[name]) / max(b.memory, 1) for r, b in zip(rounds, base, strict=True)
            ),
            "allocated_ratio": max(s.allocated for s in rounds[-1][name]) / max(rounds[-1][reference][0].allocated, 1),
            "value": rounds[0][name][0].value,
        }
    return table


def show(table: dict[str, dict[str, Any]], reference: str, file: Path | None = None) -> None:
    """Print the table, and write it to a file."""
    print(f"{'':<16}{'wall s':>9}{'speedup':>9}{'cpu s':>9}{'cpu ratio':>11}{'memory MiB':>12}  value")
    for name, row in table.items():
        print(
            f"{name:<16}{row['wall_s']:>9.3f}{row['speedup']:>8.2f}x{row['cpu_s']:>9.3f}{row['cpu_ratio']:>10.2f}x"
            f"{row['memory_mib']:>12.0f}  {row['value']}"
        )
    print(f"(ratios to {reference!r}, medians of ratios within a round; {os.cpu_count()} cores)")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(table, indent=1))
