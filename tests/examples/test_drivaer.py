"""The car example: its numbers on any number of ranks, its configuration, and its commands."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpzoo.shard import ShardTensor
from dpzoo.testing import session_pool
from dpzoo.train.journal import read_journal
from tests.examples.running import EXAMPLES, load_from, with_manager

pytest.importorskip("zarr")
pytest.importorskip("scipy")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = EXAMPLES / "drivaer"
NANO = {"name": "transolver_nano", "embed_dim": 16, "depth": 2, "num_heads": 2, "num_slices": 8}


def load(name):
    """A module of the example."""
    return load_from("drivaer", f"aero.{name}")


def tiny(out, clouds=("surface",), **train):
    """A configuration of seconds."""
    made = load("settings")
    sizes = {"surface": 301, "volume": 151}
    return made.Settings.from_dict(
        {
            "out": str(out),
            "data": {
                "folder": str(EXAMPLE / "data"),
                "validation": ["run_1"],
                "conditions": {"stream_velocity": 30.0, "not_in_the_files": 2.0},
            },
            "clouds": {name: {"points": sizes[name], "model": NANO, "frequencies": 2} for name in clouds},
            "train": {"epochs": 1, "validate_every": 0, "progress_bar": False, **train},
            "evaluate": {"figures": "none"},
        }
    )


def on_rank(function, *arguments):
    """Call a function of the example."""
    module, name = function.split(".")
    return with_manager(getattr(load(module), name), *arguments)


def train_on(ranks, settings):
    session_pool().run(on_rank, "training.train", settings, ranks=ranks, timeout=100.0)
    return [row["loss"] for row in read_journal(settings.out)]


# ---------------------------------------------------------------------- training
def test_one_two_and_four_ranks_follow_one_curve(tmp_path):
    curves = [train_on(ranks, tiny(tmp_path / str(ranks), ("surface", "volume"))) for ranks in (1, 2, 4)]
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-4)
    sharded = tiny(tmp_path / "fsdp", ("surface", "volume"), parallel="fsdp", async_checkpoint=True)
    assert train_on(2, sharded) == pytest.approx(curves[0], rel=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of both clouds on two ranks, with its validation."""
    settings = tiny(tmp_path_factory.mktemp("run"), ("surface", "volume"), validate_every=1)
    train_on(2, settings)
    return settings


def test_validation_reports_every_field_and_the_forces(trained):
    (row,) = read_journal(trained.out, "validation")
    fields = {f"surface/{f}" for f in ("p", "wall_shear_x", "wall_shear_y", "wall_shear_z")}
    assert {*fields, "volume/U", "volume/p", "volume/nut", "Cd_error", "Cl_error"} <= row.keys()
    assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))


# ---------------------------------------------------------------------- evaluation
@pytest.mark.parametrize("chunk", [None, 2000])
def test_evaluation_is_the_same_on_any_number_of_ranks_and_in_chunks(chunk, trained):
    asked = replace(trained.evaluate, cars="validation", chunk=chunk)
    found = []
    for ranks in (1, 3):
        session_pool().run(on_rank, "evaluation.evaluate", trained.out, asked, ranks=ranks, timeout=100.0)
        found.append(json.loads((trained.out / "evaluation.json").read_text())["cars"])
    ((one,), (many,)) = found
    assert one["errors"] == pytest.approx(many["errors"], rel=1e-4)
    for name in ("Cd", "Cl"):
        assert one["forces"][name] == pytest.approx(many["forces"][name], rel=1e-4, abs=1e-6)
        assert many["forces"][name]["truth"] == pytest.approx(many["forces"][name]["csv"], rel=0.02)
    assert (one["name"], one["held_out"]) == ("run_1", True)


def test_figures_and_files(trained):
    pytest.importorskip("matplotlib")
    pyvista = pytest.importorskip("pyvista")
    asked = replace(trained.evaluate, cars="validation", figures="run_1", vtp=True)
    session_pool().run(on_rank, "evaluation.evaluate", trained.out, asked, ranks=2, timeout=110.0)
    for name in ("surface", "parity", "seam", "forces"):
        assert (trained.out / "figures" / f"{name}.png").stat().st_size > 10_000
    cloud = pyvista.read(trained.out / "predictions" / "run_1_volume.vtp")
    assert cloud.n_points == 16384
    assert cloud["U_predicted"].shape == (16384, 3)
    assert np.allclose(cloud["U"] + cloud["U_error"], cloud["U_predicted"], atol=1e-4)


def compact_shards(settings):
    cars, seam, kinds = load("cars"), load("seam"), load("clouds").KINDS
    mesh = load("training").make_mesh(settings)
    with cars.make_loader(settings, cars.split_cars(settings).validation, mesh, training=False) as loader:
        sample = next(loader.epoch(0))
    moved = seam.compact(sample, kinds["surface"])
    assert isinstance(moved["surface_fields"], ShardTensor)
    owner = seam.owners(moved["surface_fields"])
    local = moved["surface_fields"].to_local()
    assert len(local) == (owner == torch.distributed.get_rank()).sum()
    spread = [np.ptp(s["surface_mesh_centers"].to_local().numpy(), axis=0).prod() for s in (sample, moved)]
    columns = [
        torch.cat([s[f].full_tensor().view(len(owner), -1) for f in kinds["surface"].cloud.fields], 1)
        for s in (sample, moved)
    ]
    alike = [c[np.lexsort(c.numpy().T)] for c in columns]
    assert torch.equal(*alike)  # the same rows, fields still beside their points
    return spread


def test_shards_for_the_seam_plot_are_compact_and_hold_the_same_rows(tmp_path):
    found = session_pool().run(with_manager, compact_shards, tiny(tmp_path), ranks=3, timeout=60.0)
    assert sum(after for _, after in found) < 0.7 * sum(before for before, _ in found)


def test_distance_to_the_border_is_that_to_the_nearest_point_of_another_rank():
    distance = load("seam").distance_to_border
    line = np.array([[0.0, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]])
    assert distance(line, np.array([0, 0, 1, 1])).tolist() == [2, 1, 1, 3]
    assert np.isinf(distance(line, np.zeros(4, int))).all()


def test_r_squared():
    r2 = load("evaluation").r_squared
    truth = np.array([1.0, 2.0, 3.0])
    assert r2(truth, truth) == 1
    assert r2(truth, np.full(3, 2.0)) == 0
    assert np.isnan(r2(truth[:1], truth[:1]))


# ---------------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    "clouds", ["surface", "volume", "both", "drivaerml_surface", "drivaerml_volume", "drivaerml_both"]
)
def test_every_configuration_can_be_composed(clouds, tmp_path):
    pytest.importorskip("hydra")
    large = clouds.startswith("drivaerml")
    extra = ["data=drivaerml", "train=drivaerml", f"data.folder={tmp_path}"] if large else []
    settings = load("configuration").compose([f"out={tmp_path}", f"clouds={clouds}", *extra])
    expected = {"surface", "volume"} if clouds.endswith("both") else {clouds.removeprefix("drivaerml_")}
    assert set(settings.clouds) == expected
    assert load("settings").Settings.from_dict(settings.to_dict()) == replace(settings)
    with torch.device("meta"):
        model = load("model").build_model(settings)
    weights = sum(p.numel() for p in model.parameters()) / len(expected)
    assert (weights > 3e6) == large


def test_the_short_keys_stand_for_those_of_train(tmp_path):
    words = ["parallel=fsdp", "compile=true", "amp=bf16", "resume=never", "train.amp=fp16"]
    train = load("configuration").compose([f"out={tmp_path}", *words]).train
    assert (train.parallel, train.compile, train.amp, train.resume) == ("fsdp", True, "bf16", "never")
    train = load("configuration").compose([f"out={tmp_path}", "train.amp=fp16"]).train
    assert (train.parallel, train.compile, train.amp, train.resume) == ("ddp", False, "fp16", "auto")


def test_bad_settings_are_named(tmp_path):
    made, cars = load("settings"), load("cars")
    with pytest.raises(ValueError, match="train has no epoch; it has epochs"):
        made.Settings.from_dict({"train": {"epoch": 3}})
    with pytest.raises(ValueError, match="clouds: wake unknown"):
        made.Settings.from_dict({"clouds": {"wake": {}}})
    settings = tiny(tmp_path)
    with pytest.raises(ValueError, match=r"data.validation names run_9, which is not among the 5 cars"):
        cars.split_cars(replace(settings, data=replace(settings.data, validation=["run_9"])))
    with pytest.raises(ValueError, match="fold 5 of 5 does not exist"):
        cars.split_cars(replace(settings, data=replace(settings.data, fold=(5, 5))))
    with pytest.raises(FileNotFoundError, match="holds no run"):
        load("training").load_settings(tmp_path)


# ---------------------------------------------------------------------- from the command line
def test_a_run_that_is_told_to_stop_saves_and_exits_with_zero(tmp_path):
    pytest.importorskip("hydra")
    outer = ("TORCHELASTIC_", "OMPI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    words = ["ranks=2", f"out={tmp_path}", "train.epochs=10000", "train.validate_every=0", "clouds.surface.points=64"]
    command = [sys.executable, str(EXAMPLE / "train.py"), *words]
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 90
        while not (tmp_path / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    steps = read_journal(tmp_path)[-1]["step"]
    assert (tmp_path / f"step_{steps:08d}" / ".metadata").is_file()
    assert f"stopped after step {steps} of 40000" in out
