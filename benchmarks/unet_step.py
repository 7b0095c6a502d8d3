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
import os
import site
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from taking_turns import ROOT, Setting, Step, measure, show, summarize
from torch import Tensor, nn

RANKS = 2
Pair = tuple[Tensor, Tensor]  # the field and its target


@dataclass(frozen=True)
class Job:
    """What is trained."""

    model: str
    grid: tuple[int, ...]
    channels: int


# ---------------------------------------------------------------------------------------------- what it trains on
def _field(job: Job) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 1, job.channels, *job.grid)


def whole(job: Job, rank: int, mesh: Any) -> Pair:
    x, y = _field(job)
    return _warm(x, y)


def shards(job: Job, rank: int, mesh: Any) -> Pair:
    from dpzoo import scatter

    x, y = _field(job)
    return _warm(scatter(x, mesh, dim=2), scatter(y, mesh, dim=2))


def halves(job: Job, rank: int, mesh: Any) -> Pair:
    x, y = _field(job).chunk(RANKS, 3)[rank]
    return _warm(x.clone(), y.clone())


def peer_shards(job: Job, rank: int, mesh: Any) -> Pair:
    for folder_of_packages in site.getsitepackages():  # a spawned process gets its parent's path, not its own
        site.addsitedir(folder_of_packages)
    from physicsnemo import domain_parallel  # type: ignore[import-not-found]
    from torch.distributed.tensor import Shard

    domain_parallel.register_custom_ops()  # without CUDA it does not do so itself

    def cut(t: Tensor) -> Tensor:
        return domain_parallel.ShardTensor.from_local(
            t.chunk(RANKS, 2)[rank].clone(), mesh, (Shard(2),), sharding_shapes="chunk", global_shape=t.shape
        )

    x, y = _field(job)
    return _warm(cut(x), cut(y))


def _warm(x: Tensor, y: Tensor) -> Pair:
    """The same, after a first step of a single weight: imports and buffers are start-up, not the step's memory."""
    weight = nn.Parameter(torch.ones(1))
    weight.square().backward()
    torch.optim.SGD([weight], lr=0.1).step()
    return x, y


# ---------------------------------------------------------------------------------------------- the step
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


def training_step(job: Job, given: Pair) -> Step:
    """One optimizer step on a fresh model; returns the loss."""
    x, target = given
    model = _model(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        whole = getattr(loss, "full_tensor", None)
        return float((whole() if whole is not None else loss).detach())

    return step


def overlapping(job: Job, given: Pair) -> Step:
    """The same while the rows at the seams travel."""
    from dpzoo.shard import halo_overlap

    step = training_step(job, given)

    def overlapped() -> float:
        with halo_overlap():
            return step()

    return overlapped


def settings(peer: str | None) -> list[Setting]:
    """What takes turns; each in processes of its own, as another model's gradients would count as memory."""
    found = [
        Setting("one", training_step, given=whole),
        Setting("two", training_step, RANKS, given=shards),
        Setting("overlap", overlapping, RANKS, given=shards),
        Setting("ceiling", training_step, RANKS, given=halves),
    ]
    return [*found, Setting("peer", training_step, RANKS, given=peer_shards, python=peer)] if peer else found


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
    )
    if options.peer and job.model != "stack":
        parser.error("--peer needs --model stack: it refuses strided convolutions and instance norms")
    rounds = measure(settings(options.peer), job, options.rounds or (3 if quick else 7))
    table = summarize(rounds, "one")
    print(f"{job.model} on {job.grid}, {RANKS} ranks, torch {torch.__version__}")
    show(table, "one")
    if not options.peer:
        print("peer       not run (--peer names no environment)")
    raw: list[Any] = [{name: [asdict(s) for s in samples] for name, samples in r.items()} for r in rounds]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"job": asdict(job), "table": table, "rounds": raw}, indent=1))
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
