"""Strong scaling of a U-Net training step: one process against two ranks that share the same field.

    python benchmarks/unet_step.py            # some minutes; prints a table, writes build/unet_step.json
    python benchmarks/unet_step.py --quick
    python benchmarks/unet_step.py --model unet_base --grid 768 512 --rounds 9
    python benchmarks/unet_step.py --model stack --grid 512 384 --peer /path/to/other/env/bin/python

A step is forward, mean squared error, backward and an SGD update, with one thread a process.  The settings take turns,
round by round, so that a busy machine slows all of them:

    one      one process, plain tensors, the whole grid
    two      two gloo ranks, the grid cut along its first dim
    overlap  the same, computing while the rows at the seams travel (``dpzoo.shard.halo_overlap``)
    ceiling  two processes at once, each a plain step on its half with no exchange: what this machine can give
    peer     two ranks of PhysicsNeMo's ShardTensor, in the environment of ``--peer``; left out ("not run") without it.
             It takes no strided convolution and no instance norm, so it needs ``--model stack``: convolutions, group
             norms and activations at full resolution

Figures are medians over the rounds of ratios taken within a round: wall time, processor seconds summed over processes,
and the most resident memory of a process above its level before the model was built (Linux; peak reset every step).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import site
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANKS = 2
# setting -> which processes do it
SETTINGS = {"one": "one", "two": "ranks", "overlap": "ranks", "ceiling": "halves", "peer": "peer"}
Key = tuple[str, int]  # kind of process, rank


@dataclass(frozen=True)
class Job:
    """What is trained."""

    model: str
    grid: tuple[int, ...]
    channels: int
    rounds: int
    peer: str | None = None

    @property
    def settings(self) -> list[str]:
        """What is measured."""
        return [name for name in SETTINGS if name != "peer" or self.peer]


@dataclass(frozen=True)
class Sample:
    """One step of one process."""

    wall: float
    cpu: float
    memory: int
    loss: float


# ---------------------------------------------------------------------------------------------- inside a process
def serve(job: Job, key: Key, folder: str, line: Connection) -> None:
    """Build what this process trains, then do steps on request."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    field = torch.randn(2, 1, job.channels, *job.grid)
    kind, rank = key
    x, y = field if kind == "one" else _CUTS[kind](field, rank, folder)
    warm = nn.Parameter(torch.ones(1))  # imports and buffers of a first step are start-up, not the step's memory
    warm.square().backward()
    torch.optim.SGD([warm], lr=0.1).step()
    level = resident("VmRSS")
    step = training_step(job, x, y)  # one model a process: another one's gradients would count as memory
    line.send(kind)
    while (name := line.recv()) is not None:
        line.send(timed(_overlapped(step) if name == "overlap" else step, level))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(folder: str, rank: int) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=600))
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("domain",))


def _shards(field: Tensor, rank: int, folder: str) -> tuple[Tensor, Tensor]:
    from dpzoo import scatter

    mesh = _join(folder, rank)
    return scatter(field[0], mesh, dim=2), scatter(field[1], mesh, dim=2)


def _peer_shards(field: Tensor, rank: int, folder: str) -> tuple[Tensor, Tensor]:
    for folder_of_packages in site.getsitepackages():  # a spawned process gets its parent's path, not its own
        site.addsitedir(folder_of_packages)
    from physicsnemo import domain_parallel  # type: ignore[import-not-found]
    from torch.distributed.tensor import Shard

    mesh = _join(folder, rank)
    domain_parallel.register_custom_ops()  # without CUDA it does not do so itself

    def cut(t: Tensor) -> Tensor:
        return domain_parallel.ShardTensor.from_local(
            t.chunk(RANKS, 2)[rank].clone(), mesh, (Shard(2),), sharding_shapes="chunk", global_shape=t.shape
        )

    return cut(field[0]), cut(field[1])


def _halves(field: Tensor, rank: int, folder: str) -> tuple[Tensor, Tensor]:
    x, y = field.chunk(RANKS, 3)[rank]
    return x.clone(), y.clone()


_CUTS = {"ranks": _shards, "halves": _halves, "peer": _peer_shards}


def _overlapped(step: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        from dpzoo.shard import halo_overlap

        with halo_overlap():
            return step()

    return run


def _model(job: Job) -> nn.Module:
    torch.manual_seed(1)
    if job.model == "stack":
        width = 32
        conv, norm = ({2: nn.Conv2d, 3: nn.Conv3d}[len(job.grid)], nn.GroupNorm)
        layers: list[nn.Module] = [conv(job.channels, width, 3, padding=1)]
        for _ in range(4):
            layers += [norm(8, width), nn.ReLU(), conv(width, width, 3, padding=1)]
        return nn.Sequential(*layers, conv(width, job.channels, 3, padding=1))
    from dpzoo import create_model

    return create_model(job.model, in_chans=job.channels, out_chans=job.channels, ndim=len(job.grid))


def training_step(job: Job, x: Tensor, target: Tensor) -> Callable[[], float]:
    """One optimizer step on a fresh model; returns the loss."""
    model = _model(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        whole = getattr(loss, "full_tensor", None)
        return float(whole() if whole is not None else loss)

    return step


def timed(step: Callable[[], float], level: int) -> Sample:
    reset_peak()
    cpu, wall = time.process_time(), time.perf_counter()
    loss = step()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu, resident("VmHWM") - level, loss)


def resident(what: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most since the last reset; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(what)), 0)


def reset_peak() -> None:
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


# ---------------------------------------------------------------------------------------------- around them
def collect(job: Job) -> list[dict[str, list[Sample]]]:
    """Rounds of samples, per setting one per process; the first round is warm-up and left out."""
    context = mp.get_context("spawn")
    kinds = dict.fromkeys(SETTINGS[name] for name in job.settings)
    keys = [(kind, rank) for kind in kinds for rank in range(1 if kind == "one" else RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = {}, []
        for key in keys:
            home = Path(folder, key[0])
            home.mkdir(exist_ok=True)
            lines[key], theirs = context.Pipe()
            context.set_executable(job.peer if key[0] == "peer" and job.peer else sys.executable)
            processes.append(context.Process(target=serve, args=(job, key, str(home), theirs)))
            processes[-1].start()
            theirs.close()
        try:
            for line in lines.values():
                line.recv()
            rounds = [_round(lines, job, i) for i in range(job.rounds + 1)]
        finally:
            for line in lines.values():
                with suppress(OSError):  # a process that failed is gone
                    line.send(None)
            for process in processes:
                process.join()
    return rounds[1:]


def _round(lines: dict[Key, Connection], job: Job, number: int) -> dict[str, list[Sample]]:
    samples = {}
    names = job.settings
    turn = number % len(names)
    for name in names[turn:] + names[:turn]:
        talking = [line for (kind, _), line in lines.items() if kind == SETTINGS[name]]
        for line in talking:
            line.send(name)
        samples[name] = [line.recv() for line in talking]
    print(f"round {number} of {job.rounds}", file=sys.stderr, flush=True)
    return samples


def summarize(rounds: list[dict[str, list[Sample]]]) -> dict[str, dict[str, float]]:
    """Per setting: medians, and ratios to ``one`` within a round."""
    table = {}
    for name in rounds[0]:
        wall = [max(s.wall for s in r[name]) for r in rounds]
        cpu = [sum(s.cpu for s in r[name]) for r in rounds]
        memory = [max(s.memory for s in r[name]) for r in rounds]
        table[name] = {
            "wall_s": statistics.median(wall),
            "cpu_s": statistics.median(cpu),
            "memory_mib": statistics.median(memory) / 2**20,
            "loss": rounds[0][name][0].loss,
            "speedup": statistics.median(r["one"][0].wall / w for r, w in zip(rounds, wall, strict=True)),
            "cpu_ratio": statistics.median(c / r["one"][0].cpu for r, c in zip(rounds, cpu, strict=True)),
            "memory_ratio": statistics.median(
                m / max(r["one"][0].memory, 1) for r, m in zip(rounds, memory, strict=True)
            ),
        }
    return table


def render(table: dict[str, dict[str, float]]) -> str:
    names = ("wall_s", "speedup", "cpu_s", "cpu_ratio", "memory_mib", "memory_ratio", "loss")
    rows = [f"{'':10}" + "".join(f"{name:>14}" for name in names)]
    for setting, figures in table.items():
        rows.append(f"{setting:10}" + "".join(f"{figures[name]:14.6g}" for name in names))
    return "\n".join(rows)


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small net and grid, three rounds")
    parser.add_argument(
        "--model", default=None, help="a plain U-Net's name, or stack; default unet_small (unet_nano with --quick)"
    )
    parser.add_argument("--grid", type=int, nargs="+", default=None, help="points per dim; 2 or 3 numbers")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--peer", default=None, help="the Python of an environment with PhysicsNeMo; for --model stack")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "unet_step.json")
    options = parser.parse_args()
    quick = options.quick
    job = Job(
        options.model or ("unet_nano" if quick else "unet_small"),
        tuple(options.grid or ((256, 128) if quick else (1024, 768))),
        options.channels,
        options.rounds or (3 if quick else 7),
        options.peer,
    )
    if job.peer and job.model != "stack":
        parser.error("--peer needs --model stack: it refuses strided convolutions and instance norms")
    rounds = collect(job)
    table = summarize(rounds)
    print(f"{job.model} on {job.grid}, {RANKS} ranks, torch {torch.__version__}\n{render(table)}")
    if not job.peer:
        print("peer       not run (--peer names no environment)")
    raw: list[Any] = [{name: [asdict(s) for s in samples] for name, samples in r.items()} for r in rounds]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"job": asdict(job), "table": table, "rounds": raw}, indent=1))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
