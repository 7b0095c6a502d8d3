"""The nowcasting example around pixels without a value: a hole in the radar's coverage, and real images with gaps."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpzoo.datapipes.grid import GridDataset, GridLoader, Storms, Stream, open_grid, write_fields
from dpzoo.datapipes.grid.convert import coordinates_of
from dpzoo.datapipes.grid.storms import unseen
from dpzoo.train.journal import read_journal
from tests.examples.nowcast_runs import load, run_on, storms, tiny, train_on

zarr = pytest.importorskip("zarr")
DATA = Path(__file__).resolve().parents[1] / "datapipes" / "grid" / "data"
EVENTS = {"reflectivity": (20.0, 35.0), "brightness_temperature": (280.0,)}


def scattered(out, data, model=None, **train):
    """A run on masked data, with its forecasts from the third time on."""
    settings = tiny(out, {**data, "masked": True}, model, max_steps=None, **train)
    asked = replace(settings.evaluate, starts=None, leads=2, thresholds=EVENTS, window=3)
    return replace(settings, evaluate=asked)


def radar(folder, **changes):
    """Storms without reflectivity in a disc, which the rows of one rank cut."""
    return storms(folder, storms={"blind": 60.0}, **changes)


def hole(rows=24, columns=32):
    return unseen(Storms(rows, columns, spacing=12.0, blind=60.0))


def evaluated(ranks, settings):
    run_on(ranks, "evaluation.evaluate", settings.out, settings.evaluate)
    return json.loads((settings.out / "evaluation.json").read_text())["forecasts"]


def assert_alike(one, other, tolerance=1e-3):
    """Nested lists and mappings of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key], tolerance)
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_alike(a, b, tolerance)
    else:
        assert other == (pytest.approx(one, rel=tolerance, abs=1e-5) if isinstance(one, float) else one)


COUNTED = ("ranks", "hits", "misses", "false_alarms")
"""Scores that count points; the forecasts of 1 and 2 ranks differ by rounding, which takes none over a threshold."""


def assert_same_scores(one, other):
    for a, b in zip(one, other, strict=True):
        for channel in a:
            events = [{"thresholds": EVENTS[channel]} | scores[channel].pop("events") for scores in (a, b)]
            for name in COUNTED:
                found = [
                    (e if name in e else scores[channel]).pop(name) for e, scores in zip(events, (a, b), strict=True)
                ]
                assert found[0] == found[1], (channel, name)
            assert_alike(*events, tolerance=1e-6)
            assert_alike(a[channel], b[channel], 5e-3)


# ---------------------------------------------------------------------- a hole in the coverage
@pytest.mark.parametrize("predict", ["change", "state"])
def test_a_hole_in_the_coverage_from_the_store_to_the_scores(predict, tmp_path):
    """Losses, forecasts and scores are finite, the same on 1 and 2 ranks, and blind to what the store has there."""
    radar_runs = {}
    for ranks in (1, 2):
        settings = scattered(tmp_path / str(ranks), radar(tmp_path), validate_every=1)
        settings = replace(settings, predict=predict)
        losses = train_on(ranks, settings)
        (validation,) = read_journal(settings.out, "validation")
        radar_runs[ranks] = losses, {n: validation[n] for n in ("loss", "crps", "rmse", "spread")}
        assert np.isfinite([*losses, *radar_runs[ranks][1].values()]).all()
        found = evaluated(ranks, settings)
        radar_runs[ranks] += ([row["scores"] for row in found],)
    assert radar_runs[2][0] == pytest.approx(radar_runs[1][0], rel=1e-4)
    assert_alike(radar_runs[1][1], radar_runs[2][1])
    for scores in radar_runs[1][2]:
        assert all(np.isfinite(v).all() for c in scores.values() for n, v in c.items() if n != "events")
    # The same data with a number for "no value", read as such.
    group = zarr.open_group(tmp_path / "storms.zarr")
    group["fields"][:] = np.nan_to_num(group["fields"][:], nan=-999.0)
    other = replace(settings, out=tmp_path / "numbers", data=replace(settings.data, invalid_values=(-999.0,)))
    assert train_on(2, other) == radar_runs[2][0]
    assert_alike([row["scores"] for row in evaluated(2, other)], radar_runs[2][2], 1e-9)
    assert_same_scores(radar_runs[1][2], radar_runs[2][2])


def test_forecasts_are_written_with_their_holes(tmp_path):
    settings = scattered(tmp_path / "run", radar(tmp_path))
    train_on(2, settings)
    run_on(2, "forecasting.sample", settings.out, settings.evaluate)
    stores = sorted((settings.out / "forecasts").glob("*/*.zarr"))
    assert len(stores) == 3 * 2
    for store in stores:
        fields = zarr.open_group(store)["fields"][...]
        assert (np.isnan(fields[:, 0]) == hole()).all()
        assert np.isfinite(fields[:, 1]).all()
    with GridLoader(GridDataset({"x": Stream((stores[0],), masked=True)}), shuffle=False) as loader:
        assert (~next(iter(loader)).masks["x"][0, 0].numpy() == hole()).all()


def test_a_mask_token_takes_the_place_of_what_no_channel_shows(tmp_path):
    """Radar alone: the network is told where it is blind, on any number of ranks; not where satellites see."""
    alone = radar(tmp_path, channels=["reflectivity"])
    runs = [
        train_on(ranks, scattered(tmp_path / f"{ranks}{token}", alone, {"mask_token": token}))
        for ranks, token in ((1, True), (3, True), (1, False))
    ]
    assert runs[1] == pytest.approx(runs[0], rel=1e-4)
    assert runs[2] != pytest.approx(runs[0], rel=1e-4)
    task, given = load("task"), torch.ones(3, 2, 4, 5, dtype=torch.bool)
    given[:, 0, 1] = False  # one channel is blind: nothing is hidden
    given[:, :, 2] = False
    given[1, 1, 2, 3] = True  # an older frame has a value
    sample = load("data").GridLoader(GridDataset({"past": Stream((tmp_path / "storms.zarr",), masked=True)})).epoch(0)
    settings = scattered(tmp_path / "x", {**alone, "sun": [], "invariants": []}, {"mask_token": True})
    made = task.Task(settings, None, torch.ones(2, 1, 1)).conditions(next(sample), torch.zeros(1), given, 0)
    wanted = torch.zeros(1, 1, 4, 5, dtype=torch.bool)
    wanted[:, :, 2] = True
    wanted[0, 0, 2, 3] = False
    assert torch.equal(made["invalid"], wanted)


# ---------------------------------------------------------------------- scores
def test_scores_are_those_of_the_points_that_are_seen():
    """Points taken out altogether give the same numbers; what the fields hold where nothing is seen is of no matter."""
    scores = load("scores").score
    rng = np.random.default_rng(0)
    truth, now, ensemble = (torch.from_numpy(rng.normal(size=s)) for s in ((2, 8, 9), (2, 8, 9), (4, 2, 8, 9)))
    weights = torch.from_numpy(rng.uniform(0.5, 2.0, size=(1, 8, 9)))
    seen = torch.ones(2, 8, 9, dtype=torch.bool)
    seen[0, :, 6:] = False  # of the first channel, the last columns
    options = {"thresholds": {"a": [0.2], "b": [0.2]}, "window": 1}
    blank = [torch.where(seen, t, torch.nan) for t in (ensemble, truth, now)]
    found = scores(*blank, ("a", "b"), weights=weights, seen=seen, **options)
    part = scores(ensemble[..., :6], truth[..., :6], now[..., :6], ("a", "b"), weights=weights[..., :6], **options)
    whole = scores(ensemble, truth, now, ("a", "b"), weights=weights, **options)
    for channel, wanted in (("a", part["a"]), ("b", whole["b"])):
        for name in ("crps", "mse", "variance", "persistence_mse", "ranks", "events"):
            assert_alike(found[channel][name], wanted[name], 1e-9)
    assert_alike(found["b"], whole["b"], 1e-9)
    assert np.isfinite(found["a"]["spectrum"]).all()
    nothing = scores(*blank, ("a", "b"), seen=seen & torch.tensor([False, True]).view(2, 1, 1), **options)
    assert np.isnan(nothing["a"]["crps"]) and np.isfinite(nothing["b"]["crps"])
    mean = load("scores").summarise([nothing["a"], found["a"]])
    assert mean["crps"] == pytest.approx(found["a"]["crps"])


# ---------------------------------------------------------------------- real images
def drifting(path, values, latitude, longitude, frames=5):
    """Five frames of one real field, which drifts by two columns a frame; the gaps drift too."""
    times = np.datetime64("2020-01-01T00:00", "s") + np.arange(frames) * np.timedelta64(900, "s")
    fields = np.stack([np.roll(values, 2 * frame, axis=-1) for frame in range(frames)])
    names = [f"c{n}" for n in range(len(values))]
    write_fields(path, torch.from_numpy(fields), names, times, None, None, latitude, longitude)
    return {
        "stores": [str(path)],
        "invariants": ["latitude", "longitude"],
        "sun": [1],
        "held_out_from": "2020-01-01T00:45",
    }


def seviri():
    """Brightness temperature, some pixels without a value."""
    stream = Stream((DATA / "seviri_excerpt.nc",), masked=True)
    dataset = GridDataset({"x": stream})
    with GridLoader(dataset, prefetch=0) as loader:
        sample = next(iter(loader))
    values = torch.where(sample.masks["x"], sample["x"], torch.nan)[0].numpy()
    with closing(open_grid(DATA / "seviri_excerpt.nc")) as source:
        every = (slice(None), slice(None))
        return values, source.read("lat", every), source.read("lon", every), None


def nam(folder):
    """Six fields of a forecast on a Lambert grid, of which rows and columns are left out that make no whole patch."""
    pytest.importorskip("eccodes")
    from dpzoo.cli import main

    path = folder / "nam.zarr"
    assert main(["convert", "grib", str(DATA / "nam_excerpt.grib2"), str(path)]) == 0
    dataset = GridDataset({"x": Stream((path,), masked=True)})
    with GridLoader(dataset, prefetch=0) as loader:
        values = next(iter(loader))["x"][0].numpy()
    return values, *coordinates_of(dataset.index.infos), [0, 64, 0, 92]


@pytest.mark.parametrize("source", ["seviri", "nam"])
def test_real_fields_go_all_the_way(source, tmp_path):
    values, latitude, longitude, crop = seviri() if source == "seviri" else nam(tmp_path)
    data = drifting(tmp_path / "images.zarr", values, latitude, longitude) | {"crop": crop}
    settings = scattered(tmp_path / "run", data)
    settings = replace(settings, evaluate=replace(settings.evaluate, thresholds={}))
    losses = train_on(2, settings)
    assert len(losses) == 2 and np.isfinite(losses).all()
    rows = evaluated(2, settings)
    for row in rows:
        assert all(np.isfinite(s[n]) for s in row["scores"].values() for n in ("crps", "mse", "variance"))
    run_on(2, "forecasting.sample", settings.out, settings.evaluate)
    gaps = np.isnan(values).any()
    assert gaps == (source == "seviri")
    for store in (settings.out / "forecasts" / "2020-01-01T003000").iterdir():
        fields = zarr.open_group(store)["fields"][...]
        now = np.roll(values, 2 * 2, axis=-1)[:, : fields.shape[-2], : fields.shape[-1]]
        assert (np.isnan(fields) == np.isnan(now)).all()
