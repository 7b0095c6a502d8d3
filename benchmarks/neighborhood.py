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
processes. `value` is a sum over the output, the same for one process and two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from taking_turns import ROOT, Setting, Step, measure, show, summarize
from torch import Tensor

RANKS = 2


@dataclass(frozen=True)
class Job:
    """What is computed."""

    grid: tuple[int, ...]
    kernel: int
    dilation: int
    heads: int
    head_dim: int
    backward: bool


def whole(job: Job, rank: int, mesh: Any) -> list[Tensor]:
    """Queries, keys and values."""
    import dpzoo.ops  # noqa: F401  (what its import holds is not the call's memory)

    torch.manual_seed(0)
    return [torch.randn(1, *job.grid, job.heads, job.head_dim) for _ in range(3)]


def halves(job: Job, rank: int, mesh: Any) -> list[Tensor]:
    return [t.chunk(RANKS, 1)[rank].clone() for t in whole(job, rank, mesh)]


def shards(job: Job, rank: int, mesh: Any) -> list[Tensor]:
    from dpzoo import scatter

    return [scatter(t, mesh, dim=1) for t in whole(job, rank, mesh)]


def attention(job: Job, given: list[Tensor]) -> Step:
    """The call, on leaves of its own; returns a sum that tells whether the result is right."""
    from dpzoo.ops import na2d

    leaves = [t.detach().requires_grad_(job.backward) for t in given]
    # A fixed weight: without one the gradients of a sum over values would be trivial.
    weight = torch.linspace(-1, 1, job.head_dim)

    def call() -> float:
        for t in leaves:
            t.grad = None
        total = (na2d(*leaves, job.kernel, 1, job.dilation) * weight).square().sum()
        if job.backward:
            total.backward()
        return float(total.detach())

    return call


SETTINGS = [
    Setting("one", attention, given=whole),
    Setting("two", attention, RANKS, given=shards),
    Setting("ceiling", attention, RANKS, given=halves),
]


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
        )
        rounds = measure(SETTINGS, job, options.rounds or (3 if quick else 9))
        table = summarize(rounds, "one")
        what = "forward and backward" if backward else "forward"
        print(f"na2d, {what}, {job.grid}, kernel {job.kernel}, {RANKS} ranks, torch {torch.__version__}")
        show(table, "one")
        raw = [{name: [asdict(s) for s in samples] for name, samples in r.items()} for r in rounds]
        found.append({"job": asdict(job), "table": table, "rounds": raw})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
