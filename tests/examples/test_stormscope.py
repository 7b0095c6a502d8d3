"""The nowcasting example: its numbers on any number of ranks, its configuration, and a run that loses a rank."""

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dpzoo.train import find_checkpoints, launch
from dpzoo.train.journal import read_journal
from tests.examples.nowcast_runs import load, run_on, storms, tiny, train_on, train_until_a_rank_fails

pytest.importorskip("zarr")


# ---------------------------------------------------------------------- training
@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """Losses of four steps on one rank, and the run's settings."""
    settings = tiny(tmp_path_factory.mktemp("one"))
    return train_on(1, settings), settings


def test_one_two_and_four_ranks_follow_one_curve(curve, tmp_path):
    assert len(curve[0]) == 4
    for ranks in (2, 4):
        assert train_on(ranks, tiny(tmp_path / str(ranks))) == pytest.approx(curve[0], rel=1e-4)


def kill_a_rank_after(file, steps, others):
    """Once `steps` lines are there, end a child of this process that is not among the others the hard way."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not (file.exists() and file.read_text().count("\n") >= steps):
        time.sleep(0.05)
    ranks = [child for child in multiprocessing.active_children() if child not in others]
    os.kill(max(rank.pid for rank in ranks), signal.SIGKILL)


@pytest.mark.parametrize(
    ("run", "error"),
    [
        (None, r"process \d terminated with signal SIGKILL"),
        (
            partial(train_until_a_rank_fails, rank=1, samples=6),
            r"Rank 1 was the first to fail:(?s:.)*OSError: the disk of rank 1 is full",
        ),
    ],
    ids=["killed", "raised"],
)
def test_a_run_that_loses_a_rank_ends_and_goes_on_on_other_ranks(run, error, curve, tmp_path, monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("TORCHELASTIC_", "OMPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    endless = tiny(tmp_path, checkpoint_every=2, max_steps=None, epochs=5000, schedule="constant")
    before = set(multiprocessing.active_children())
    killer = threading.Thread(target=kill_a_rank_after, args=(tmp_path / "metrics.jsonl", 4, before))
    if run is None:
        killer.start()
    with pytest.raises(Exception, match=error):
        launch(run or load("training").train, 2, endless)
    if run is None:
        killer.join()
    assert not set(multiprocessing.active_children()) - before  # nobody is left waiting
    newest = int(find_checkpoints(tmp_path)[-1].name.removeprefix("step_"))
    again = replace(endless, train=replace(endless.train, max_steps=newest + 2))
    resumed = train_on(3, again)
    assert len(resumed) == newest + 2
    expected = train_on(1, tiny(tmp_path / "steady", max_steps=newest + 2, epochs=5000, schedule="constant"))
    assert resumed == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------------- forecasts
def test_evaluation_is_the_same_on_any_number_of_ranks(curve):
    pytest.importorskip("matplotlib")
    settings, found = curve[1], []
    for ranks, figures in ((1, False), (3, True)):
        asked = replace(settings.evaluate, figures=figures)
        run_on(ranks, "evaluation.evaluate", settings.out, asked)
        found.append(json.loads((settings.out / "evaluation.json").read_text())["summary"])
    assert [(row["hours"], row["held_out"]) for row in found[0]] == [(12.0, False), (24.0, True)]
    for one, many in zip(*found, strict=True):
        for channel, scores in one["scores"].items():
            other = many["scores"][channel]
            for name in ("crps", "rmse", "spread", "persistence", "ranks", "spectrum", "true_spectrum"):
                assert other[name] == pytest.approx(scores[name], rel=2e-3, abs=1e-6), (channel, name)
    events = found[1][0]["scores"]["t850"]["events"]
    assert events["thresholds"] == [263.15, 273.15]
    for name in ("maps", "leads", "spectra", "ranks", "seam", "loss"):
        assert (settings.out / "figures" / f"{name}.png").stat().st_size > 5_000
    assert (settings.out / "figures" / "rollout.gif").read_bytes()[:4] == b"GIF8"


def test_samples_are_written_and_do_not_depend_on_the_ranks(curve):
    zarr, settings, found = pytest.importorskip("zarr"), curve[1], []
    for ranks in (1, 2):
        run_on(ranks, "forecasting.sample", settings.out, settings.evaluate)
        stores = sorted((settings.out / "forecasts" / "2017-01-01T120000_0").iterdir())
        assert [store.name for store in stores] == [f"member_00{i}.zarr" for i in range(3)]
        found.append(np.stack([zarr.open_group(store)["fields"][...] for store in stores]))
    assert found[0].shape == (3, 2, 4, 60, 24)
    assert np.allclose(found[1], found[0], rtol=1e-4)
    assert not np.allclose(found[0][0], found[0][1], rtol=1e-4)


def test_storms_are_made_learned_validated_and_forecast_from_two_frames(tmp_path):
    settings = tiny(tmp_path / "run", storms(tmp_path), max_steps=None, validate_every=1)
    settings = replace(
        settings, predict="state", evaluate=replace(settings.evaluate, starts=None, leads=2, thresholds={})
    )
    train_on(2, settings)
    (row,) = read_journal(settings.out, "validation")
    assert all(np.isfinite(row[name]) and row[name] > 0 for name in ("loss", "crps", "rmse", "spread"))
    run_on(2, "evaluation.evaluate", settings.out, settings.evaluate)
    rows = json.loads((settings.out / "evaluation.json").read_text())["forecasts"]
    assert [(row["start"][11:16], round(row["hours"] * 60)) for row in rows] == [
        ("12:50", 10),
        ("12:50", 20),
        ("13:00", 10),
    ]
    assert all(row["held_out"] for row in rows)


# ---------------------------------------------------------------------- scores
def test_scores_are_those_of_numpy_and_add_up():
    scores = load("scores")
    rng = np.random.default_rng(0)
    truth, ensemble = rng.normal(size=(1, 8, 8)), rng.normal(size=(3, 1, 8, 8))
    one, two = (
        scores.score(
            torch.from_numpy(ensemble + shift), torch.from_numpy(truth), torch.from_numpy(truth + 2.0), ["a"],
            thresholds={"a": [0.5]}, window=3,
        )["a"]
        for shift in (0.0, 1.0)
    )  # fmt: skip
    found = scores.summarise([one, two])
    means = [((ensemble + shift).mean(0) - truth) ** 2 for shift in (0.0, 1.0)]
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean(means)))
    assert found["persistence"] == pytest.approx(2.0)
    hits = [((ensemble + s >= 0.5) & (truth >= 0.5)).sum() for s in (0, 1)]
    either = [((ensemble + s >= 0.5) | (truth >= 0.5)).sum() for s in (0, 1)]
    assert found["events"]["csi"][0] == pytest.approx(sum(hits) / sum(either))
    assert sum(found["ranks"]) == pytest.approx(1.0)


def test_distance_to_the_border_and_numbers_that_json_lacks():
    distance = load("seam").distance_to_border
    assert distance(5, [2]).tolist() == [1.5, 0.5, 0.5, 1.5, 2.5]
    assert np.isinf(distance(3, [])).all()
    assert load("scores").finite({"a": [1.0, float("nan")]}) == {"a": [1.0, None]}


# ---------------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    ("name", "weights"), [("config", 2e5), ("storms", 2e5), ("6km", 2.1e8), ("3km", 2.6e8)], ids=str
)
def test_every_configuration_can_be_composed(name, weights, tmp_path):
    pytest.importorskip("hydra")
    from dpzoo import create_model

    large = ["data.stores=[a.zarr]", "data.static_stores=[b.zarr]", "data.held_out_from=2024-01-01"]
    settings = load("configuration").compose(name, [f"out={tmp_path}", *(large if name[0].isdigit() else [])])
    assert load("settings").Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    with torch.device("meta"):
        model = create_model(settings.model["name"])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(weights, rel=0.3)
    if name == "3km":
        assert (settings.domain, settings.data.past, len(settings.data.sun)) == (2, 6, 2)
        assert model.channels == {"state": 8 * settings.data.past, "background": 2, "invariant": 3}


@pytest.mark.parametrize(("name", "past"), [("6km", 1), ("3km", 6)])
def test_the_large_configurations_run_on_a_small_grid(name, past, tmp_path):
    """As written in conf/, but for the grid and the network; a bfloat16 step, and one that is not."""
    pytest.importorskip("hydra")
    grid = [
        "data.storms.rows=24",
        "data.storms.columns=32",
        "data.storms.frames=10",
        "train.max_steps=1",
        "train.log_every=1",
    ]
    words = [f"data=storms_{name}", "model=tiny", "train.epochs=1", "train.validate_every=0", *grid]
    words += ["data.held_out_from=2024-06-01T13:20", f"data.stores=[{tmp_path}/storms.zarr]"]
    compose = load("configuration").compose
    settings = compose(name, [*words, f"out={tmp_path}/run", "parallel=fsdp", "resume=never"])
    assert (settings.data.past, settings.domain, settings.predict) == (past, 2, "state")
    assert (settings.train.amp, settings.train.parallel, settings.train.resume) == ("bf16", "fsdp", "never")
    losses = train_on(2, settings)
    exact = compose(name, [*words, f"out={tmp_path}/exact"])
    exact = replace(exact, train=replace(exact.train, amp=None))
    assert train_on(2, exact) == pytest.approx(losses, rel=0.02)
    assert np.isfinite(losses).all() and len(losses) == 1
    evaluated = compose(name, [*words, "evaluate.members=2", "evaluate.leads=2", "evaluate.figures=false"]).evaluate
    run_on(2, "evaluation.evaluate", exact.out, replace(evaluated, starts=("2024-06-01T13:10",)))
    table = json.loads((exact.out / "evaluation.json").read_text())
    assert [row["hours"] for row in table["forecasts"]] == pytest.approx([1 / 6, 1 / 3])


@pytest.mark.parametrize(
    ("name", "words"), [("storms", ["data=radar"]), ("6km", ["model=small"]), ("3km", ["model=shallow"])]
)
def test_further_choices_can_be_composed(name, words):
    pytest.importorskip("hydra")
    compose = load("configuration").compose
    large = [] if name == "storms" else [f"data=storms_{name}"]
    settings = compose(name, [*words, *large, "amp=bf16", "compile=true"])
    assert (settings.train.amp, settings.train.compile) == ("bf16", True)
    assert settings.data.masked == (name == "storms")
    rows = settings.data.storms["rows"]
    assert (rows, settings.data.stores[0].split("_")[-1]) == {
        "storms": (64, "64x112.zarr"), "6km": (512, "512x896.zarr"), "3km": (1024, "1024x1792.zarr")
    }[name]  # fmt: skip


def test_bad_settings_are_named(tmp_path):
    made, data = load("settings"), load("data")
    with pytest.raises(ValueError, match="train has no epoch; it has epochs"):
        made.Settings.from_dict({"train": {"epoch": 3}})
    with pytest.raises(ValueError, match="predict is 'tendency'"):
        made.Settings.from_dict({"predict": "tendency"})
    with pytest.raises(ValueError, match="members >= 2"):
        made.Settings.from_dict({"evaluate": {"members": 1}})
    settings = tiny(tmp_path)
    late = replace(settings, evaluate=replace(settings.evaluate, starts=("2017-01-02T12:00",)))
    with pytest.raises(ValueError, match="no forecast can start at 2017-01-02T12:00:00"):
        data.starts_of(late)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load("training").load_run(tmp_path, settings.evaluate)
