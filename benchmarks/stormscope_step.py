"""Strong scaling of a StormScope training step: one process against two ranks that share the same state of weather.

    python benchmarks/stormscope_step.py            # stormscope_small, 512 x 896; some minutes
    python benchmarks/stormscope_step.py --quick
    python benchmarks/stormscope_step.py --model stormscope_shallow --rounds 3 --steps 2    # the full grid, 1024 x 1792
    python benchmarks/stormscope_step.py --estimate stormscope stormscope_shallow  # activations alone, nothing is run

A step draws noise and its level, denoises (forward), finds the loss, goes backward and makes an AdamW update, with one
thread a process. The settings take turns, round by round, so that a busy machine slows all of them:

    one      one process, plain tensors, the whole grid
    two      two gloo ranks, the grid cut along its rows
    ceiling  two processes at once, each a plain step of a model for half the grid: what this machine can give

Figures are medians over the rounds of ratios taken within a round (several steps in a row; the first is left out): wall
time, processor seconds summed over processes, and the most resident memory of a process above its level before the
model was built (Linux). Beside it stands the most that torch's allocator handed out during a step: resident memory
wavers with what the C library keeps of what was freed.
`value` is the loss for given noise before any update: the same for one process and two ranks.

`--estimate` builds a model on no memory at all and adds up what its forward pass keeps for the backward pass, in
float32, under bfloat16 autocast, and with weights in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from taking_turns import ROOT, Setting, Step, measure, show, summarize
from torch import Tensor, nn

RANKS = 2
LEVEL = 1.5  # the noise level at which `value` is taken
Fields = dict[str, Tensor | None]


@dataclass(frozen=True)
class Job:
    """What is trained: a variant, and arguments of its own."""

    model: str
    options: dict[str, Any]


# ---------------------------------------------------------------------------------------------- what it trains on
def _model(job: Job, rows: int = 1) -> Any:
    """The model of a job, or of the rows of one of `rows` equal parts of its grid."""
    from dpzoo import create_model

    torch.manual_seed(1)
    model: Any = create_model(job.model, **job.options)
    if rows > 1:
        height, width = model.network.x_embedder.img_size
        model = create_model(job.model, **{**job.options, "img_size": (height // rows, width)})
    for block in model.network.blocks:  # adaLN-zero starts every block as the identity: give it something to do
        nn.init.normal_(block.adaLN_modulation[1].weight, std=0.02)
    nn.init.normal_(model.network.final_layer.linear.weight, std=0.02)
    return model


def whole(job: Job, rank: int, mesh: Any) -> Fields:
    """Target, noise and conditions of a sample."""
    from dpzoo.models.diffusion import EDMLoss  # noqa: F401  (what its import holds is not the step's memory)

    with torch.device("meta"):
        model = _model(job)
    network = model.network
    grid = network.x_embedder.img_size
    torch.manual_seed(0)
    chans = {"target": network.in_chans, "noise": network.in_chans, **model.channels}
    given: Fields = {name: torch.randn(1, n, *grid) if n else None for name, n in chans.items()}
    weight = nn.Parameter(torch.ones(1))
    weight.square().backward()  # buffers of a first step are start-up, not the step's memory
    torch.optim.AdamW([weight], fused=True).step()
    return given


def shards(job: Job, rank: int, mesh: Any) -> Fields:
    from dpzoo import scatter

    return {name: None if t is None else scatter(t, mesh, dim=2) for name, t in whole(job, rank, mesh).items()}


def halves(job: Job, rank: int, mesh: Any) -> Fields:
    given = whole(job, rank, mesh).items()
    return {name: None if t is None else t.chunk(RANKS, 2)[rank].clone() for name, t in given}


# ---------------------------------------------------------------------------------------------- the step
def training_step(job: Job, given: Fields, parts: int = 1) -> Step:
    """One optimizer step on a fresh model; returns the loss before all of them, for given noise."""
    from dpzoo.models.diffusion import EDMLoss

    model, loss = _model(job, parts), EDMLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # as in examples/stormscope
    target, noise = given["target"], given["noise"]
    assert target is not None
    assert noise is not None
    conditions = {name: given[name] for name in model.channels}
    with torch.no_grad():
        value = float(loss.at(LEVEL, noise, model, target, **conditions))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss(model, target, **conditions).backward()
        optimizer.step()
        return value

    return step


def part_step(job: Job, given: Fields) -> Step:
    """The same for a model of this process's rows alone."""
    return training_step(job, given, RANKS)


def settings(steps: int) -> tuple[Setting, ...]:
    """In turns of so many steps: each begins with caches and clocks as other processes left them."""
    return (
        Setting("one", training_step, given=whole, steps=steps),
        Setting("two", training_step, RANKS, given=shards, steps=steps),
        Setting("ceiling", part_step, RANKS, given=halves, steps=steps),
    )


# ---------------------------------------------------------------------------------------------- without running it
PRECISIONS: dict[str, tuple[torch.dtype, bool]] = {
    "float32": (torch.float32, False),
    "autocast": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
}
"""Precision -> dtype of the weights, and whether the forward pass runs under bfloat16 autocast."""


def kept_for_backward(job: Job, precision: str) -> int:
    """Bytes of the tensors, besides weights, that a forward pass of one sample keeps for the backward pass."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype, amp = PRECISIONS[precision]
    with torch.device("meta"):
        model = _model(job).to(dtype)
    kept: dict[int, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def pack(t: Tensor) -> Tensor:
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
            return t

        x, sigma, *conditions = model.example_inputs()
        cast = torch.autocast("cpu", torch.bfloat16) if amp else nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), cast:
            answer = model(x, sigma, *conditions)
        assert answer.requires_grad
    return sum(storage.nbytes() for key, storage in kept.items() if key not in weights)


def estimate(models: list[str]) -> None:
    """Print what each model keeps, in GB (1e9 bytes)."""
    print(f"{'kept for the backward pass, GB':<32}" + "".join(f"{name:>12}" for name in PRECISIONS))
    for name in models:
        row = [kept_for_backward(Job(name, {}), precision) / 1e9 for precision in PRECISIONS]
        print(f"{name:<32}" + "".join(f"{value:>12.2f}" for value in row))


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small grid, three rounds")
    parser.add_argument("--model", default="stormscope_small")
    parser.add_argument("--grid", type=int, nargs=2, default=None, help="rows and columns; the model's own by default")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=12, help="steps in a row in a turn; the first is left out")
    parser.add_argument("--estimate", nargs="+", metavar="MODEL", help="only add up the activations of these models")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "stormscope_step.json")
    options = parser.parse_args()
    if options.estimate:
        return estimate(options.estimate)
    grid = options.grid or ((128, 224) if options.quick else None)
    job = Job(options.model, {} if grid is None else {"img_size": tuple(grid)})
    rounds = measure(settings(options.steps), job, options.rounds or (3 if options.quick else 7), allocated=True)
    table = summarize(rounds, "one")
    print(f"{job.model} {job.options}, {RANKS} ranks, torch {torch.__version__}")
    show(table, "one")
    for what in ("memory", "allocated"):
        print(f"{what} of one: " + ", ".join(f"{name} {row[f'{what}_ratio']:.2f}" for name, row in table.items()))
    raw: list[Any] = [{name: [asdict(s) for s in samples] for name, samples in r.items()} for r in rounds]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"job": asdict(job), "table": table, "rounds": raw}, indent=1))
    print(f"written to {options.out}")
    return None


if __name__ == "__main__":
    main()
