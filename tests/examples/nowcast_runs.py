"""Runs of the nowcasting example that take seconds, in this process's pool of ranks or in processes of their own."""

import threading
import time

import torch.distributed as dist

from dpzoo.testing import session_pool
from dpzoo.train.journal import read_journal
from tests.examples.running import load_from, with_manager

NANO = {"name": "stormscope_nano", "embed_dim": 16, "depth": 1, "num_heads": 2, "kernel_size": 3}


def load(name):
    """A module of the example."""
    return load_from("stormscope", f"nowcast.{name}")


def tiny(out, data=None, model=None, **train):
    """A configuration of seconds, on the real sample unless data are given."""
    crop = {"crop": [0, 60, 0, 24], "sun": [0, 1], "area_weights": True}
    return load("settings").Settings.from_dict(
        {
            "out": str(out),
            "data": crop if data is None else data,
            "model": NANO | (model or {}),
            "diffusion": {"steps": 2, "members": 2},
            "optimizer": {"lr": 0.005},
            "train": {"epochs": 1, "max_steps": 4, "validate_every": 0, "progress_bar": False, "ema": 0.5, **train},
            "evaluate": {
                "starts": ["2017-01-01T12:00"],
                "samples": 1,
                "members": 3,
                "batch": 2,
                "thresholds": {"t850": [263.15, 273.15]},
                "figures": False,
            },
        }
    )


def storms(folder, **changes):
    """Data settings of made-up storms on 24 x 32 points."""
    grid = {"rows": 24, "columns": 32, "spacing": 12.0, "frames": 8, "births": 40.0}
    return {
        "stores": [str(folder / "storms.zarr")],
        "channels": ["reflectivity", "brightness_temperature"],
        "past": 2,
        "invariants": ["latitude", "longitude", "orography"],
        "storms": grid | changes.pop("storms", {}),
        "held_out_from": "2024-06-01T13:00",
    } | changes


def on_rank(function, *arguments):
    """Call a function of the example."""
    module, name = function.split(".")
    return with_manager(getattr(load(module), name), *arguments)


def run_on(ranks, function, *arguments):
    """What every rank of the pool finds."""
    return session_pool().run(on_rank, function, *arguments, ranks=ranks, timeout=100.0)


def train_on(ranks, settings):
    """The losses of a run."""
    run_on(ranks, "training.train", settings)
    return [row["loss"] for row in read_journal(settings.out)]


def train_until_a_rank_fails(settings, rank, samples):
    """In a process of its own: train, but one rank fails at its `samples`-th sample, and is slow to end then."""
    task, seen = load("task").Task, []
    describe = task.describe

    def failing(self, sample):
        seen.append(sample.time)
        if len(seen) == samples and dist.get_rank() == rank:
            threading.Thread(target=time.sleep, args=(3,)).start()  # python waits for it: the other rank ends first
            raise OSError(f"the disk of rank {rank} is full")
        return describe(self, sample)

    task.describe = failing
    return load("training").train(settings)
