"""Attention over one long sequence: one process against ring, gather and ulysses on 2 and 4 ranks.

    python benchmarks/attention.py            # some minutes; prints tables, writes build/attention.json (and .png)
    python benchmarks/attention.py --quick
    python benchmarks/attention.py --ranks 2 --tokens 8192 --rounds 9 --causal

``scaled_dot_product_attention`` of random float32 queries, keys and values, one thread a process, forward alone and
forward + backward.  The settings take turns, round by round, so that a busy machine slows all of them:

    one               one process, plain tensors, the whole sequence
    ceiling           the ranks at once, each its queries against all keys, plain, with nothing sent
    ring, gather, ulysses, auto     dpzoo, the sequence cut over the ranks
    context_parallel  torch.distributed.tensor.experimental, where it runs on this device (with --peers)
    PhysicsNeMo       its ShardTensor, where it is installed and runs on this device (with --peers)

Figures are medians over the rounds of ratios taken within a round: wall time of the slowest rank, processor seconds
summed over ranks; and the most resident memory of a rank above its level before the first call (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from taking_turns import ROOT, Step, join, reset_peak, resident
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

OURS = ("ring", "gather", "ulysses", "auto")
SETTINGS = ("one", "ceiling", *OURS, "context_parallel", "PhysicsNeMo")
PASSES = ("forward", "forward+backward")
Around = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """One size of the problem."""

    ranks: int
    tokens: int
    heads: int
    head_dim: int
    causal: bool
    rounds: int
    peers: bool = False


@dataclass(frozen=True)
class Sample:
    """One call in one process."""

    wall: float
    cpu: float
    memory: int


# ---------------------------------------------------------------------------------------------- inside a process
def serve(job: Job, rank: int, folder: str, line: Connection) -> None:
    """Prepare the settings of this process (``rank`` -1: the single process), then make calls on request."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    full = [torch.randn(1, job.heads, job.tokens, job.head_dim) for _ in range(3)]
    makers = {"one": lambda: plain(full, job)}
    if rank >= 0:
        mesh = join(f"{folder}/store", rank, job.ranks)
        makers = {"ceiling": lambda: ceiling(full, job, rank)}
        makers |= {mode: lambda mode=mode: ours(full, job, mesh, mode) for mode in OURS}
        if job.peers:
            makers |= {"context_parallel": lambda: context_parallel(full, job, mesh)}
            makers |= {"PhysicsNeMo": lambda: physicsnemo(full, job, mesh)}
    steps, failed = {}, {}
    for name, make in makers.items():
        try:
            steps[name] = make()
            for step in steps[name]:
                step()
        except Exception as error:
            steps.pop(name, None)
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    line.send((list(steps), failed))
    while (asked := line.recv()) is not None:
        name, number, first = asked
        line.send(timed(steps[name][number], first))
    if rank >= 0:
        dist.destroy_process_group()


def steps_of(call: Callable[..., Tensor], leaves: list[Tensor], around: Around = nullcontext) -> tuple[Step, Step]:
    """Forward without gradients, and forward with backward from ones; each inside ``around()``."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    with around():
        g = torch.ones_like(call(*leaves)).detach()

    def forward() -> None:
        with around(), torch.no_grad():
            call(*leaves)

    def both() -> None:
        with around():
            torch.autograd.backward(call(*leaves), g, inputs=leaves)
        for t in leaves:
            t.grad = None

    return forward, both


def plain(full: list[Tensor], job: Job) -> tuple[Step, Step]:
    return steps_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=job.causal), full)


def ceiling(full: list[Tensor], job: Job, rank: int) -> tuple[Step, Step]:
    """An equal share of the arithmetic: some queries and all keys; under a causal mask some heads and all queries."""
    if job.causal:
        return plain([t.chunk(job.ranks, 1)[rank].clone() for t in full], job)
    q, k, v = full
    return plain([q.chunk(job.ranks, 2)[rank].clone(), k, v], job)


def ours(full: list[Tensor], job: Job, mesh: DeviceMesh, mode: str) -> tuple[Step, Step]:
    from dpzoo.shard import Shard, ShardTensor, attention_mode

    parts = [t.chunk(job.ranks, 2)[mesh.get_local_rank()].clone() for t in full]
    cut = [ShardTensor.from_local(t, mesh, [Shard(2)], "chunk", global_shape=full[0].shape) for t in parts]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention_mode(mode):
            return F.scaled_dot_product_attention(q, k, v, is_causal=job.causal)

    return steps_of(call, cut)


def context_parallel(full: list[Tensor], job: Job, mesh: DeviceMesh) -> tuple[Step, Step]:
    from torch.distributed.tensor.experimental import context_parallel as inside

    def around(buffers: list[Tensor] | None = None) -> AbstractContextManager[None]:
        # It wants something to cut each time; inside the steps that is next to nothing.
        given = [torch.zeros(2 * job.ranks)] if buffers is None else buffers
        dims = [0 if t.ndim == 1 else 2 for t in given]
        return inside(mesh, buffers=given, buffer_seq_dims=dims, no_restore_buffers=set(given))

    buffers = [t.clone() for t in full]
    with around(buffers):
        parts = [t.detach().clone() for t in buffers]
    return steps_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=job.causal), parts, around)


def physicsnemo(full: list[Tensor], job: Job, mesh: DeviceMesh) -> tuple[Step, Step]:
    if importlib.util.find_spec("physicsnemo") is None:
        raise ModuleNotFoundError("physicsnemo is not installed")
    from physicsnemo.domain_parallel import ShardTensor, register_custom_ops
    from torch.distributed.tensor import Shard

    register_custom_ops()
    parts = [t.chunk(job.ranks, 2)[mesh.get_local_rank()].clone() for t in full]
    shapes = {0: tuple(tuple(t.shape) for t in full[0].chunk(job.ranks, 2))}
    cut = [ShardTensor.from_local(t, mesh, [Shard(2)], sharding_shapes=shapes) for t in parts]
    return steps_of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=job.causal), cut)


def timed(step: Step, first: bool) -> Sample:
    if first:
        give_back()
    reset_peak()
    level = resident("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu, resident("VmHWM") - level)


def give_back() -> None:
    """Freed memory that the allocator holds would hide what the next call needs; to get it again takes time."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# ---------------------------------------------------------------------------------------------- around them
Rounds = list[dict[str, list[Sample]]]


def collect(job: Job) -> tuple[dict[str, Rounds], dict[str, str]]:
    """Rounds of samples by pass, per setting one a process; and what did not run, with the reason.

    The first round tells the memory, the others the times.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = {}, []
        for rank in (-1, *range(job.ranks)):
            lines[rank], theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(job, rank, folder, theirs)))
            processes[-1].start()
            theirs.close()
        try:
            answers = [line.recv() for line in lines.values()]
            failed = {name: why for _, missing in answers for name, why in missing.items()}
            ready = {name for names, _ in answers for name in names} - set(failed)
            runs = [name for name in SETTINGS if name in ready]
            found = {
                which: [_round(lines, runs, number, i) for i in range(job.rounds + 1)]
                for number, which in enumerate(PASSES)
            }
        finally:
            for line in lines.values():
                line.send(None)
            for process in processes:
                process.join()
    return found, failed


def _round(lines: dict[int, Connection], runs: list[str], number: int, turn: int) -> dict[str, list[Sample]]:
    samples, first = {}, turn == 0
    turn %= len(runs)
    for name in runs[turn:] + runs[:turn]:
        talking = [line for rank, line in lines.items() if (rank < 0) == (name == "one")]
        for line in talking:
            line.send((name, number, first))
        samples[name] = [line.recv() for line in talking]
    return samples


def summarize(rounds: Rounds) -> dict[str, dict[str, float]]:
    """Per setting: medians, and ratios to ``one`` within a round."""
    table, (memory, *rounds) = {}, rounds
    for name in memory:
        wall = [max(s.wall for s in r[name]) for r in rounds]
        cpu = [sum(s.cpu for s in r[name]) for r in rounds]
        table[name] = {
            "wall_s": statistics.median(wall),
            "speedup": statistics.median(r["one"][0].wall / w for r, w in zip(rounds, wall, strict=True)),
            "cpu_s": statistics.median(cpu),
            "cpu_ratio": statistics.median(c / r["one"][0].cpu for r, c in zip(rounds, cpu, strict=True)),
            "memory_mib": max(s.memory for s in memory[name]) / 2**20,
        }
    return {name: table[name] for name in SETTINGS if name in table}


def render(table: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(table.values())))
    rows = [f"{'':18}" + "".join(f"{name:>12}" for name in names)]
    for setting, figures in table.items():
        rows.append(f"{setting:18}" + "".join(f"{figures[name]:12.4g}" for name in names))
    return "\n".join(rows)


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """Speedup, processor time and memory over the length of the sequence; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = sorted({r["job"]["ranks"] for r in results})
    shown = {"speedup": "times faster than one process", "cpu_ratio": "processor time, times one process",
             "memory_mib": "memory of a rank, MiB"}  # fmt: skip
    figure, axes = plt.subplots(len(counts), len(shown), figsize=(13, 3.6 * len(counts)), squeeze=False)
    for row, ranks in zip(axes, counts, strict=True):
        chosen = [r for r in results if r["job"]["ranks"] == ranks]
        for axis, (quantity, label) in zip(row, shown.items(), strict=True):
            for name in SETTINGS:
                points = [(r["job"]["tokens"], r["tables"][PASSES[1]][name][quantity]) for r in chosen
                          if name in r["tables"][PASSES[1]]]  # fmt: skip
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=name)
            axis.set(xscale="log", xlabel="tokens", ylabel=label, title=f"{ranks} ranks, {PASSES[1]}")
            axis.set_xticks([r["job"]["tokens"] for r in chosen], [r["job"]["tokens"] for r in chosen])
            axis.minorticks_off()
        row[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"drawn in {file}")


def main() -> None:
    """Parse, measure, print, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two ranks, short sequences, three rounds")
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="default 2 4")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="default 2048 4096 8192 16384")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--peers", action="store_true", help="try others too; on CPU minutes to find out that they fail"
    )
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "attention.json")
    options = parser.parse_args()
    quick = options.quick
    results = []
    for ranks in options.ranks or ([2] if quick else [2, 4]):
        for tokens in options.tokens or ([256, 1024] if quick else [2048, 4096, 8192, 16384]):
            rounds = options.rounds or (3 if quick else 7)
            job = Job(ranks, tokens, options.heads, options.head_dim, options.causal, rounds, options.peers)
            found, failed = collect(job)
            tables = {which: summarize(r) for which, r in found.items()}
            for which, table in tables.items():
                print(f"\n{which}: {tokens} tokens, {ranks} ranks{', causal' * job.causal}\n{render(table)}")
            for name, why in failed.items():
                print(f"{name} is left out: {why}")
            raw = {which: [{n: [asdict(s) for s in got] for n, got in r.items()} for r in rs]
                   for which, rs in found.items()}  # fmt: skip
            results.append({"job": asdict(job), "tables": tables, "failed": failed, "rounds": raw})
            sys.stdout.flush()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))
    print(f"\nwritten to {options.out}")
    plot(results, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
