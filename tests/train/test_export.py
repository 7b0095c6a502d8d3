"""Exported runs are plain safetensors and a configuration, which load with dpzoo and without."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import dpzoo
from dpzoo.cli import main
from dpzoo.models import ViT
from dpzoo.parallel import parallelize
from dpzoo.testing import session_pool
from dpzoo.train import CheckpointError, CheckpointWriter, RunState, Team, WeightAverage, export_run
from dpzoo.train.checkpoint import Position
from dpzoo.train.export import record_model
from tests.train.toy import configured, train

NAME = "vit_small_patch16"
TINY = {"img_size": (32, 48), "in_chans": 3, "num_classes": 5, "embed_dim": 24, "depth": 1, "num_heads": 2}


def tiny():
    torch.manual_seed(0)
    return dpzoo.create_model(NAME, **TINY)


def save_on_ranks(folder, ema):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ddp",))
    team = Team(mesh)
    model = tiny()
    record_model(model, folder, team)
    model = parallelize(model, mesh, strategy="fsdp", ddp_axis="ddp")
    optimizer = torch.optim.AdamW(model.parameters())
    average = WeightAverage(model, 0.9) if ema else None
    if average is not None:
        with torch.no_grad():
            for weight in average.weights.values():
                weight.add_(1)
    with CheckpointWriter(folder, team) as writer:
        writer.save(4, RunState(model, optimizer, team, average).state(Position(4)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    session_pool().run(save_on_ranks, folder, True, ranks=2)
    return folder


@pytest.mark.parametrize(("asked", "shift"), [((), 1.0), (("--trained",), 0.0), (("--average",), 1.0)], ids=str)
def test_what_two_ranks_trained_loads_as_plain_weights(asked, shift, run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path), *asked]) == 0
    assert "step_00000004" in capsys.readouterr().out
    model, weights = tiny(), load_file(tmp_path / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert set(weights) == set(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value + (shift if name in parameters else 0))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model"], config["position_grid"]) == (NAME, [2, 3])
    assert config["extra"] == {"step": 4, "averaged": bool(shift)}
    wider = ViT.from_pretrained(tmp_path, img_size=(48, 64))
    assert wider.pos_embed.shape == (1, 1 + 3 * 4, 24)
    built = ViT.from_pretrained(tmp_path)
    x = torch.randn(1, 3, 32, 48)
    model.load_state_dict(weights)
    torch.testing.assert_close(built.eval()(x), model.eval()(x))


def test_a_model_that_is_not_of_the_zoo_is_exported_with_its_class(tmp_path):
    outcome, weights = train(tmp_path / "run", config=configured(max_steps=2))
    assert export_run(tmp_path / "run", tmp_path / "out") == outcome.checkpoint
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {n: w.tolist() for n, w in weights.items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["class"] == "tests.train.toy.Net" and "model" not in config
    with pytest.raises(CheckpointError, match="no averaged weights: it was trained without ema"):
        export_run(tmp_path / "run", tmp_path / "out", average=True)


def test_what_cannot_be_exported(run, tmp_path, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "holds no finished checkpoint" in capsys.readouterr().err
    damaged = tmp_path / "step_00000004"
    damaged.mkdir()
    for file in (run / "step_00000004").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    (damaged / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 0 bytes"):
        export_run(damaged, tmp_path / "out")
    assert not (tmp_path / "out").exists()
