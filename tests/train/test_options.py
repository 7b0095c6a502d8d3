"""What the loop may be asked for: FSDP2, torch.compile, float16 with a scaled loss, samples per step."""

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.testing import distributed, expect_error
from dpzoo.train import DivergedError, Team, TrainConfig, fit, lift_loop_keys, train_step
from dpzoo.train.journal import read_journal
from dpzoo.train.step import loss_scaler
from tests.train.toy import Clouds, build, configured, objective, train, train_on


def losses(folder):
    return [row["loss"] for row in read_journal(folder)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    train(folder, config=configured(samples_per_step=4), samples=8)
    return losses(folder)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((2, 2), {"parallel": "fsdp"}),
        ((1, 2), {"compile": "aot_eager"}),
        ((2, 2), {"compile": "aot_eager", "parallel": "fsdp"}),
        ((2, 2), {"compile": "aot_eager"}),
    ],
    ids=str,
)
def test_the_curve_does_not_depend_on_how_it_is_computed(shape, changes, plain, tmp_path):
    config = configured(samples_per_step=4, validate_every=2, ema=0.9, **changes)
    (outcome, weights), *others = train_on(shape, tmp_path, config, samples=8)
    assert losses(tmp_path) == pytest.approx(plain, rel=1e-9)
    assert outcome.finished
    for _, other in others:
        assert all(torch.equal(weight, other[name]) for name, weight in weights.items())


@distributed(ranks=2)
def test_fsdp_needs_an_optimiser_of_its_own_parameters():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ddp", "domain"))
    model, optimizer = build()
    run = lambda: fit(model, optimizer, Clouds(mesh), objective, configured(parallel="fsdp"), "never", mesh=mesh)  # noqa: E731
    expect_error(run, ValueError, "parallel='fsdp' they are replaced by sharded ones. Pass a function")


def test_samples_per_step_are_divided_among_replicas():
    config = TrainConfig(samples_per_step=6)
    assert [config.accumulated(replicas) for replicas in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(ValueError, match="samples_per_step=6 cannot be divided among 4 data-parallel ranks"):
        config.accumulated(4)
    with pytest.raises(ValueError, match="samples_per_step is 6 and accumulate 2; give one"):
        TrainConfig(samples_per_step=6, accumulate=2)


def test_keys_of_the_command_line():
    lifted = lift_loop_keys({"out": "x", "amp": "bf16", "compile": None, "train": {"amp": None, "epochs": 3}})
    assert lifted == {"out": "x", "train": {"amp": "bf16", "epochs": 3}}
    assert asdict(TrainConfig(**lifted["train"]))["amp"] == "bf16"
    assert TrainConfig(amp="off").amp is None


# ---------------------------------------------------------------------- float16
class Steep(nn.Module):
    """Its gradient overflows float16 if `times` is large, whatever the scale of the loss."""

    def __init__(self, times=1.0):
        super().__init__()
        self.line, self.times = nn.Linear(3, 1), times

    def forward(self, x):
        return self.line(x) * self.times


def half_objective(model, sample):
    return {"loss": model(sample[0]).float().square().mean()}


def test_float16_follows_float32(tmp_path):
    config = configured(epochs=3)
    train(tmp_path / "whole", config=config, dtype=torch.float32)
    train(tmp_path / "half", config=configured(epochs=3, amp="fp16"), dtype=torch.float32)
    train_on((1, 2), tmp_path / "ranks", configured(epochs=3, amp="fp16"), dtype=torch.float32)
    rows = read_journal(tmp_path / "half")
    made = [row for row in rows if not row["skipped"]]
    assert rows[0]["loss_scale"] == 65536.0 and made
    assert losses(tmp_path / "half") == pytest.approx(losses(tmp_path / "whole"), rel=0.1)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "half"), rel=2e-2)


@distributed(ranks=2)
def test_a_step_that_overflows_is_skipped_on_all_ranks_and_the_scale_falls():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("domain",))
    config, team = configured(amp="fp16"), Team(mesh)
    scaler = loss_scaler(config, team)
    torch.manual_seed(0)
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clouds = Clouds(mesh, dtype=torch.float32)
    step = lambda: train_step(  # noqa: E731
        model, optimizer, half_objective, [next(clouds.epoch(0))], 1, 0, config, team, scaler
    )
    before = model.line.weight.detach().clone()
    model.times = 3e3  # the scaled gradient passes 65504 in float16
    found = step()
    assert (found["skipped"], found["loss_scale"]) == (1.0, 65536.0)
    assert "gradient_norm" not in found
    assert torch.equal(model.line.weight, before)
    assert scaler.get_scale() == 32768.0
    model.times = 1.0
    for _ in range(12):
        found = step()
    assert found["skipped"] == 0.0 and found["gradient_norm"] > 0
    assert not torch.equal(model.line.weight, before)
    model.times = float("inf")
    expect_error(lambda: [step() for _ in range(40)], DivergedError, "even with the loss scaled by 1.0.*amp='bf16'")


def test_the_scale_of_the_loss_is_in_the_checkpoint(tmp_path):
    half = {"epochs": 2, "amp": "fp16"}
    train(tmp_path, config=configured(max_steps=4, **half), dtype=torch.float32)
    before = read_journal(tmp_path)[-1]["loss_scale"]
    assert before < 65536.0  # it has fallen from where it begins
    other = {"unrelated": torch.amp.GradScaler("cpu", init_scale=8.0)}
    with pytest.warns(UserWarning, match="has no state of 'unrelated'"):
        train(tmp_path, config=configured(**half), dtype=torch.float32, others=other)
    assert read_journal(tmp_path)[4]["loss_scale"] in (before, before / 2)
