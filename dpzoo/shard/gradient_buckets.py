"""Parts of gradients on their way over the domain: collected in buckets, summed while backward goes on."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm

_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors
BUCKET_BYTES = 25 * 2**20
Join = Callable[[Tensor], Callable[[], Tensor]]  # starts to make the whole of all ranks' parts; what waits for it
Edge = tuple[Any, int]  # what gradients flow to: a node, and which of its inputs


def sum_over(g: Tensor, groups: tuple[str, ...]) -> Tensor:
    """The sum over all the groups, at once."""
    for group in groups:
        g = comm.all_reduce(g, group)
    return g


@dataclass
class _Bucket:
    """Partial gradients that travel together, and what each is for: a weight, or an edge where nodes wait for it."""

    groups: tuple[str, ...]
    items: list[tuple[Any, Tensor]] = field(default_factory=list)
    nbytes: int = 0
    flat: Tensor | None = None
    sum: comm.PendingReduction | None = None

    def launch(self, wait: bool = False) -> None:
        """Start the sum over the first group; `wait`: come back when it is there."""
        # Always a copy: a gradient may be shared with another input of its op, and the sum is made in place.
        self.flat = _flatten([g for _, g in self.items])
        if len(self.items) == 1:
            self.flat = self.flat.clone()
        self.sum = comm.start_all_reduce_(self.flat, self.groups[0], wait=wait) if self.flat.numel() else None

    def sums(self) -> list[tuple[Any, Tensor]]:
        """Wait, sum over the other groups; what each sum is for, and the sum."""
        assert self.flat is not None
        if self.sum is not None:
            self.sum.wait()
        flat = sum_over(self.flat, self.groups[1:])
        parts = _unflatten(flat, [g for _, g in self.items])
        return [(to, g) for (to, _), g in zip(self.items, parts, strict=True)]


class _Outbox:
    """Buckets on their way: each is sent when it is full, or when somebody waits for what is in it."""

    def __init__(self) -> None:
        self._open: dict[Any, _Bucket] = {}
        self._sent: list[_Bucket] = []
        self._joining: list[tuple[Any, Callable[[], Tensor]]] = []

    def add(self, to: Any, g: Tensor, groups: tuple[str, ...], join: Join | None) -> None:
        if join is not None:
            self._joining.append((to, join(g)))
            return
        key = (groups, g.dtype, g.device)
        bucket = self._open.setdefault(key, _Bucket(groups))
        bucket.items.append((to, g))
        bucket.nbytes += g.nbytes
        if bucket.nbytes >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: Any, wait: bool = False) -> None:
        bucket = self._open.pop(key)
        bucket.launch(wait)
        self._sent.append(bucket)

    def empty(self) -> Iterator[tuple[Any, Tensor]]:
        """Send the rest, and wait for all of it; what each whole gradient is for, and the gradient."""
        joining, self._joining = self._joining, []
        keys = list(self._open)
        for key in keys:
            self._send(key, wait=key == keys[-1])  # nothing is left to do in the meantime
        sent, self._sent = self._sent, []
        for to, joined in joining:
            yield to, joined()
        for bucket in sent:
            yield from bucket.sums()


class Task:
    """The gradients that one backward pass has under way.

    Every rank fills and empties the outboxes in the same order: the graph is the same on all of them. But waiting nodes
    of one sequence number run in any order. Therefore the first of them empties the outbox for all, and those that hand
    on to one edge share what was added for it: the first takes all, so that every rank adds it up alike.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._for_weights, self._for_edges = _Outbox(), _Outbox()
        self._arrived: dict[Edge, list[Tensor]] = {}
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def add(self, to: Tensor | Edge, g: Tensor, groups: tuple[str, ...], join: Join | None) -> None:
        """Take the part `g` for a weight, or for an edge at which nodes ask for it by `take`.

        Args:
            join: makes the whole of all ranks' parts; None: the parts are summed over the groups.
        """
        (self._for_weights if isinstance(to, Tensor) else self._for_edges).add(to, g, groups, join)

    def take(self, edge: Edge) -> list[Tensor]:
        """What the parts that were added for an edge make; what others wait for arrives with it."""
        for to, g in self._for_edges.empty():
            self._arrived.setdefault(to, []).append(g)
        return self._arrived.pop(edge, [])

    def _finish(self) -> None:
        _tasks.pop(self._number, None)
        with torch.no_grad():
            for weight, g in self._for_weights.empty():
                _deliver(weight, g)


def _deliver(weight: Tensor, g: Tensor) -> None:
    if weight.data_ptr() == 0 and weight.numel():
        raise RuntimeError(
            "a sharded weight was freed before its gradient was summed over the domain mesh; "
            "run forward and backward under dpzoo.shard.grad_sync('eager')"
        )
    accumulate(weight, g.reshape(weight.shape))  # it may be of a view of the weight


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
