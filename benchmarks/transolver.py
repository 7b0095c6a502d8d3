"""Scaling of a Transolver training step on a point cloud that is cut over ranks.

    python benchmarks/transolver.py            # some minutes; prints tables, writes build/transolver.json
    python benchmarks/transolver.py --quick
    python benchmarks/transolver.py --points 400000 --slices 64 --ranks 1 2 4

A step is forward, mean squared error, backward and an SGD update, in float32 with one thread a process.

Strong scaling, of one cloud:

    one      one process, plain tensors, all points
    two      two gloo ranks, the points cut
    ceiling  two processes at once, each a plain step on its half: what this machine can give

Weak scaling: ``weak n`` is n ranks with ``--points / 2`` points each. More ranks than cores share them, so that only
those up to the number of cores say something; others run when ``--ranks`` asks for them.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from taking_turns import ROOT, Setting, Step, measure, show, summarize
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """What is trained."""

    points: int
    width: int
    depth: int
    slices: int


def training_step(job: Job, x: Tensor, target: Tensor) -> Step:
    """One optimizer step on a fresh model; returns the loss."""
    from dpzoo.models import Transolver

    torch.manual_seed(1)
    model = Transolver(3, 4, embed_dim=job.width, depth=job.depth, num_slices=job.slices)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        return round(float(loss.detach()), 7)

    return step


def _cloud(points: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.rand(1, points, 3), torch.randn(1, points, 4)


def alone(job: Job, rank: int, mesh: Any) -> Step:
    return training_step(job, *_cloud(job.points))


def half(job: Job, rank: int, mesh: Any) -> Step:
    x, target = (t.chunk(2, 1)[rank].clone() for t in _cloud(job.points))
    return training_step(job, x, target)


def cut(job: Job, rank: int, mesh: Any, points: int | None = None) -> Step:
    from dpzoo import scatter

    x, target = (scatter(t, mesh, dim=1) for t in _cloud(job.points if points is None else points))
    return training_step(job, x, target)


def settings(job: Job, ranks: list[int]) -> list[Setting]:
    """Strong scaling, then weak scaling."""
    strong = [Setting("one", alone), Setting("two", cut, 2), Setting("ceiling", half, 2)]
    each = job.points // 2
    return strong + [Setting(f"weak {n}", partial(cut, points=n * each), n) for n in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--slices", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", help="weak scaling on so many ranks (default: up to the cores)")
    parser.add_argument("--quick", action="store_true", help="2000 points, 2 rounds: does it run?")
    args = parser.parse_args()
    cores = os.cpu_count() or 1
    ranks = args.ranks if args.ranks is not None else [n for n in (1, 2, 4) if n <= cores]
    job = Job(2000 if args.quick else args.points, args.width, args.depth, args.slices)
    rounds = measure(settings(job, ranks), job, 2 if args.quick else args.rounds)
    table = summarize(rounds, "one")
    print(job)
    show(table, "one", ROOT / "build" / "transolver.json")
    for name in [n for n in table if n.startswith("weak")][1:]:
        growth = table[name]["wall_s"] / table["weak 1"]["wall_s"] if "weak 1" in table else float("nan")
        print(f"{name}: {growth:.2f}x the step time of weak 1")


if __name__ == "__main__":
    main()
