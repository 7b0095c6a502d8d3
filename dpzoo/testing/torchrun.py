"""The same tests on real devices: under `torchrun --nproc-per-node N -m pytest` a task runs in the given processes.

Every process collects the same tests in the same order. A task on WORLD_SIZE ranks is called here, on the default group
(nccl where each rank has its own GPU, else gloo); after it the ranks exchange how it went, so that all fail together.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dpzoo.testing.agreement import Absent, exchange, forget_calls
from dpzoo.testing.outcome import Report, failure_of
from dpzoo.testing.transport import unpack
from dpzoo.testing.worker import perform

_made_here: list[bool] = []


def under_torchrun() -> bool:
    """Whether a launcher made this process one of several ranks (and it is not a rank of a `RankPool`)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def device_type() -> str:
    """ "cuda" when the default group speaks nccl, else "cpu": where `domain_mesh` and `assert_parity` put tensors."""
    uses_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return "cuda" if uses_nccl else "cpu"


def join_launched_group(group_timeout: float = 60.0) -> None:
    """Make the default group from the launcher's environment, once."""
    if dist.is_initialized():
        return
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    has_own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    timeout = timedelta(seconds=group_timeout)
    if has_own_gpu:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local_rank))
    else:
        dist.init_process_group("gloo", timeout=timeout)
    _made_here.append(True)


def leave_launched_group() -> None:
    """Destroy the default group if `join_launched_group` made it."""
    if _made_here and dist.is_initialized():
        dist.destroy_process_group()
    _made_here.clear()


def run_in_this_process(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: int, timeout: float
) -> list[Any]:
    """Perform the task here when WORLD_SIZE is `ranks`, else skip the test. A hang ends the process with its stacks."""
    __tracebackhide__ = True
    world = int(os.environ["WORLD_SIZE"])
    if world != ranks:
        import pytest

        pytest.skip(f"a task on {ranks} ranks; torchrun started {world}")
    join_launched_group()
    faulthandler.dump_traceback_later(timeout + 30, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        own = perform(fn, args, kwargs)
        forget_calls()
        reports: dict[int, Report] = exchange(own, wait_s=5.0 if own.kind == "raised" else timeout)
        absent: dict[int, str] = {}
    except Absent as error:
        reports, absent = error.present, dict.fromkeys(error.missing, "did not report; its own output has more")
    finally:
        faulthandler.cancel_dump_traceback_later()
    failed = absent or any(report.kind != "returned" for report in reports.values())
    if failed:
        raise failure_of(name, reports, absent, timeout)
    dist.barrier()
    return [unpack(reports[rank].value) for rank in range(ranks)]
