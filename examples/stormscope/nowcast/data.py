"""The samples of a run: split over time, loaders and statistics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes import DataError
from dpzoo.datapipes.agreement import raise_together
from dpzoo.datapipes.grid import (
    GridDataset,
    GridLoader,
    GridStatistics,
    Invariants,
    Storms,
    Stream,
    compute_grid_statistics,
    write_storms,
)
from dpzoo.demo.data import STORE
from dpzoo.train import Team
from nowcast.settings import DataSettings, Settings

EMBEDDED = {"dpzoo:era5": STORE}


def make_stores(data: DataSettings, mesh: DeviceMesh | None, team: Team) -> None:
    """Write the made-up storms if they are wanted and not there; one rank writes, all wait.

    Raises:
        DataError: on all ranks, when there is not exactly one store or it cannot be written.
    """
    if data.storms is None:
        return
    error: Exception | None = None
    if team.is_first:
        try:
            (path,) = _paths(data.stores)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_storms(path, Storms(**data.storms))
        except Exception as failure:
            error = failure
    raise_together(error, mesh)


def whole_dataset(data: DataSettings, leads: int = 1) -> GridDataset:
    """Every time: `past` frames, the states `1 ... leads` steps later, the sun, and what does not change."""
    states = Stream(
        _paths(data.stores),
        data.channels,
        offsets=tuple(range(1 - data.past, 1)),
        log1p=data.log1p,
        masked=data.masked,
        invalid_values=data.invalid_values,
    )
    suns = sorted({offset + lead for offset in data.sun for lead in range(leads)})
    static = (*_paths(data.static_stores), *states.stores) if set(data.invariants) - {"latitude", "longitude"} else ()
    return GridDataset(
        {"past": states, "next": replace(states, offsets=tuple(range(1, leads + 1)))},
        invariants=Invariants(tuple(dict.fromkeys(static)), data.invariants) if data.invariants else None,
        cos_zenith=tuple(suns),
        crop=data.crop,
    )


def split(settings: Settings) -> tuple[GridDataset, GridDataset]:
    """Datasets to train on and to validate with: those whose next state is before `held_out_from`, and the others."""
    whole = whole_dataset(settings.data)
    border = np.datetime64(settings.data.held_out_from, "s") - whole.index.step
    seeded = replace(whole, seed=settings.train.seed)
    return replace(seeded, stop=border), replace(seeded, start=border)


def starts_of(settings: Settings) -> list[tuple[np.datetime64, int]]:
    """(start, leads) of the forecasts to evaluate.

    Raises:
        DataError: a start that is not among the times of the data.
    """
    asked = settings.evaluate
    index = whole_dataset(settings.data).index
    border = np.datetime64(settings.data.held_out_from, "s") - index.step
    starts = (
        index.times[index.times >= border]
        if asked.starts is None
        else np.array([np.datetime64(start, "s") for start in asked.starts])
    )
    for start in starts:
        if start not in index.times:
            raise DataError(
                f"evaluate.starts: no forecast can start at {start}; the first start is {index.times[0]}, the last "
                f"{index.times[-1]}"
            )
    last = index.timelines["next"].times[-1]
    return [(start, min(asked.leads, int((last - start) / index.step))) for start in starts]


def forecast_dataset(settings: Settings, statistics: GridStatistics, start: np.datetime64, leads: int) -> GridDataset:
    """The samples of one start, with the true states of all leads."""
    whole = whole_dataset(settings.data, leads)
    one = np.timedelta64(1, "s")
    return replace(whole, start=start, stop=start + one, step=whole.index.step, statistics=statistics, gaps="skip")


def make_loader(settings: Settings, dataset: GridDataset, mesh: DeviceMesh | None, *, training: bool) -> GridLoader:
    """Cut along rows at borders of patches; another order in each epoch for training."""
    return GridLoader(
        dataset, mesh, multiple=settings.model.get("patch_size", 4), shuffle=training, prefetch=settings.data.prefetch
    )


def statistics_of(settings: Settings, training: GridDataset, mesh: DeviceMesh | None, team: Team) -> GridStatistics:
    """Of the training states: read from the run's folder, or computed by all ranks and written there."""
    file = settings.out / "statistics.json"
    if not team.from_first(file.exists()):
        found = compute_grid_statistics(training, mesh)
        if team.is_first:
            settings.out.mkdir(parents=True, exist_ok=True)
            found.save(file)
    text = team.from_first(GridStatistics.load(file) if team.is_first else None)
    assert text is not None
    return text


def _paths(names: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(EMBEDDED.get(name, Path(name)) for name in names)
