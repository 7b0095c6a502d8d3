"""A run that is stopped goes on with the same curve, on any number of ranks, from its newest whole checkpoint."""

import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.testing import session_pool
from dpzoo.train import CheckpointError, find_checkpoints, load_model
from dpzoo.train.journal import FILE, keep_until, read_journal
from tests.train.toy import Clouds, Net, build, configured, train, train_on

FULL = configured(epochs=3, accumulate=2, keep=3, checkpoint_every=2)  # 3 steps an epoch, the last one smaller


def curve(folder):
    return [(row["step"], row["epoch"], row["loss"]) for row in read_journal(folder)]


def assert_same_curve(folder, expected):
    found = curve(folder)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-9)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The curve of 9 steps on one rank, with dropout."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train_on((1, 1), folder, FULL, dropout=0.3)
    return curve(folder)


def test_saved_on_two_ranks_it_goes_on_on_one_and_on_four(uninterrupted, tmp_path):
    first = tmp_path / "two"
    outcome, _ = train_on((1, 2), first, replace(FULL, max_steps=4), dropout=0.3)[0]
    assert (outcome.step, outcome.finished) == (4, False)  # in the middle of an epoch
    assert_same_curve(first, uninterrupted[:4])
    for ranks in (1, 4):
        folder = tmp_path / str(ranks)
        shutil.copytree(first, folder)
        for outcome, _ in train_on((1, ranks), folder, FULL, dropout=0.3):
            assert (outcome.step, outcome.finished) == (9, True)
        assert_same_curve(folder, uninterrupted)
    assert [path.name for path in find_checkpoints(tmp_path / "4")] == [f"step_{n:08d}" for n in (6, 8, 9)]


def test_a_run_with_replicas_goes_on(tmp_path):
    config = configured(epochs=2, accumulate=1)
    train_on((2, 2), tmp_path / "whole", config, samples=6)
    halted = configured(epochs=2, accumulate=1, max_steps=2)
    train_on((2, 1), tmp_path / "parts", halted, samples=6)
    train_on((2, 2), tmp_path / "parts", config, samples=6)
    assert_same_curve(tmp_path / "parts", curve(tmp_path / "whole"))


def test_steps_after_the_checkpoint_are_told_once(uninterrupted, tmp_path):
    train_on((1, 1), tmp_path, replace(FULL, max_steps=5), dropout=0.3)
    shutil.rmtree(find_checkpoints(tmp_path)[-1])  # as if the machine had died after step 5
    assert len(curve(tmp_path)) == 5
    train_on((1, 2), tmp_path, FULL, dropout=0.3)
    assert_same_curve(tmp_path, uninterrupted)


def test_a_journal_line_that_was_cut_off_is_dropped(tmp_path):
    (tmp_path / FILE).write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    keep_until(tmp_path / FILE, 9)
    assert (tmp_path / FILE).read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_limit_of_steps_holds_for_the_resumed_run_too(tmp_path):
    for _ in range(2):
        outcome, _ = train(tmp_path, config=replace(FULL, max_steps=4))
        assert (outcome.step, outcome.finished) == (4, False)
    outcome, _ = train(tmp_path, config=replace(FULL, max_steps=9))
    assert (outcome.step, outcome.finished) == (9, True)


def test_a_validation_is_told_once(tmp_path):
    config = replace(FULL, checkpoint_every=3)  # at the end of each epoch
    for halted in (5, None):  # the checkpoint of step 5 is lost, that of step 3 has its validation behind it
        train(tmp_path, config=replace(config, max_steps=halted), validation=Clouds(samples=1))
        if halted:
            shutil.rmtree(find_checkpoints(tmp_path)[-1])
    assert [row["step"] for row in read_journal(tmp_path, "validation")] == [3, 6, 9]


# ---------------------------------------------------------------------- SIGTERM
def train_and_be_told_to_stop(folder):
    def measure(model, sample):  # runs after the first epoch
        if torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": torch.zeros(())}

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "domain"))
    before = signal.getsignal(signal.SIGTERM)
    outcome, _ = train(folder, (1, 2), FULL, 0.3, validation=Clouds(mesh, 1), measure=measure)
    assert signal.getsignal(signal.SIGTERM) is before
    return outcome


def test_a_signal_to_one_rank_stops_all_after_the_same_step(uninterrupted, tmp_path):
    outcomes = session_pool().run(train_and_be_told_to_stop, tmp_path, ranks=2)
    for outcome in outcomes:
        assert (outcome.step, outcome.finished) == (4, False)  # the step after the validation
        assert outcome.checkpoint == tmp_path / "step_00000004"
    train_on((1, 1), tmp_path, FULL, dropout=0.3)
    assert_same_curve(tmp_path, uninterrupted)


# ---------------------------------------------------------------------- checkpoints that cannot be used
def test_a_damaged_checkpoint_is_passed_over(uninterrupted, tmp_path):
    train_on((1, 2), tmp_path, replace(FULL, max_steps=4), dropout=0.3)
    newest = find_checkpoints(tmp_path)[-1]
    for file in newest.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    session_pool().run(train_with_warning, tmp_path, r"step_00000004 is damaged", ranks=2)
    assert_same_curve(tmp_path, uninterrupted)


def train_with_warning(folder, match):
    shape = (1, torch.distributed.get_world_size())
    with pytest.warns(UserWarning, match=match):
        return train(folder, shape, FULL, 0.3)[0].step


def test_an_unfinished_checkpoint_does_not_count(uninterrupted, tmp_path):
    train_on((1, 1), tmp_path, replace(FULL, max_steps=4), dropout=0.3)
    (find_checkpoints(tmp_path)[-1] / ".metadata").unlink()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step_00000002"]
    train_on((1, 1), tmp_path, FULL, dropout=0.3)
    assert_same_curve(tmp_path, uninterrupted)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run of one process that was stopped after step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    outcome, weights = train(folder, config=configured(max_steps=2))
    return folder, weights, outcome


def test_what_is_not_there_or_not_wanted(stopped, tmp_path):
    with pytest.raises(CheckpointError, match=r"no finished checkpoint.*resume='must'"):
        train(tmp_path, config=configured(resume="must"))
    with pytest.raises(CheckpointError, match=r"holds step_00000002 and resume='never'"):
        train(stopped[0], config=configured(resume="never"))
    with pytest.raises(CheckpointError, match=r"made with seed=0, this run has seed=3"):
        train(stopped[0], config=configured(seed=3))


def test_all_checkpoints_damaged_is_an_error(stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    for file in (tmp_path / "run").glob("step_*/*.distcp"):
        file.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is damaged"),
        pytest.raises(CheckpointError, match="none of the 1 checkpoints"),
    ):
        train(tmp_path / "run")


def test_weights_alone(stopped):
    folder, weights, outcome = stopped
    model, _ = build(seed=5)
    assert load_model(model, folder) == outcome.checkpoint
    assert all(torch.equal(weights[name], weight) for name, weight in model.named_parameters())
    with pytest.raises(
        CheckpointError, match=r"another model; 3 weights differ: inner.0.bias \(8,\) there, \(9,\) here"
    ):
        load_model(Net(width=9).double(), folder)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load_model(model, folder / "nowhere")
