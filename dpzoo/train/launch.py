"""Start a script's ranks, or join those that torchrun, srun or mpirun started."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException, start_processes

from dpzoo.shard import DistributedManager
from dpzoo.shard.launcher import detect_launch

FIRST = "first_failure"


def launch(run: Callable[..., int | None], ranks: int, *args: Any) -> int:
    """Call `run(*args)` on every rank, with `DistributedManager` initialised; returns rank 0's status (None is 0).

    Under a launcher this process is one of its ranks and `ranks` is ignored. Otherwise `ranks` processes are started
    here: nccl if there is a CUDA device for each, else gloo on the CPU. SIGTERM to this process goes on to all of them.

    Args:
        run: a function at the top level of a module.

    Raises:
        ValueError: fewer than one rank.
        ProcessRaisedException: a rank raised; the others were ended. If several did, it is the first: what the others
            raise then is mostly that they lost it.
    """
    if ranks < 1:
        raise ValueError(f"launch: ranks is {ranks}, it must be at least 1")
    if detect_launch(os.environ).launcher != "single" or dist.is_initialized():
        return _perform(run, args)
    if ranks == 1:
        return _perform(run, args)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        context = start_processes(_start, (run, args, ranks, folder), nprocs=ranks, join=False, start_method="spawn")
        assert context is not None

        def pass_on(number: int, frame: FrameType | None) -> None:
            for process in context.processes:
                process.terminate()

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            while not context.join():
                pass
        except ProcessRaisedException as error:
            if (folder / FIRST).exists():
                rank, _, text = (folder / FIRST).read_text().partition("\n")
                message = f"\n\n-- Rank {rank} was the first to fail:\n{text}"
                raise ProcessRaisedException(message, int(rank), error.error_pid) from None
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        return int((folder / "status").read_text())


def _start(rank: int, run: Callable[..., int | None], args: tuple[Any, ...], ranks: int, folder: Path) -> None:
    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which a laptop off the network can not.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(str(folder / "meeting"), ranks)
    backend = "cuda:nccl,cpu:gloo" if on_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    status = _perform(_noting_failure, (folder, rank, run, args), None if on_cuda else "cpu")
    dist.destroy_process_group()
    if rank == 0:
        (folder / "status").write_text(str(status))


def _noting_failure(folder: Path, rank: int, run: Callable[..., int | None], args: tuple[Any, ...]) -> int | None:
    """Write down the first error of all ranks, before the others can see that this one is gone."""
    try:
        return run(*args)
    except Exception:
        with suppress(OSError):  # another was first
            own = folder / f"failed_{rank}"
            own.write_text(f"{rank}\n{traceback.format_exc()}")
            os.link(own, folder / FIRST)  # whole, or not at all
        raise


def _perform(run: Callable[..., int | None], args: tuple[Any, ...], device_type: str | None = None) -> int:
    mine = not DistributedManager.is_initialized()
    if mine:
        DistributedManager.initialize(device_type=device_type)
    try:
        return run(*args) or 0
    finally:
        if mine:
            DistributedManager.cleanup()
