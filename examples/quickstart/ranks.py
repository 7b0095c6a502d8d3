"""Starts the ranks of a quickstart script, or joins those that torchrun or srun started."""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing import spawn

from dpzoo.shard import DistributedManager
from dpzoo.shard.launcher import detect_launch

Example = Callable[[DeviceMesh, int], bool]  # (mesh, problem size) -> does it agree with one process?


def launch(example: Example, size: int, description: str | None = None) -> int:
    """Run `example` on every rank and return the exit status: 0 if it returned True, the same on every rank.

    Args:
        example: gets a mesh with one axis, "domain", over all ranks, and the size of its problem.
        size: the default of `--size`.
        description: what `--help` says.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (ignored under torchrun or srun)")
    parser.add_argument("--size", type=int, default=size, help="size of the problem")
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.size < 1:
        parser.error(f"--ranks and --size are at least 1, got {arguments.ranks} and {arguments.size}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank: they share the cores, and the race is fair
    if detect_launch(os.environ).launcher != "single":
        return _run(example, arguments.size)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start, (example, arguments.size, arguments.ranks, Path(folder)), nprocs=arguments.ranks)
        return int((Path(folder) / "status").read_text())


def _start(rank: int, example: Example, size: int, ranks: int, folder: Path) -> None:
    """One process of those that `launch` starts (CPU and gloo); they meet in `folder`, and rank 0 leaves the status."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), ranks), rank=rank, world_size=ranks)
    status = _run(example, size, device_type="cpu")
    dist.destroy_process_group()
    if rank == 0:
        (folder / "status").write_text(str(status))


def _run(example: Example, size: int, device_type: str | None = None) -> int:
    DistributedManager.initialize(device_type=device_type)
    mesh = DistributedManager().initialize_mesh(mesh_shape=(-1,), mesh_dim_names=("domain",))
    torch.manual_seed(0)  # every rank draws the same problem
    agrees = example(mesh, size)
    DistributedManager.cleanup()
    return 0 if agrees else 1
