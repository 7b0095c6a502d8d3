"""Ensembles of forecasts: made by all ranks, and written, each rank its own rows, by `sample.py`."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from dpzoo.datapipes.grid import GridLayout, GridSample, write_fields
from nowcast.data import forecast_dataset, make_loader, starts_of
from nowcast.scores import as_array
from nowcast.settings import EvaluateSettings
from nowcast.training import Setup, load_run


@dataclass(frozen=True)
class Forecast:
    """An ensemble and what came, in physical units, cut over the ranks.

    Attributes:
        fields: `(leads, members, C, y, x)`, NaN where nothing is forecast.
        truth: `(leads, C, y, x)`; now: `(C, y, x)`, the newest state that it saw. Both are NaN where there is no value.
        held_out: per lead: the true state was not trained on.
    """

    sample: GridSample
    layout: GridLayout
    fields: Tensor
    truth: Tensor
    now: Tensor
    held_out: tuple[bool, ...]

    @property
    def title(self) -> str:
        """Start, and analysis member if there is one."""
        return f"{str(self.sample.time)[:16]}" + (f", member {self.sample.member}" if self.sample.member else "")


def forecasts(made: Setup) -> Iterator[Forecast]:
    """As `settings.evaluate` says, one in memory at a time."""
    task, asked = made.task, made.task.settings.evaluate
    border = np.datetime64(task.settings.data.held_out_from, "s")
    for start, leads in starts_of(task.settings):
        dataset = forecast_dataset(task.settings, task.statistics, start, leads)
        with make_loader(task.settings, dataset, made.mesh, training=False) as loader:
            for number, sample in enumerate(islice(loader.epoch(0), asked.samples)):
                seed = asked.seed + 7919 * number
                yield Forecast(
                    sample,
                    loader.layout,
                    task.forecast(made.model, sample, leads, asked.members, seed, asked.batch),
                    task.physical("next", sample["next"], sample.masks.get("next")),
                    task.physical("past", sample["past"], sample.masks.get("past"))[-1],
                    tuple(bool(time >= border) for time in sample.times["next"]),
                )


def sample(out: Path, asked: EvaluateSettings) -> int:
    """What each rank of `sample.py` runs: a zarr store per member in `out/forecasts/START/`; no rank holds a field."""
    made, checkpoint = load_run(out, asked)
    for forecast in forecasts(made):
        label = str(forecast.sample.time).replace(":", "") + (
            f"_{forecast.sample.member}" * bool(forecast.sample.member)
        )
        folder = out / "forecasts" / label
        if made.team.is_first:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        made.team.from_first(None)
        latitude, longitude = coordinates(made, forecast.sample)
        for member in range(asked.members):
            write_fields(
                folder / f"member_{member:03d}.zarr",
                forecast.fields[:, member],
                forecast.sample.channels["next"],
                forecast.sample.times["next"],
                forecast.layout,
                made.mesh,
                latitude,
                longitude,
            )
        if made.team.is_first:
            print(
                f"{folder}: {asked.members} members, {len(forecast.fields)} steps, from {checkpoint.name}", flush=True
            )
    return 0


def coordinates(made: Setup, sample: GridSample) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Latitude and longitude `(y, x)` in degrees, if the model is told of both; None otherwise."""
    names = made.task.settings.data.invariants
    if not {"latitude", "longitude"} <= set(names):
        return None, None
    fields = as_array(made.task.statistics.denormalise("invariants", sample["invariants"]))
    return fields[names.index("latitude")], fields[names.index("longitude")]
