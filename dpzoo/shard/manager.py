"""``DistributedManager``: one answer, anywhere in a program, to "who am I and who else is there?".

A script calls ``DistributedManager.initialize()`` once; the same script then runs alone, under torchrun, SLURM or
OpenMPI. Every ``DistributedManager()`` made afterwards sees the same state.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dpzoo.shard.launcher import Launch, detect_launch
from dpzoo.shard.mesh_layout import resolve_mesh_shape


@dataclass(frozen=True)
class _State:
    launch: Launch
    device: torch.device
    owns_group: bool


class DistributedManager:
    """The process's rank, its device, and meshes over all ranks; every instance shares one state.

    Example::

        DistributedManager.initialize()
        manager = DistributedManager()
        mesh = manager.initialize_mesh(mesh_shape=(-1, 2), mesh_dim_names=("ddp", "domain"))
        x = dpzoo.scatter(sample, mesh["domain"], dim=2)

    Raises:
        RuntimeError: when an instance is made before ``initialize()``.
    """

    _state: ClassVar[_State | None] = None

    def __init__(self) -> None:
        self._current()

    @classmethod
    def initialize(
        cls, *, timeout: timedelta | None = None, launcher: str | None = None, device_type: str | None = None
    ) -> None:
        """Read the launcher's environment, choose the device and join the default process group.

        A process started by no launcher becomes a world of one and joins nothing. A process group that already
        exists is adopted: its ranks are used and ``cleanup()`` leaves it alone. A second call changes nothing.

        Args:
            timeout: how long a collective may wait for the other ranks; torch's default if None.
            launcher: ``"torchrun"``, ``"slurm"``, ``"openmpi"`` or ``"single"``; found from the environment if None.
            device_type: ``"cuda"`` or ``"cpu"``; CUDA where there is any if None.

        Raises:
            RuntimeError: if the environment is incomplete or contradicts itself, or the device does not exist.
            ValueError: if ``launcher`` or ``device_type`` is not a known name.
        """
        if cls._state is not None:
            if (timeout, launcher, device_type) != (None, None, None):
                warnings.warn("DistributedManager is already initialized; these arguments are ignored", stacklevel=2)
            return
        adopted = dist.is_initialized()
        launch = _adopt_group(os.environ) if adopted else detect_launch(os.environ, launcher)
        device = _choose_device(launch.local_rank, device_type)
        if not adopted and launch.launcher != "single":
            _join_group(launch, device, timeout)
        cls._state = _State(launch, device, owns_group=not adopted)

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether ``initialize()`` has run (and ``cleanup()`` has not)."""
        return cls._state is not None

    @classmethod
    def cleanup(cls, barrier: bool = False) -> None:
        """Leave the process group and forget everything; harmless when there is nothing to clean.

        Args:
            barrier: wait first until every rank has come here.
        """
        state, cls._state = cls._state, None
        if state is None or not dist.is_initialized():
            return
        if barrier:
            dist.barrier()
        if state.owns_group:
            dist.destroy_process_group()

    @classmethod
    def _current(cls) -> _State:
        if cls._state is None:
            raise RuntimeError(
                "DistributedManager is not initialized; call DistributedManager.initialize() once at the start of the "
                "program, on every rank"
            )
        return cls._state

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0."""
        return self._current().launch.rank

    @property
    def local_rank(self) -> int:
        """Number of this process among those on its node, from 0."""
        return self._current().launch.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._current().launch.world_size

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors belong."""
        return self._current().device

    @property
    def distributed(self) -> bool:
        """Whether more than one process runs."""
        return self.world_size > 1

    def initialize_mesh(self, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
        """Lay all ranks out as a grid with named axes; every rank makes the same call.

        Args:
            mesh_shape: size of each axis; at most one may be -1, "whatever is left".
            mesh_dim_names: one distinct name per axis.

        Returns:
            The mesh. On a single process all sizes are 1 and nothing beyond the loopback device is used.

        Raises:
            ValueError: if the sizes do not multiply to the world size; the message names the numbers.
        """
        sizes, names = resolve_mesh_shape(mesh_shape, mesh_dim_names, self.world_size)
        if not dist.is_initialized():
            # A mesh needs a group even when it is alone; with a store in memory no address is looked up.
            dist.init_process_group(_backend(self.device), store=dist.HashStore(), rank=0, world_size=1)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=names)

    def __repr__(self) -> str:
        launch = self._current().launch
        return f"DistributedManager(rank {launch.rank} of {launch.world_size}, {self.device}, {launch.launcher})"


def _adopt_group(environ: "os._Environ[str]") -> Launch:
    rank = dist.get_rank()
    return Launch("existing group", rank, dist.get_world_size(), local_rank=int(environ.get("LOCAL_RANK", rank)))


def _choose_device(local_rank: int, device_type: str | None) -> torch.device:
    if device_type not in (None, "cpu", "cuda"):
        raise ValueError(f"device_type is {device_type!r}; choose 'cuda', 'cpu', or None for CUDA where there is any")
    count = torch.cuda.device_count() if device_type != "cpu" and torch.cuda.is_available() else 0
    if count == 0:
        if device_type == "cuda":
            raise RuntimeError("device_type='cuda' was asked for but torch finds no CUDA device; use 'cpu' or None")
        return torch.device("cpu")
    # One visible device per process is how SLURM and MPI bind: every process then calls its own device 0.
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no CUDA device: {count} are visible; start at most {count} processes on "
            "this node or make more devices visible"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device) -> str:
    # Both on CUDA: checkpoints and control messages travel as CPU tensors.
    return "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"


def _join_group(launch: Launch, device: torch.device, timeout: timedelta | None) -> None:
    if launch.launcher == "torchrun":
        # torchrun's agent may already hold the store at that address; env:// is the spelling that knows.
        where = "env://"
    else:
        where = f"tcp://{launch.master_addr}:{launch.master_port}"
    dist.init_process_group(
        _backend(device), init_method=where, rank=launch.rank, world_size=launch.world_size, timeout=timeout
    )
