"""A training step of ViT-S and DiT-S, eager against compiled, on one process and on two ranks that share a sample.

    python benchmarks/train_step.py                       # some minutes; prints a table, writes build/train_step.json
    python benchmarks/train_step.py --quick
    python benchmarks/train_step.py --model dit_small_patch4 --rounds 9 --backend aot_eager

A step is forward, mean squared error, backward and an AdamW update, with one thread a process.  The settings take
turns, round by round, so that a busy machine slows all of them:

    one             one process, plain tensors, eager
    one compiled    the same through ``torch.compile(fullgraph=True)``
    two             two gloo ranks, the sample cut along its rows, eager
    two compiled    the same through ``torch.compile(fullgraph=True)``

Figures are medians over the rounds of ratios taken within a round, to ``one``: wall time, processor seconds summed over
processes, and the most resident memory of a process above its level before the model was built (Linux; peak reset
every step).  The first round, in which the graphs are made, is left out.  All settings print the same loss.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from taking_turns import ROOT, Setting, Step, measure, show, summarize
from torch import Tensor, nn

MODELS = ("vit_small_patch16", "dit_small_patch4")
RANKS = 2


@dataclass(frozen=True)
class Job:
    """What is trained; the grid is in patches."""

    model: str
    patches: tuple[int, int]
    backend: str
    depth: int | None

    def build(self) -> nn.Module:
        """The model, the same in every process."""
        from dpzoo import create_model

        torch.manual_seed(1)
        patch = int(self.model.rsplit("patch", 1)[1])
        size = {"img_size": tuple(n * patch for n in self.patches), "in_chans": 4, "out_chans": 4}
        head = {"head": "dense"} if self.model.startswith("vit") else {}
        return create_model(self.model, **size, **head, **({} if self.depth is None else {"depth": self.depth}))


def eager(job: Job, rank: int, mesh: Any) -> Step:
    """A step of the model as it is."""
    model = job.build()
    return _step(job, model, model, mesh)


def compiled(job: Job, rank: int, mesh: Any) -> Step:
    """A step of the compiled model."""
    model = job.build()
    return _step(job, model, torch.compile(model, fullgraph=True, dynamic=False, backend=job.backend), mesh)


def _step(job: Job, model: nn.Module, run: Any, mesh: Any) -> Step:
    inputs = _inputs(job, model, mesh)
    target = inputs[0].detach() * 0.5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (run(*inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        return round(float(loss.detach()), 5)

    return step


def _inputs(job: Job, model: Any, mesh: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    field, *conditions = model.example_inputs()
    field = torch.randn_like(field)
    if mesh is not None:
        from dpzoo import scatter

        field = scatter(field, mesh, dim=2)
    return field, *conditions


SETTINGS = [
    Setting("one", eager),
    Setting("one compiled", compiled),
    Setting("two", eager, RANKS),
    Setting("two compiled", compiled, RANKS),
]


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two blocks on a small grid, three rounds")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: both")
    parser.add_argument("--patches", type=int, nargs=2, default=None, help="patches a side; default 32 32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "train_step.json")
    options = parser.parse_args()
    quick = options.quick
    for model in options.model or MODELS:
        patches = tuple(options.patches or ((16, 16) if quick else (32, 32)))
        job = Job(model, patches, options.backend, 2 if quick else None)
        table = summarize(measure(SETTINGS, job, options.rounds or (3 if quick else 5)), "one")
        print(
            f"{model}, {patches[0]} x {patches[1]} patches, {RANKS} ranks, {options.backend}, torch {torch.__version__}"
        )
        show(table, "one", options.out.with_stem(f"{options.out.stem}_{model}"))


if __name__ == "__main__":
    main()
