"""Is the reading of a grid hidden behind the compute? Epochs with samples read ahead, read when asked, not read at all.

    python benchmarks/grid_loader.py            # some minutes; prints a table, writes build/grid_loader.json
    python benchmarks/grid_loader.py --quick

Made-up storms on 1024 x 1792 are written once to a temporary store. One process then reads the block of one of
``--ranks`` ranks (reading needs no communication) and runs a small convolutional step of one thread on it. Settings
take turns within a round, each for a whole epoch, its first and unhidden read included:

    compute     the step alone, on one sample that is kept
    when asked  the sample is read, then the step runs
    ahead       worker threads read two samples ahead
    processes   the same with spawned processes, their start left out

``hidden`` is the part of the reading time that reading ahead saves; it needs a free core beside the one that computes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]


def make_step(width: int) -> Callable[[Tensor, Tensor], float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(6, width, 4, 4), nn.GELU(), nn.Conv2d(width, width, 3, padding=1), nn.GELU())
    head = nn.ConvTranspose2d(width, 3, 4, 4)

    def step(x: Tensor, y: Tensor) -> float:
        loss = (head(net(x)) - y).square().mean()
        loss.backward()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=int, nargs=2, default=(1024, 1792))
    parser.add_argument("--frames", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2, help="read the block of one of so many ranks")
    parser.add_argument("--width", type=int, default=96, help="channels of the step: how long it computes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small grid and two rounds")
    options = parser.parse_args()
    if options.quick:
        options.grid, options.frames, options.rounds, options.width = (128, 256), 6, 2, 16
    torch.set_num_threads(1)
    table = run(options)
    samples = options.frames - 2
    read = table["when asked"]["wall_s"] - table["compute"]["wall_s"]
    for name, row in table.items():
        hidden = f"  hidden {(table['when asked']['wall_s'] - row['wall_s']) / read:5.0%}" if "read_mib" in row else ""
        print(f"{name:<12}{row['wall_s'] / samples:9.4f} s a sample{row['cpu_s'] / samples:9.4f} cpu s{hidden}")
    if "read_mib" in table["ahead"]:
        print(f"read from disk: {table['ahead']['read_mib'] / samples:.2f} MiB a sample and rank")
    out = ROOT / "build" / "grid_loader.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"options": vars(options), "table": table}, indent=1, default=str))


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of wall time and CPU time (all threads of this process) of an epoch, per setting."""
    from dpzoo.datapipes.grid import GridDataset, GridLoader, Storms, Stream, compute_grid_statistics, write_storms

    rows, columns = options.grid
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = Path(folder) / "storms.zarr"
        write_storms(store, Storms(rows, columns, frames=options.frames))
        states = Stream((store,), offsets=(-1, 0))
        dataset = GridDataset({"past": states, "next": replace(states, offsets=(1,))})
        dataset = replace(
            dataset, statistics=compute_grid_statistics(dataset), crop=(0, rows // options.ranks, 0, columns)
        )
        loaders = {
            "when asked": GridLoader(dataset, multiple=4, prefetch=0),
            "ahead": GridLoader(dataset, multiple=4, prefetch=2),
            "processes": GridLoader(dataset, multiple=4, prefetch=2, workers="process"),
        }
        for loader in loaders.values():
            stack.enter_context(loader)
        kept = next(iter(loaders["when asked"]))
        step = make_step(options.width)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("compute", *loaders)}
        for number in range(options.rounds + 1):  # the first round is warm-up: it starts the workers
            for name in times:
                wall, cpu = time.perf_counter(), time.process_time()
                epoch = loaders[name].epoch(number) if name in loaders else [kept] * len(dataset)
                for sample in epoch:
                    step(sample.stacked("past"), sample.stacked("next"))
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
        table = {}
        for name, found in times.items():
            wall, cpu = (statistics.median(column) for column in zip(*found[1:], strict=True))
            table[name] = {"wall_s": wall, "cpu_s": cpu}
            if name in loaders:
                epochs = options.rounds + 1 + (name == "when asked") / len(dataset)
                table[name]["read_mib"] = loaders[name].bytes_read / 2**20 / epochs
        return table


if __name__ == "__main__":
    main()
