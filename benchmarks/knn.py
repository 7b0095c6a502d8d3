"""Nearest neighbours of every point of a cloud: one k-d tree in one process, against the ring of `dpzoo.ops.knn`.

    python benchmarks/knn.py            # a minute or two; prints tables, writes build/knn.json
    python benchmarks/knn.py --quick
    python benchmarks/knn.py --points 1000000 --k 16 --ranks 2 4

    scipy          scipy.spatial.cKDTree in one process, built and asked
    one            `dpzoo.ops.knn` in one process: the same, plus ties in order of the index
    ring n         n gloo ranks, points in random order: every block of points is searched by every rank
    ring n, near   the same, points ordered along one coordinate: most blocks are ruled out by their bounding box

Memory is what a process holds at most above its start, the points it reads included.
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
    """What is searched."""

    points: int
    k: int


_STEP = 2654435761  # a prime: multiplied by it, the row numbers change places


def _rows(job: Job, begin: int, end: int, ordered: bool) -> Tensor:
    """Rows of the cloud, made without the others: in random order, or the same points ordered by x."""
    row = torch.arange(begin, end)
    if ordered:
        row = (row - 12345) * pow(_STEP, -1, job.points) % job.points
    x = (row * _STEP + 12345) % job.points / job.points
    y, z = ((row * factor) % 1000003 / 1000003 for factor in (48271, 69621))
    return torch.stack([x, y, z], 1).double()


def scipy(job: Job, rank: int, mesh: Any) -> Step:
    from scipy.spatial import cKDTree

    cloud = _rows(job, 0, job.points, False).numpy()
    return lambda: round(float(cKDTree(cloud, balanced_tree=False).query(cloud, k=job.k)[0].sum()), 6)


def one(job: Job, rank: int, mesh: Any) -> Step:
    from dpzoo import ops

    cloud = _rows(job, 0, job.points, False)
    return lambda: round(float(ops.knn(cloud, cloud, job.k).distances.sum()), 6)


def ring(job: Job, rank: int, mesh: Any, ordered: bool = False) -> Step:
    from dpzoo import ops
    from dpzoo.shard import Shard, ShardTensor

    n = mesh.size()
    borders = [job.points * r // n for r in range(n + 1)]
    shapes = {0: tuple((b - a, 3) for a, b in zip(borders, borders[1:], strict=False))}
    local = _rows(job, borders[rank], borders[rank + 1], ordered)
    cloud = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes=shapes)
    return lambda: round(float(ops.knn(cloud, cloud, job.k).distances.sum()), 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=400_000)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--quick", action="store_true", help="5000 points, 2 rounds: does it run?")
    args = parser.parse_args()
    job = Job(5000 if args.quick else args.points, args.k)
    settings = [Setting("scipy", scipy), Setting("one", one)]
    for n in args.ranks:
        settings += [Setting(f"ring {n}", ring, n), Setting(f"ring {n}, near", partial(ring, ordered=True), n)]
    table = summarize(measure(settings, job, 2 if args.quick else args.rounds), "scipy")
    print(job)
    show(table, "scipy", ROOT / "build" / "knn.json")


if __name__ == "__main__":
    main()
