"""Gradients of plain tensors (weights): complete on every rank when `backward()` returns.

An op on shards gives each rank its part of a weight's gradient. For a leaf weight the parts are collected in buckets,
summed over the group while backward goes on, and added to `.grad` by an engine callback at the end; so the parts never
mix with what other, unsharded uses of the same weight add to `.grad`. Where somebody reads the gradient earlier
(hooks on the weight, `autograd.grad`, second order, DDP, non-leaf tensors) it is summed at once instead.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.shard import collectives as comm
from dpzoo.shard.tracing import is_tracing

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
BUCKET_BYTES = 25 * 2**20
_mode = "bucket"


@contextmanager
def grad_sync(mode: str) -> Iterator[None]:
    """How weight gradients are summed: "bucket" (default: asynchronous, coalesced) or "eager" (each one at once).

    Use "eager" when something reads `weight.grad` before `backward()` returns and registers no hook on the weight.
    """
    global _mode
    if mode not in ("bucket", "eager"):
        raise ValueError(f"grad_sync takes 'bucket' or 'eager', got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def may_defer() -> bool:
    """Asked in forward: may the gradients that follow from it wait for the end of the backward pass?

    Not inside a DDP forward, whose reducer reads gradients as they arrive; nor when forward runs inside a backward pass
    (a reentrant checkpoint), where nobody can tell whether DDP is at work.
    """
    return (
        _mode == "bucket"
        and getattr(DistributedDataParallel, "_active_ddp_module", None) is None
        and torch._C._current_graph_task_id() == -1
        and not is_tracing()  # a graph has no end-of-backward callback
    )


def sum_over(g: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The sum over all the groups, at once."""
    for group in groups:
        g = comm.all_reduce(g, group)
    return g


def collect(node: Any, g: Tensor, groups: tuple[str, ...]) -> bool:
    """Take over the partial gradient `g` of the leaf behind `node`; False if it must be summed at once.

    Every rank answers alike: the graph, the hooks and the mode are the same on all ranks.
    """
    if torch.is_grad_enabled():
        return False
    try:
        weight = node.variable
    except AttributeError:  # not a leaf
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    try:
        runs = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # the leaf is an input of autograd.grad, which hands the gradient out itself
        return False
    if runs:
        (_tasks.get(torch._C._current_graph_task_id()) or _new_task()).add(weight, g, groups)
    return True  # not run: backward(inputs=...) does not ask for this weight, nothing to sum


def weight_grad(ctx: Any, position: int, g: Tensor, groups: tuple[str, ...]) -> Tensor | None:
    """What a Function returns for its plain input at `position`: the complete gradient, None if it is summed later."""
    if not groups:
        return g
    if ctx.defer and collect(ctx.next_functions[position][0], g, groups):
        return None
    return sum_over(g, groups)


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
