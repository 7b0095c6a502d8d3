"""DistributedManager: who am I under each launcher, what is refused, and meshes on one process and on two."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dpzoo.shard.launcher import detect_launch
from dpzoo.shard.manager import DistributedManager
from dpzoo.shard.mesh_layout import resolve_mesh_shape

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    "SLURM_JOB_ID": "17",
}


@pytest.fixture
def alone(monkeypatch):
    """A process that no launcher started and that has no process group, and is left so."""
    if dist.is_initialized():
        pytest.skip("the test process already belongs to a process group")
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    yield monkeypatch
    DistributedManager.cleanup()
    assert not dist.is_initialized()


def whereabouts(environ, launcher=None):
    launch = detect_launch(environ, launcher)
    return launch.launcher, launch.rank, launch.world_size, launch.local_rank, launch.master_addr


class TestDetectLaunch:
    def test_nothing_set_is_a_single_process(self):
        assert whereabouts({}) == ("single", 0, 1, 0, None)

    def test_torchrun(self):
        assert whereabouts(TORCHRUN) == ("torchrun", 3, 8, 1, "10.0.0.1")
        assert detect_launch(TORCHRUN).master_port == 4000

    def test_slurm(self):
        assert whereabouts(SLURM) == ("slurm", 5, 8, 1, "10.0.0.9")

    def test_slurm_step_smaller_than_its_allocation(self):
        assert detect_launch(SLURM | {"SLURM_STEP_NUM_TASKS": "6"}).world_size == 6

    def test_slurm_address_and_port_may_be_given(self):
        launch = detect_launch(SLURM | {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"})
        assert (launch.master_addr, launch.master_port) == ("node7", 1234)

    def test_slurm_jobs_meet_at_different_ports(self):
        ports = {detect_launch(SLURM | {"SLURM_JOB_ID": str(job)}).master_port for job in range(100, 150)}
        assert len(ports) == 50

    def test_openmpi_on_one_node_meets_at_localhost(self):
        assert whereabouts(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "6"}) == ("openmpi", 2, 6, 2, "127.0.0.1")

    def test_openmpi_over_nodes_needs_an_address(self):
        environ = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
        with pytest.raises(RuntimeError, match=r"6 processes .* several nodes and MASTER_ADDR is not set"):
            detect_launch(environ)
        assert detect_launch(environ | {"MASTER_ADDR": "node0"}).master_addr == "node0"

    def test_inner_launcher_wins_over_the_job_it_runs_in(self):
        assert detect_launch(SLURM | TORCHRUN).launcher == "torchrun"
        assert detect_launch(SLURM | OPENMPI | {"MASTER_ADDR": "node0"}).launcher == "openmpi"

    def test_launcher_can_be_named(self):
        assert whereabouts(SLURM, "single") == ("single", 0, 1, 0, None)
        assert detect_launch(SLURM | TORCHRUN, "slurm").rank == 5
        with pytest.raises(ValueError, match="'pbs' is unknown; choose one of torchrun, openmpi, slurm, single"):
            detect_launch({}, "pbs")

    @pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
    def test_half_an_environment_names_what_is_missing(self, missing):
        environ = {name: value for name, value in TORCHRUN.items() if name != missing}
        with pytest.raises(RuntimeError, match=f"torchrun environment: {missing} is not set"):
            detect_launch(environ)

    def test_not_a_number(self):
        with pytest.raises(RuntimeError, match="RANK is 'first', not a whole number"):
            detect_launch(TORCHRUN | {"RANK": "first"})

    def test_rank_outside_the_world(self):
        with pytest.raises(RuntimeError, match=r"rank 8 of 8 processes is impossible; the rank must be in 0\.\.7"):
            detect_launch(TORCHRUN | {"RANK": "8"})


class TestMeshShape:
    @pytest.mark.parametrize(
        ("shape", "world_size", "resolved"),
        [((-1,), 5, (5,)), ((2, -1), 6, (2, 3)), ((-1, 6), 6, (1, 6)), ((2, 3), 6, (2, 3)), ((1, -1, 2), 8, (1, 4, 2))],
    )
    def test_sizes(self, shape, world_size, resolved):
        names = ("a", "b", "c")[: len(shape)]
        assert resolve_mesh_shape(list(shape), list(names), world_size) == (resolved, names)

    @pytest.mark.parametrize(
        ("shape", "names", "message"),
        [
            ((2, 2), ("a", "b"), r"\(2, 2\) needs 2 x 2 = 4 processes but there are 6"),
            ((4, -1), ("a", "b"), r"\(4, -1\): 6 processes cannot be divided by 4"),
            ((-1, -1), ("a", "b"), r"\(-1, -1\) has 2 axes of size -1; only one can be inferred"),
            ((2, 3), ("a",), r"\(2, 3\) has 2 axes but mesh_dim_names \('a',\) has 1 names"),
            ((2, 3), ("a", "a"), r"\('a', 'a'\) names an axis twice"),
            ((6,), "a", r"is the string 'a'; give a sequence of names"),
            ((), (), "mesh_shape is empty"),
            ((6, 0), ("a", "b"), r"\(6, 0\): axis 1 is 0"),
            ((-2, 3), ("a", "b"), r"\(-2, 3\): axis 0 is -2"),
            ((6.0,), ("a",), r"axis 0 is 6\.0"),
        ],
    )
    def test_refused_with_the_numbers(self, shape, names, message):
        with pytest.raises(ValueError, match=message):
            resolve_mesh_shape(shape, names, world_size=6)


class TestOneProcess:
    def test_before_initialize(self, alone):
        assert not DistributedManager.is_initialized()
        with pytest.raises(RuntimeError, match=r"call DistributedManager\.initialize\(\) once"):
            DistributedManager()

    def test_instance_kept_over_cleanup_is_refused(self, alone):
        DistributedManager.initialize(device_type="cpu")
        manager = DistributedManager()
        DistributedManager.cleanup()
        with pytest.raises(RuntimeError, match="not initialized"):
            _ = manager.rank

    def test_world_of_one(self, alone):
        DistributedManager.initialize(device_type="cpu")
        manager = DistributedManager()
        assert (manager.rank, manager.local_rank, manager.world_size) == (0, 0, 1)
        assert manager.device == torch.device("cpu")
        assert not manager.distributed
        assert not dist.is_initialized()

    @pytest.mark.parametrize("shape", [(-1, 1), (1, 1)])
    def test_mesh_of_one(self, alone, shape):
        DistributedManager.initialize(device_type="cpu")
        mesh = DistributedManager().initialize_mesh(shape, ("ddp", "domain"))
        assert mesh["domain"].size() == 1
        total = torch.ones(1)
        dist.all_reduce(total, group=mesh.get_group("domain"))
        assert total.item() == 1

    def test_mesh_needs_no_address(self, alone):
        alone.setenv("MASTER_ADDR", "host.invalid")
        DistributedManager.initialize(device_type="cpu")
        assert DistributedManager().initialize_mesh((1,), ("domain",)).size() == 1

    def test_mesh_too_large(self, alone):
        DistributedManager.initialize(device_type="cpu")
        with pytest.raises(ValueError, match="2 processes but there are 1"):
            DistributedManager().initialize_mesh((2,), ("domain",))
        assert not dist.is_initialized()

    def test_second_initialize_changes_nothing(self, alone):
        DistributedManager.initialize(device_type="cpu")
        DistributedManager.initialize()
        with pytest.warns(UserWarning, match="already initialized"):
            DistributedManager.initialize(timeout=timedelta(seconds=5))

    def test_unknown_device_type(self, alone):
        with pytest.raises(ValueError, match="device_type is 'tpu'"):
            DistributedManager.initialize(device_type="tpu")
        assert not DistributedManager.is_initialized()

    def test_existing_group_is_adopted_and_kept(self, alone):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            DistributedManager.initialize(device_type="cpu")
            assert DistributedManager().initialize_mesh((-1,), ("domain",)).size() == 1
            DistributedManager.cleanup()
            assert dist.is_initialized()
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize(("visible", "local_rank", "index"), [(4, 2, 2), (1, 2, 0)])
    def test_cuda_device_by_local_rank(self, alone, visible, local_rank, index):
        pretend_cuda(alone, visible, local_rank)
        DistributedManager.initialize()
        assert DistributedManager().device == torch.device("cuda", index)

    def test_more_processes_than_cuda_devices(self, alone):
        pretend_cuda(alone, visible=2, local_rank=2)
        with pytest.raises(RuntimeError, match="local rank 2 has no CUDA device: 2 are visible"):
            DistributedManager.initialize()


def pretend_cuda(monkeypatch, visible, local_rank):
    launch = detect_launch(OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank), "MASTER_ADDR": "node0"})
    monkeypatch.setattr("dpzoo.shard.manager.detect_launch", lambda environ, launcher: launch)
    monkeypatch.setattr("dpzoo.shard.manager._join_group", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def environment_of(launcher, rank, port):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = {
        "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    }[launcher]
    return address | dict(zip(ranks, map(str, (rank, 2, rank)), strict=True))


def two_ranks_meet(rank, ports, folder):
    """In each launcher's environment in turn: join, lay out a mesh, add the ranks up, leave."""
    seen = []
    for launcher, port in ports.items():
        os.environ.update(environ := environment_of(launcher, rank, port))
        DistributedManager.initialize(timeout=timedelta(seconds=30), device_type="cpu")
        manager = DistributedManager()
        mesh = manager.initialize_mesh((1, -1), ("ddp", "domain"))
        total = torch.tensor([float(manager.rank + 1)])
        dist.all_reduce(total, group=mesh.get_group("domain"))
        seen.append((manager.rank, manager.world_size, manager.distributed, tuple(mesh.shape), total.item()))
        DistributedManager.cleanup(barrier=True)
        for name in environ:
            del os.environ[name]
    torch.save(seen, Path(folder) / f"{rank}.pt")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(90)
def test_two_processes_under_each_launcher(alone, tmp_path):
    ports = {launcher: free_port() for launcher in ("torchrun", "openmpi", "slurm")}
    mp.spawn(two_ranks_meet, args=(ports, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == [(rank, 2, True, (1, 2), 3.0)] * 3
