"""What the reduction of weight gradients adds to a training step, for each way there is.

    python benchmarks/gradient_reduction.py          # some minutes; prints tables, writes build/gradient_reduction.json
    python benchmarks/gradient_reduction.py --layers 96 --width 512 --rounds 21

A step is forward and backward of a chain of linear layers on a few rows, so that hardly anything but the reduction
takes time, on gloo ranks with one thread each.  Settings take turns, round by round, so that a busy machine slows all
of them; figures are medians over the rounds of differences within a round, in milliseconds a step.

Two ranks that share a sample:

    none       no reduction at all (wrong gradients): what the others are measured against
    allreduce  none, then one all-reduce of as many bytes, from a buffer that is there: the yardstick
    eager      the gradient of each weight is summed as soon as it is there
    bucket     the default: asynchronous sums of up to 25 MB, finished at the end of backward

Four ranks, two replicas of two:

    none, allreduce   as above, over all four
    domain            sums over the domain one by one, then DDP over the replicas
    flat              DDP over all four as the only reduction: the default of ``parallelize``
    fsdp              the same with FSDP2, which also gathers the weights, twice
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from taking_turns import ROOT, Setting, Step, measure
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WAYS = {2: ("none", "allreduce", "eager", "bucket"), 4: ("none", "allreduce", "domain", "flat", "fsdp")}
ROWS = 8


@dataclass(frozen=True)
class Job:
    """A chain of layers; `repeat` steps make a sample."""

    layers: int
    width: int
    repeat: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(self.width, self.width) for _ in range(self.layers)])


def build(way: str, job: Job, rank: int, mesh: DeviceMesh) -> Step:
    from dpzoo import scatter
    from dpzoo.parallel import parallelize
    from dpzoo.shard import grad_sync
    from dpzoo.shard.averaging import average_later

    if mesh.size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    domain = mesh["domain"]
    model: nn.Module = job.model()
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
    if way in ("domain", "flat"):
        model = parallelize(model, mesh, reduction=way)
    elif way == "fsdp":
        model = parallelize(model, mesh, strategy="fsdp")
    elif way in ("none", "allreduce"):  # nobody keeps the promise
        average_later(model.parameters(), {domain.get_group().group_name: domain.size()})
    mode = {"none": "flat", "allreduce": "flat", "eager": "eager"}.get(way)
    x = scatter(torch.randn(ROWS, job.width), domain, dim=0)

    def step() -> None:
        for _ in range(job.repeat):
            model.zero_grad(set_to_none=True)
            with nullcontext() if mode is None else grad_sync(mode):
                loss = (model(x) ** 2).mean()
            loss.backward()
            if way == "allreduce":
                dist.all_reduce(buffer)

    return step


def report(job: Job, ranks: int, rounds: int) -> dict[str, dict[str, float]]:
    """Per way the median over the rounds of what it adds to a step, and of its ratio to one all-reduce."""
    settings = [Setting(way, partial(build, way), ranks) for way in WAYS[ranks]]
    found = measure(settings, job, rounds)
    wall = {way: [max(s.wall for s in r[way]) / job.repeat * 1e3 for r in found] for way in WAYS[ranks]}
    added = {way: [w - n for w, n in zip(wall[way], wall["none"], strict=True)] for way in wall}
    yardstick = statistics.median(added["allreduce"])
    return {
        way: {
            "step_ms": statistics.median(wall[way]),
            "added_ms": statistics.median(added[way]),
            "ratio": statistics.median(added[way]) / yardstick,
        }
        for way in wall
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(WAYS), default=sorted(WAYS))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gradient_reduction.json")
    args = parser.parse_args()
    job = Job(args.layers, args.width, args.repeat)
    megabytes = sum(p.numel() for p in job.model().parameters()) * 4 / 1e6
    tables: dict[str, Any] = {"job": asdict(job) | {"megabytes": megabytes}}
    for ranks in args.ranks:
        table = tables[f"{ranks} ranks"] = report(job, ranks, args.rounds)
        print(f"\n{ranks} ranks, {2 * job.layers} weights, {megabytes:.1f} MB, medians of {args.rounds} rounds")
        print(f"{'':<12}{'step ms':>10}{'added ms':>10}{'of one all-reduce':>20}")
        for way, row in table.items():
            print(f"{way:<12}{row['step_ms']:>10.1f}{row['added_ms']:>10.1f}{row['ratio']:>19.2f}x")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(tables, indent=1))


if __name__ == "__main__":
    main()
