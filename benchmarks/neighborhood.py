"""Strong scaling of neighborhood attention: one process against two ranks that share the same grid.

    python benchmarks/neighborhood.py            # some minutes; prints a table, writes build/neighborhood.json
    python benchmarks/neighborhood.py --quick
    python benchmarks/neighborhood.py --grid 128 224 --kernel 31 --heads 16

One call is `dpzoo.ops.na2d` of given queries, keys and values, forward, or forward and backward, with one thread a
process. Three settings take turns, round by round, so that a busy machine slows all of them:

    one      one process, plain tensors, the whole grid
    two      two gloo ranks, the grid cut along its first dim
    ceiling  the same two ranks at once, each a plain call on its half with no exchange: what this machine can give

Figures are medians over the rounds of ratios taken within a round: wall time, and processor seconds summed over the
processes. `checksum` is a sum over the output, the same for one process and two ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = 2
SETTINGS = ("one", "two", "ceiling")


@dataclass(frozen=True)
class Job:
    """What is computed."""

    grid: tuple[int, ...]
    kernel: int
    dilation: int
    heads: int
    head_dim: int
    backward: bool
    rounds: int


@dataclass(frozen=True)
class Sample:
    """One call of one process."""

    wall: float
    cpu: float
    checksum: float


# ---------------------------------------------------------------------------------------------- inside a process
def serve(job: Job, rank: int, folder: str, line: Connection) -> None:
    """Hold the tensors of this process (``rank`` -1: the single one), then compute on request."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    full = [torch.randn(1, *job.grid, job.heads, job.head_dim) for _ in range(3)]
    calls: dict[str, Callable[[], Tensor]] = {}
    if rank < 0:
        calls["one"] = attention(job, full)
    else:
        calls["ceiling"] = attention(job, [t.chunk(RANKS, 1)[rank].clone() for t in full])
        calls["two"] = attention(job, shards(full, rank, folder))
    line.send(sorted(calls))
    while (name := line.recv()) is not None:
        line.send(timed(calls[name]))
    if rank >= 0:
        dist.destroy_process_group()


def shards(full: list[Tensor], rank: int, folder: str) -> list[Tensor]:
    """The tensors cut over the ranks along the first dim of the grid."""
    from dpzoo import scatter

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("domain",))
    return [scatter(t, mesh, dim=1) for t in full]


def attention(job: Job, given: list[Tensor]) -> Callable[[], Tensor]:
    """The call, on leaves of its own; returns a sum that tells whether the result is right."""
    from dpzoo.ops import na2d

    leaves = [t.detach().requires_grad_(job.backward) for t in given]
    # A fixed weight: without one the gradients of a sum over values would be trivial.
    weight = torch.linspace(-1, 1, job.head_dim)

    def call() -> Tensor:
        for t in leaves:
            t.grad = None
        total = (na2d(*leaves, job.kernel, 1, job.dilation) * weight).square().sum()
        if job.backward:
            total.backward()
        return total

    return call


def timed(call: Callable[[], Tensor]) -> Sample:
    cpu, wall = time.process_time(), time.perf_counter()
    total = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu, float(total.detach()))


# ---------------------------------------------------------------------------------------------- around them
def collect(job: Job) -> list[dict[str, list[Sample]]]:
    """Rounds of samples, per setting one per process; the first round is warm-up and left out."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = {}, []
        for rank in (-1, *range(RANKS)):
            lines[rank], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(job, rank, folder, theirs)))
            processes[-1].start()
            theirs.close()
        try:
            for line in lines.values():
                line.recv()
            rounds = [one_round(lines, job, i) for i in range(job.rounds + 1)]
        finally:
            for line in lines.values():
                line.send(None)
            for process in processes:
                process.join()
    return rounds[1:]


def one_round(lines: dict[int, Connection], job: Job, number: int) -> dict[str, list[Sample]]:
    samples = {}
    turn = number % len(SETTINGS)
    for name in SETTINGS[turn:] + SETTINGS[:turn]:
        talking = [lines[-1]] if name == "one" else [lines[rank] for rank in range(RANKS)]
        for line in talking:
            line.send(name)
        samples[name] = [line.recv() for line in talking]
    print(f"round {number} of {job.rounds}", file=sys.stderr, flush=True)
    return samples


def summarize(rounds: list[dict[str, list[Sample]]]) -> dict[str, dict[str, float]]:
    """Per setting: medians, and ratios to ``one`` within a round."""
    table = {}
    for name in SETTINGS:
        wall = [max(s.wall for s in r[name]) for r in rounds]
        cpu = [sum(s.cpu for s in r[name]) for r in rounds]
        table[name] = {
            "wall_s": statistics.median(wall),
            "speedup": statistics.median(r["one"][0].wall / w for r, w in zip(rounds, wall, strict=True)),
            "cpu_s": statistics.median(cpu),
            "cpu_ratio": statistics.median(c / r["one"][0].cpu for r, c in zip(rounds, cpu, strict=True)),
            "checksum": rounds[0][name][0].checksum,
        }
    return table


def render(table: dict[str, dict[str, float]]) -> str:
    names = ("wall_s", "speedup", "cpu_s", "cpu_ratio", "checksum")
    rows = [f"{'':10}" + "".join(f"{name:>14}" for name in names)]
    rows += [
        f"{setting:10}" + "".join(f"{figures[name]:14.6g}" for name in names) for setting, figures in table.items()
    ]
    return "\n".join(rows)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid, three rounds")
    parser.add_argument("--grid", type=int, nargs=2, default=None)
    parser.add_argument("--kernel", type=int, default=None)
    parser.add_argument("--dilation", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "neighborhood.json")
    options = parser.parse_args()
    quick = options.quick
    found = []
    for backward in (False, True):
        job = Job(
            tuple(options.grid or ((64, 56) if quick else (128, 224))),
            options.kernel or (7 if quick else 15),
            options.dilation,
            options.heads,
            options.head_dim,
            backward,
            options.rounds or (3 if quick else 9),
        )
        rounds = collect(job)
        table = summarize(rounds)
        what = "forward and backward" if backward else "forward"
        print(f"na2d, {what}, {job.grid}, kernel {job.kernel}, {RANKS} ranks, torch {torch.__version__}")
        print(render(table))
        raw = [{name: [asdict(s) for s in samples] for name, samples in r.items()} for r in rounds]
        found.append({"job": asdict(job), "table": table, "rounds": raw})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
