"""An impossible request must raise on every rank, and leave the group able to work."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import scatter
from dpzoo.testing.agreement import Absent, exchange
from dpzoo.testing.meshes import domain_mesh
from dpzoo.testing.torchrun import device_type


def expect_error(
    fn: Callable[[], Any],
    exception: type[BaseException] | tuple[type[BaseException], ...],
    match: str | None = None,
    mesh: DeviceMesh | None = None,
    wait_s: float = 5.0,
) -> str:
    """Check that `fn()` raises on every rank, then that the ranks can still talk. All ranks of `mesh` call it.

    The ranks compare notes outside their process group, so that a rank which raised alone is reported as that and
    does not leave the others waiting.

    Args:
        exception: the type that every rank has to raise.
        match: a regular expression that every rank's message has to contain.
        mesh: the ranks that take part; all of the task by default.
        wait_s: seconds that the others have to arrive after this rank.

    Returns:
        The message on this rank.

    Raises:
        AssertionError: on every rank that arrived, with what happened on each.
    """
    __tracebackhide__ = True
    outcome = _outcome_of(fn, exception, match)
    ranks = None if mesh is None else mesh.mesh.flatten().tolist()
    try:
        outcomes = exchange(outcome, ranks, wait_s)
    except Absent as error:
        seen = "; ".join(f"rank {rank} {text}" for rank, (_, text) in error.present.items())
        raise AssertionError(
            f"expect_error: {seen}; ranks {list(error.missing)} did not come back within {wait_s:g} s: "
            "they wait for the others or are still at work"
        ) from None
    if not all(good for good, _ in outcomes.values()):
        expected = f"{_names(exception)}" + (f" matching {match!r}" if match else "")
        found = "\n".join(f"  rank {rank} {text}" for rank, (_, text) in outcomes.items())
        raise AssertionError(f"expect_error: every rank should raise {expected}; found\n{found}")
    _check_alive(mesh)
    return outcome[1]


def expect_same_error(
    fn: Callable[[Tensor], Any], full: Tensor, dim: int, mesh: DeviceMesh | None = None, requires_grad: bool = False
) -> str:
    """Check that `fn` of a tensor cut along `dim` raises, on every rank, the class that plain torch raises for `full`.

    Args:
        full: the whole tensor, the same on every rank of `mesh` (a 1-D mesh; all ranks of the task by default).
        requires_grad: whether the sharded tensor needs a gradient.

    Returns:
        The message on this rank.

    Raises:
        AssertionError: plain torch accepts the call, or some rank did something else than raise that class.
    """
    __tracebackhide__ = True
    try:
        fn(full)
    except Exception as error:
        expected = type(error)
    else:
        raise AssertionError("expect_same_error: plain torch accepts this call, there is no error to compare with")
    mesh = domain_mesh() if mesh is None else mesh
    sharded = scatter(full, mesh, dim, requires_grad=requires_grad)
    return expect_error(lambda: fn(sharded), expected, mesh=mesh)


def _outcome_of(
    fn: Callable[[], Any], exception: type[BaseException] | tuple[type[BaseException], ...], match: str | None
) -> tuple[bool, str]:
    try:
        value = fn()
    except BaseException as error:
        text = f"raised {type(error).__name__}: {error}"
        return isinstance(error, exception) and (match is None or re.search(match, str(error)) is not None), text
    return False, f"returned a {type(value).__name__}"


def _check_alive(mesh: DeviceMesh | None) -> None:
    """A collective whose result depends on every rank: one left behind by `fn` would answer in its place."""
    groups = [dist.group.WORLD] if mesh is None else [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for group in groups:
        total = torch.tensor(2.0 ** dist.get_rank(group), device=device_type())
        dist.all_reduce(total, group=group)
        expected = 2.0 ** dist.get_world_size(group) - 1
        assert total.item() == expected, f"after the error the group answers {total.item()} where {expected} is right"


def _names(exception: type[BaseException] | tuple[type[BaseException], ...]) -> str:
    types = exception if isinstance(exception, tuple) else (exception,)
    return " or ".join(each.__name__ for each in types)
