"""What one rank process of a `RankPool` does: join the group, then run tasks until told to stop.

A rank keeps its process group for its whole life. Its output goes to a file that the pool shows when a task fails, and
SIGUSR1 makes it write the Python stack of every thread to a second file, also while it is blocked inside a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpzoo.testing.agreement import forget_calls
from dpzoo.testing.outcome import Report
from dpzoo.testing.seeding import set_seed
from dpzoo.testing.transport import pack, unpack

SEED = 20240229
"""Every rank starts every task with this seed, so that `torch.randn` gives the same tensor on all ranks."""


@dataclass(frozen=True)
class RankSettings:
    """Who a rank is and where it meets the others."""

    rank: int
    ranks: int
    folder: str
    group_timeout: float

    @property
    def output_file(self) -> Path:
        return Path(self.folder, f"output-{self.rank}.txt")

    @property
    def stack_file(self) -> Path:
        return Path(self.folder, f"stack-{self.rank}.txt")


def run_rank(settings: RankSettings, connection: Connection) -> None:
    """Process entry: serve tasks from `connection` until it closes or an empty message arrives."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    # Ctrl-C goes to the whole process group; the pool decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(settings.output_file)
    with settings.stack_file.open("w") as stacks:
        if hasattr(signal, "SIGUSR1"):
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        join_group(settings)
        connection.send_bytes(b"ready")
        with contextlib.suppress(EOFError):
            while task := connection.recv_bytes():
                os.ftruncate(1, 0)
                report = perform_packed(task)
                connection.send_bytes(pack(report))
                if report.kind == "returned":
                    connection.send_bytes(pack(come_to_rest()))
    # Without a barrier a peer may still read from this rank; leaving at once is the quiet way out.
    os._exit(0)


def join_group(settings: RankSettings) -> None:
    """Make the default process group of exactly `settings.ranks` gloo ranks, on one thread per rank."""
    torch.set_num_threads(1)
    identity = {"RANK": settings.rank, "LOCAL_RANK": settings.rank}
    identity |= {"WORLD_SIZE": settings.ranks, "LOCAL_WORLD_SIZE": settings.ranks}
    os.environ.update({name: str(value) for name, value in identity.items()})
    if sys.platform == "linux":
        # Without it gloo resolves the host name, which a laptop off the network can not.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(settings.folder, "rendezvous")), settings.ranks),
        rank=settings.rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=settings.group_timeout),
    )


def perform_packed(task: bytes) -> Report:
    """Unpack (search path, payload) and perform it; a task that can not be read is a failed task."""
    try:
        path, payload = unpack(task)
        sys.path[:] = path
        fn, args, kwargs = unpack(payload)
    except BaseException as error:
        return _failure(error)
    return perform(fn, args, kwargs)


def perform(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Report:
    """Call `fn` with the fixed seed and report how it went; never raises."""
    set_seed(SEED)
    forget_calls()
    try:
        return Report("returned", value=pack(fn(*args, **kwargs)))
    except BaseException as error:
        return _failure(error)


def come_to_rest() -> Report:
    """Meet the other ranks. A hang or an error here means that the task left a collective that not all ranks made."""
    try:
        dist.barrier()
    except BaseException as error:
        return _failure(error)
    return Report("at rest")


def _failure(error: BaseException) -> Report:
    kind = "skipped" if type(error).__name__ == "Skipped" else "raised"
    # The first frame is `perform` itself.
    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    text = str(error) if kind == "skipped" else "".join(traceback.format_exception(type(error), error, frames))
    return Report(kind, text=text, error_type=type(error).__name__)


def _redirect_output(file: Path) -> None:
    """Point file descriptors 1 and 2 (C++ messages too) to `file`, and Python's streams to the descriptors."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def die_with_parent() -> None:
    """End this process when the one that started it ends, however that happens; runs in a thread."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
