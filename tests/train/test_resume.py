"""A run goes on with the same curve on any mesh, whichever way its weights lay when it was saved."""

import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from dpzoo.testing import RankError, session_pool
from dpzoo.train import find_checkpoints, latest_checkpoint, load_model
from dpzoo.train.journal import read_journal
from tests.train.toy import build, configured, train, train_on

# 2 steps an epoch, of 4 samples wherever they are; stopped in the middle of the second epoch.
FULL = configured(epochs=3, samples_per_step=4, ema=0.9, checkpoint_every=2)
OPTIONS = {"samples": 8, "dropout": 0.3}


def losses(folder):
    return [row["loss"] for row in read_journal(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    ((_, weights),) = train_on((1, 1), folder, FULL, **OPTIONS)
    return losses(folder), weights, folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def stopped(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    config = replace(FULL, parallel=request.param, max_steps=3, async_checkpoint=request.param == "fsdp")
    train_on((2, 2), folder, config, **OPTIONS)
    assert latest_checkpoint(folder) == folder / "step_00000003"
    return folder


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [((1, 1), "ddp"), ((4, 1), "ddp"), ((1, 2), "fsdp"), ((1, 3), "ddp"), ((4, 1), "fsdp")],
    ids=str,
)
def test_stopped_on_2_by_2_it_goes_on_on_any_mesh(shape, parallel, stopped, uninterrupted, tmp_path):
    expected, weights, reference = uninterrupted
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    for outcome, found in train_on(shape, folder, replace(FULL, parallel=parallel), **OPTIONS):
        assert (outcome.step, outcome.finished) == (6, True)
        for name, weight in found.items():
            torch.testing.assert_close(weight, weights[name], rtol=1e-7, atol=1e-9)
    assert losses(folder) == pytest.approx(expected, rel=1e-9)
    averages = []
    for run in (folder, reference):
        model, _ = build(seed=7)
        load_model(model, run, average=True)
        averages.append(dict(model.named_parameters()))
    for name, average in averages[0].items():
        torch.testing.assert_close(average, averages[1][name], rtol=1e-7, atol=1e-9)
        assert not torch.allclose(average, weights[name], rtol=1e-4)


def test_other_samples_per_step_are_told(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    with pytest.warns(UserWarning, match="a step had 4 samples so far and has 2 from now on"):
        train(tmp_path / "run", None, replace(FULL, samples_per_step=2, max_steps=4), **OPTIONS)


# ---------------------------------------------------------------------- a rank dies while it saves
def train_and_die_in_the_second_checkpoint(folder, config):
    if torch.distributed.get_rank() == 1:
        write, calls = FileSystemWriter.write_data, []

        def write_and_die(self, plan, planner):
            calls.append(plan)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, plan, planner)

        FileSystemWriter.write_data = write_and_die  # this process will not need the other one
    train(folder, (1, 2), config, **OPTIONS)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(background, uninterrupted, tmp_path):
    config = replace(FULL, async_checkpoint=background)
    with pytest.raises(RankError):
        session_pool().run(train_and_die_in_the_second_checkpoint, tmp_path, config, ranks=2, timeout=60.0)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000002"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000002"
    assert list(tmp_path.glob("*.partial"))
    train_on((1, 1), tmp_path, config, **OPTIONS)
    assert losses(tmp_path) == pytest.approx(uninterrupted[0], rel=1e-9)
    assert not list(tmp_path.glob("*.partial"))
