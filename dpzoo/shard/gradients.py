"""Gradients of plain tensors (weights): complete on every rank when `backward()` returns.

An op on shards gives each rank its part of a weight's gradient. For a leaf weight the parts are collected in buckets,
summed over the group while backward goes on, and added to `.grad` by an engine callback at the end; so the parts never
mix with what other, unsharded uses of the same weight add to `.grad`. Where somebody reads the gradient earlier
(hooks on the weight, `autograd.grad`, second order, DDP, FSDP2, non-leaf tensors) it is summed at once instead. And
where a wrapper averages over the domain as well, a part is only scaled (see `averaging.py`).
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.shard import averaging
from dpzoo.shard import collectives as comm
from dpzoo.shard.tracing import is_tracing

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
BUCKET_BYTES = 25 * 2**20
MODES = ("bucket", "eager", "flat")
_mode = "bucket"


class When(IntEnum):
    """When the parts of a weight's gradient become its gradient; zero, and so false, if that is at once."""

    NOW = 0
    AT_THE_END = 1
    BY_THE_WRAPPER = 2


@contextmanager
def grad_sync(mode: str) -> Iterator[None]:
    """How weight gradients are summed over the domain; asked while forward runs.

    Args:
        mode: "bucket" (default): asynchronous and coalesced, complete when `backward()` returns. "eager": each one at
            once; use it when something reads `weight.grad` before `backward()` returns and registers no hook on the
            weight. "flat": not at all where a wrapper has promised to average over the domain too, else eager; this is
            what `dpzoo.parallel.parallelize` does.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"grad_sync takes 'bucket', 'eager' or 'flat', got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def flat_sync() -> AbstractContextManager[None]:
    """`grad_sync("flat")` for the forward of a wrapper; a user's "eager" around it stays."""
    return grad_sync("eager" if _mode == "eager" else "flat")


def may_defer() -> When:
    """Asked in forward: until when may the gradients that follow from it stay parts?

    Not beyond their arrival inside a DDP forward, which reads gradients as they arrive (so does FSDP2, whose weights
    `collect` knows). Nor when forward runs inside a backward pass (a reentrant checkpoint), where nobody can tell
    whether a wrapper is at work; nor in a graph, which has no end-of-backward callback and outlives its mode.
    """
    if _mode == "eager" or torch._C._current_graph_task_id() != -1 or is_tracing():
        return When.NOW
    if _mode == "flat":
        return When.BY_THE_WRAPPER
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        return When.NOW
    return When.AT_THE_END


def sum_over(g: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The sum over all the groups, at once."""
    for group in groups:
        g = comm.all_reduce(g, group)
    return g


def collect(when: When, node: Any, g: Tensor, groups: tuple[str, ...]) -> tuple[bool, Tensor | None]:
    """Take over the partial gradient `g` of the leaf behind `node`.

    Returns:
        Whether that was possible, else `g` must be summed at once; and what the node gets for now.

    Every rank answers alike: the graph, the hooks and the mode are the same on all ranks.
    """
    weight = _leaf(node) if when else None
    if weight is None:
        return False, None
    if when is When.AT_THE_END and averaging.is_fully_sharded(weight):
        return False, None
    scale = averaging.factor(weight, groups) if when is When.BY_THE_WRAPPER else 1
    if scale is None:
        return False, None
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the leaf is an input of autograd.grad, which hands the gradient out itself
        return False, None
    if not runs:  # backward(inputs=...) does not ask for this weight, nothing to sum
        return True, None
    if when is When.BY_THE_WRAPPER:
        return True, g * scale
    (_tasks.get(torch._C._current_graph_task_id()) or _new_task()).add(weight, g, groups)
    return True, None


def _leaf(node: Any) -> Tensor | None:
    """The weight whose gradient the node accumulates, if nobody looks at it on the way."""
    if torch.is_grad_enabled():
        return None
    weight = getattr(node, "variable", None)
    if weight is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return weight


def weight_grad(ctx: Any, position: int, g: Tensor, groups: tuple[str, ...]) -> Tensor | None:
    """What a Function returns for its plain input at `position`: the complete gradient, None if it is summed later."""
    if not groups:
        return g
    taken, instead = collect(ctx.defer, ctx.next_functions[position][0], g, groups)
    return instead if taken else sum_over(g, groups)


def again(ctx: Any, rule: Any, tensors: tuple[Tensor | None, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    """The backward of a one-node op for second derivatives: run the planned rule again and differentiate through it."""
    used = [t for t, needed in zip(tensors, ctx.needs_input_grad, strict=False) if needed and t is not None]
    with torch.enable_grad():
        out = rule(*tensors)
    found = iter(torch.autograd.grad(out, used, g, create_graph=True))
    return tuple(
        next(found) if needed and t is not None else None
        for t, needed in zip(tensors, ctx.needs_input_grad, strict=False)
    )


@dataclass
class _Bucket:
    """Partial gradients that travel together."""

    groups: tuple[str, ...]
    items: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    nbytes: int = 0
    flat: Tensor | None = None
    work: dist.Work | None = None

    def launch(self) -> None:
        """Start the sum over the first group."""
        # Always a copy: a gradient may be shared with another input of its op, and the sum is made in place.
        self.flat = _flatten([g for _, g in self.items])
        if len(self.items) == 1:
            self.flat = self.flat.clone()
        self.work = comm.all_reduce_async_(self.flat, self.groups[0]) if self.flat.numel() else None

    def finish(self) -> None:
        """Wait, sum over the other groups, and add to `.grad`."""
        assert self.flat is not None
        if self.work is not None:
            self.work.wait()
        flat = sum_over(self.flat, self.groups[1:])
        for (weight, _), g in zip(self.items, _unflatten(flat, [g for _, g in self.items]), strict=True):
            if weight.data_ptr() == 0 and weight.numel():
                raise RuntimeError(
                    "a sharded weight was freed before its gradient was summed over the domain mesh; "
                    "run forward and backward under dpzoo.shard.grad_sync('eager')"
                )
            accumulate(weight, g)


def accumulate(weight: Tensor, g: Tensor) -> None:
    """Add to `weight.grad` as autograd does: into the tensor that is there, else a tensor in the weight's layout."""
    before = weight.grad
    if before is not None:
        before.add_(g)
    elif weight.is_contiguous():
        weight.grad = g if g.dtype is weight.dtype else g.to(weight.dtype)
    else:
        weight.grad = torch.empty_like(weight).copy_(g)


class _Task:
    """The buckets of one backward pass."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._open: dict[Any, _Bucket] = {}
        self._sent: list[_Bucket] = []
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def add(self, weight: Tensor, g: Tensor, groups: tuple[str, ...]) -> None:
        key = (groups, g.dtype, g.device)
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = _Bucket(groups)
        bucket.items.append((weight, g))
        bucket.nbytes += g.nbytes
        if bucket.nbytes >= BUCKET_BYTES:
            self._send(self._open.pop(key))

    def _send(self, bucket: _Bucket) -> None:
        bucket.launch()
        self._sent.append(bucket)

    def _finish(self) -> None:
        _tasks.pop(self._number, None)
        with torch.no_grad():
            for bucket in self._open.values():
                self._send(bucket)
            for bucket in self._sent:
                bucket.finish()


_MAX_TASKS = 16
_tasks: OrderedDict[int, _Task] = OrderedDict()


def _new_task() -> _Task:
    """The collector of the backward pass that has just begun (nested passes have their own)."""
    number = torch._C._current_graph_task_id()
    task = _tasks[number] = _Task(number)
    while len(_tasks) > _MAX_TASKS:  # passes that failed never finish
        _tasks.popitem(last=False)
    return task
