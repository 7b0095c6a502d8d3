"""How long training waits for a checkpoint: written at once, and in the background. Ranks of gloo, with AdamW's state.

    python benchmarks/checkpoint_save.py [--megabytes 512] [--ranks 2] [--rounds 5] [--parallel ddp fsdp]

`wait` is the time in `save`; for the background also what `settle` and `finish` take. `step` is a training step alone,
and the mean of the steps that ran while a checkpoint was being written; `on disk` is the time from the call of `save`
to a checkpoint that counts. Each round saves once either way, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.parallel import parallelize
from dpzoo.train import CheckpointWriter, RunState, Team, launch
from dpzoo.train.checkpoint import Position

MODES = ("at once", "background")


def build(megabytes: int) -> nn.Module:
    """Weights of so many MB, in layers of 4 MB; a third of what is saved."""
    width = 1024
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(max(1, megabytes // 4))))


def measure(megabytes: int, rounds: int, parallel: str, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by mode and kind, of the slowest rank."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ddp", "domain"))
    team = Team(mesh)
    model = parallelize(build(megabytes // 3), mesh, strategy=parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(8, 1024)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - begin

    step()
    state = RunState(model, optimizer, team)
    found: dict[str, dict[str, list[float]]] = {
        mode: {"wait": [], "step": [], "step while writing": [], "on disk": []} for mode in MODES
    }
    writers = {mode: CheckpointWriter(folder / mode.replace(" ", "_"), team, 1, mode == "background") for mode in MODES}
    for number in range(rounds + 1):
        for mode, writer in writers.items():
            times = _one(writer, state, number, step)
            if number:  # the first round is warm-up
                for name, seconds in times.items():
                    found[mode][name].append(max(team.gather(seconds)))
    for writer in writers.values():
        writer.close()
    return found


def _one(writer: CheckpointWriter, state: RunState, number: int, step: Any) -> dict[str, float]:
    quiet = step()
    begin = time.perf_counter()
    writer.save(number, state.state(Position(number)))
    wait = on_disk = time.perf_counter() - begin
    during = []
    while writer._under_way is not None:
        during.append(step())
        before = time.perf_counter()
        writer.settle()
        wait += time.perf_counter() - before
        on_disk = time.perf_counter() - begin
    return {"wait": wait, "step": quiet, "step while writing": statistics.mean(during or [quiet]), "on disk": on_disk}


def run(megabytes: int, rounds: int, strategies: list[str], name: str) -> int:
    for parallel in strategies:
        folder = Path(name) / parallel
        found = measure(megabytes, rounds, parallel, folder)
        if torch.distributed.get_rank() == 0:
            size = sum(file.stat().st_size for file in (folder / "at_once").rglob("*") if file.is_file())
            print(f"{parallel}, {torch.distributed.get_world_size()} ranks, {size / 1e6:.0f} MB on disk; medians in ms")
            kinds = list(found[MODES[0]])
            print(f"{'':<12}" + "".join(f"{kind:>20}" for kind in kinds))
            for mode, times in found.items():
                print(f"{mode:<12}" + "".join(f"{1e3 * statistics.median(times[kind]):>20.0f}" for kind in kinds))
            at_once, background = (statistics.median(found[mode]["wait"]) for mode in MODES)
            print(f"training waits {at_once / background:.1f} times as long without the background", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of the checkpoint: weights and two moments")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parallel", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="checkpoint_save_"))
    try:
        return launch(run, arguments.ranks, arguments.megabytes, arguments.rounds, arguments.parallel, str(folder))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
