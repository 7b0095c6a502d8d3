"""Parts of gradients on their way over the domain: collected in buckets, summed while backward goes on."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpzoo.shard import collectives as comm

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
BUCKET_BYTES = 25 * 2**20


def sum_over(g: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The sum over all the groups, at once."""
    for group in groups:
        g = comm.all_reduce(g, group)
    return g


@dataclass
class _Bucket:
    """Partial gradients that travel together, and whom each is for: a weight, or a node that waits for it."""

    groups: tuple[str, ...]
    items: list[tuple[Any, Tensor]] = field(default_factory=list)
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

    def sums(self) -> list[tuple[Any, Tensor]]:
        """Wait, sum over the other groups; whom each sum is for, and the sum."""
        assert self.flat is not None
        if self.work is not None:
            self.work.wait()
        flat = sum_over(self.flat, self.groups[1:])
        parts = _unflatten(flat, [g for _, g in self.items])
        return [(to, g) for (to, _), g in zip(self.items, parts, strict=True)]


class Task:
    """The buckets of one backward pass.

    Every rank fills, sends and empties them in the same order: the graph is the same on all of them.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._open: dict[Any, _Bucket] = {}
        self._sent: list[_Bucket] = []
        self._awaited: dict[Any, list[Tensor | _Bucket]] = {}  # node -> its sums, or the buckets that bring them
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def add(self, to: Any, g: Tensor, groups: tuple[str, ...]) -> None:
        """Take the part `g` for a weight, or for a node that asks for it by `take`."""
        waits = not isinstance(to, Tensor)
        key = (groups, g.dtype, g.device, waits)
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = _Bucket(groups)
        bucket.items.append((to, g))
        bucket.nbytes += g.nbytes
        if waits:
            brought = self._awaited.setdefault(to, [])
            if not any(bucket is b for b in brought):
                brought.append(bucket)
        if bucket.nbytes >= BUCKET_BYTES:
            self._send(key)

    def take(self, node: Any) -> list[Tensor]:
        """The sums of the parts that were added for a node; parts for other nodes, sent with them, arrive too."""
        for bucket in list(self._awaited.get(node, ())):
            if isinstance(bucket, _Bucket):
                self._arrive(bucket)
        return self._awaited.pop(node, [])  # type: ignore[return-value]

    def _arrive(self, bucket: _Bucket) -> None:
        if bucket.flat is None:
            self._send(next(key for key, b in self._open.items() if b is bucket))
        self._sent = [b for b in self._sent if b is not bucket]
        for to, g in bucket.sums():
            self._awaited[to] = [b for b in self._awaited[to] if b is not bucket]
            self._awaited[to].append(g)

    def _send(self, key: Any) -> None:
        bucket = self._open.pop(key)
        bucket.launch()
        self._sent.append(bucket)

    def _finish(self) -> None:
        _tasks.pop(self._number, None)
        with torch.no_grad():
            for key in list(self._open):
                self._send(key)
            for bucket in self._sent:
                for weight, g in bucket.sums():
                    _deliver(weight, g)


def _deliver(weight: Tensor, g: Tensor) -> None:
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


_MAX_TASKS = 16
_tasks: OrderedDict[int, Task] = OrderedDict()


def task_now() -> Task:
    """The collector of the backward pass that runs now (nested passes have their own)."""
    number = torch._C._current_graph_task_id()
    task = _tasks.get(number)
    if task is None:
        task = _tasks[number] = Task(number)
        while len(_tasks) > _MAX_TASKS:  # passes that failed never finish
            _tasks.popitem(last=False)
    return task
