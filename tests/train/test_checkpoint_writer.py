"""Checkpoints on the disk: all or nothing, in the background too; damage is named; each part is written once."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from dpzoo.shard import ShardTensor
from dpzoo.testing import distributed, expect_error, session_pool
from dpzoo.train import CheckpointError, CheckpointWriter, DivergedError, Team, find_checkpoints, fit, latest_checkpoint
from dpzoo.train.checkpoint_files import find_damage, in_order_of_trial
from dpzoo.train.checkpoint_reader import Stored, read_into, whole_metadata
from tests.train.toy import Clouds, build, configured, objective


def state_of(value, extra=()):
    return {"model": {"w": torch.full((3, 2), float(value)), "b": torch.arange(4.0)}, "text": f"{value}", **dict(extra)}


def loaded(path):
    state = {"model": {"w": torch.zeros(3, 2), "b": torch.zeros(4)}, "text": None}
    assert read_into(state, path)
    return state["model"]["w"][0, 0].item(), state["text"]


def names(folder):
    return [path.name for path in find_checkpoints(folder)]


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_stay_and_latest_is_the_last(background, tmp_path):
    (tmp_path / "step_00000009.partial").mkdir()  # left by a run that was killed
    with CheckpointWriter(tmp_path, Team(), keep=2, background=background) as writer:
        for step in (1, 2, 10, 3):  # 10, then taken back
            writer.save(step, state_of(step))
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000010"]
    assert latest_checkpoint(tmp_path).name == "step_00000003"
    assert [path.name for path in in_order_of_trial(tmp_path)] == ["step_00000003", "step_00000010", "step_00000002"]
    assert not list(tmp_path.glob("*.partial"))
    assert loaded(tmp_path / "step_00000003") == (3.0, "3")
    with CheckpointWriter(tmp_path, Team()) as writer:  # the same step again replaces it; another tree is planned anew
        writer.save(3, state_of(4, extra={"more": torch.ones(2)}))
        writer.save(3, state_of(5))
    assert loaded(tmp_path / "step_00000003") == (5.0, "5")
    assert find_damage(tmp_path / "step_00000003") is None
    assert not Stored(whole_metadata(tmp_path / "step_00000003")).has("more")


class Gate:
    """Holds the writing of files until it is opened."""

    def __init__(self, monkeypatch):
        self.open, self.entered = threading.Event(), []
        write = FileSystemWriter.write_data

        def wait(writer, plan, planner):
            self.entered.append(threading.current_thread().name)
            assert self.open.wait(20)
            return write(writer, plan, planner)

        monkeypatch.setattr(FileSystemWriter, "write_data", wait)


def test_in_the_background_it_holds_what_was_there_when_save_returned(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with CheckpointWriter(tmp_path, Team(), background=True) as writer:
        state = state_of(1)
        assert writer.save(1, state) == tmp_path / "step_00000001"
        state["model"]["w"].fill_(99)  # the next training step
        writer.settle()
        assert names(tmp_path) == [] and latest_checkpoint(tmp_path) is None
        threading.Timer(0.3, gate.open.set).start()
        begin = time.perf_counter()
        writer.save(2, state)  # waits for the first
        assert time.perf_counter() - begin > 0.2
        assert names(tmp_path) == ["step_00000001"]
        while not writer._under_way[1].done():
            time.sleep(0.01)
        writer.settle()
        assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert loaded(tmp_path / "step_00000001") == (1.0, "1")
    assert loaded(tmp_path / "step_00000002") == (99.0, "1")
    assert all(name.startswith("checkpoint") for name in gate.entered)


def fail_on_rank_1(folder, background):
    mesh = init_device_mesh("cpu", (2,))
    write = FileSystemWriter.write_data

    def full_disk(writer, plan, planner):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return write(writer, plan, planner)

    writer = CheckpointWriter(folder, Team(mesh), background=background)
    writer.save(1, state_of(1))
    writer.finish()
    FileSystemWriter.write_data = full_disk
    try:

        def save():
            writer.save(2, state_of(2))
            writer.finish()

        expect_error(save, CheckpointError, r"step_00000002 could not be written \(rank 1: OSError.*No space left")
    finally:
        FileSystemWriter.write_data = write
    assert latest_checkpoint(folder).name == "step_00000001"
    writer.save(3, state_of(3))  # the disk has space again
    writer.finish()
    writer.close()


@pytest.mark.parametrize("background", [False, True])
def test_an_error_on_one_rank_is_told_on_all_and_the_checkpoint_before_stays(background, tmp_path):
    session_pool().run(fail_on_rank_1, tmp_path, background, ranks=2)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]
    assert loaded(tmp_path / "step_00000003") == (3.0, "3")


@distributed(ranks=2)
def test_a_folder_that_cannot_be_made_is_told_on_all_ranks():
    writer = CheckpointWriter(Path("/dev/null/run"), Team(init_device_mesh("cpu", (2,))))
    expect_error(
        lambda: writer.save(1, state_of(1)), CheckpointError, r"step_00000001 cannot be written \(rank 0: NotADirectory"
    )


DAMAGES = {
    "truncated": (lambda f: f.write_bytes(f.read_bytes()[:-1]), r"__0_0.distcp has \d+ bytes, \d+ were written"),
    "missing": (lambda f: f.unlink(), r"__0_0.distcp is missing"),
    "changed": (
        lambda f: f.write_bytes(bytes([f.read_bytes()[0] ^ 1]) + f.read_bytes()[1:]),
        r"__0_0.distcp has other contents than were written",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(kind, tmp_path):
    with CheckpointWriter(tmp_path, Team()) as writer:
        path = writer.save(1, state_of(1))
    damage, match = DAMAGES[kind]
    damage(path / "__0_0.distcp")
    with pytest.warns(UserWarning, match=rf"step_00000001 is damaged: {match}"):
        assert whole_metadata(path) is None


def test_a_manifest_that_is_cut_off_is_named(tmp_path):
    with CheckpointWriter(tmp_path, Team()) as writer:
        path = writer.save(1, state_of(1))
    manifest = path / "manifest.json"
    assert set(json.loads(manifest.read_text())["files"]) == {".metadata", "__0_0.distcp"}
    manifest.write_text(manifest.read_text()[:-9])
    assert find_damage(path).startswith("manifest.json cannot be read")


# ---------------------------------------------------------------------- who copies and writes what
def save_cut_state(folder):
    """On 2 x 2 ranks: a replicated weight, and shards (5, 2) whose copies lie on the other replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    weight, field = torch.arange(1000.0), torch.arange(7 * 300.0).view(7, 300)
    shards = ShardTensor.from_local(field, mesh, [Replicate(), Replicate()]).redistribute(
        placements=[Replicate(), Shard(0)], sizes={1: (5, 2)}
    )
    with CheckpointWriter(folder, Team(mesh), background=True) as writer:
        writer.save(1, {"model": {"weight": weight, "field": shards}})
        copied = sum(t.nbytes for t in writer._copies.values())
        with torch.no_grad():
            shards.add_(1)
        gathered = []
        writer.team.through_first = lambda value, share: (
            gathered.append(1) or Team.through_first(writer.team, value, share)
        )
        writer.save(2, {"model": {"weight": weight, "field": shards}})
        writer.finish()
    target = {"model": {"weight": torch.zeros(1000), "field": torch.zeros(7, 300)}}
    assert read_into(target, folder / "step_00000002")
    assert torch.equal(target["model"]["field"], field + 1) and torch.equal(target["model"]["weight"], weight)
    return copied, len(gathered)


def test_each_part_is_copied_and_written_by_one_rank(tmp_path):
    found = session_pool().run(save_cut_state, tmp_path, ranks=4)
    assert sum(copied for copied, _ in found) == 4 * (1000 + 2100)
    assert max(copied for copied, _ in found) <= 4 * (1000 + 1500)
    assert {gathered for _, gathered in found} == {2}  # both checkpoints published, the second not planned anew


def test_a_run_that_diverges_finishes_the_checkpoint_that_it_writes(tmp_path):
    steps = []

    def explode(model, sample):
        steps.append(1)
        return {"loss": objective(model, sample)["loss"] * (float("nan") if len(steps) > 2 else 1.0)}

    model, optimizer = build()
    config = configured(checkpoint_every=2, async_checkpoint=True)
    with pytest.raises(DivergedError):
        fit(model, optimizer, Clouds(samples=5), explode, config, tmp_path)
    assert names(tmp_path) == ["step_00000002"]
