"""From one layout to another, on local tensors: a list of single-axis steps, planned once per pair of specs.

Axes cut different dims, so that each step is one-dimensional and the order matters only where a dim changes its axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.exchange import exchange
from dpzoo.shard.partition import moved, own_intervals, starts
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec

Step = Callable[[Tensor], Tensor]


def move(local: Tensor, src: ShardTensorSpec, dst: ShardTensorSpec) -> Tensor:
    """The local tensor of `dst`, given that of `src`; both describe the same global tensor."""
    if src is dst:
        return local
    for step in steps(src, dst):
        local = step(local)
    return local


def start_move(local: Tensor, src: ShardTensorSpec, dst: ShardTensorSpec) -> Callable[[], Tensor]:
    """Start `move`; what comes back waits for it. Only a lone gather is under way meanwhile, the rest is done then."""
    todo = steps(src, dst)
    if len(todo) == 1 and isinstance(todo[0], _Gather):
        return todo[0].start(local).wait
    return lambda: move(local, src, dst)


@lru_cache(maxsize=8192)
def steps(src: ShardTensorSpec, dst: ShardTensorSpec) -> tuple[Step, ...]:
    """The steps that lead from `src` to `dst` (dtype ignored); empty when nothing moves."""
    assert src.shape == dst.shape and src.layout.equals(dst.layout), f"{src} and {dst} are not the same tensor"
    cuts, sizes, out = list(src.cuts), list(src.sizes), []

    def settle(axis: int, cut: Cut, new_sizes: tuple[int, ...]) -> None:
        step = _step(src, axis, cuts[axis], sizes[axis], cut, new_sizes)
        if step is not None:
            out.append(step)
        cuts[axis], sizes[axis] = cut, new_sizes

    while todo := [a for a in src.layout.axes if (cuts[a], sizes[a]) != (dst.cuts[a], dst.sizes[a])]:
        free = [a for a in todo if not _blocked(a, dst.cuts[a], cuts)]
        if free:
            settle(free[0], dst.cuts[free[0]], dst.sizes[free[0]])
        else:  # two axes swap their dims: open the ring by gathering one
            settle(todo[0], REPLICATED, ())
    return tuple(out)


def _blocked(axis: int, cut: Cut, cuts: list[Cut]) -> bool:
    """The wanted dim is still cut by another axis."""
    return isinstance(cut, int) and cut >= 0 and any(c == cut for a, c in enumerate(cuts) if a != axis)


def _step(
    spec: ShardTensorSpec, axis: int, old: Cut, old_sizes: tuple[int, ...], new: Cut, new_sizes: tuple[int, ...]
) -> Step | None:
    group, me = spec.layout.groups[axis], spec.layout.coords[axis]
    if isinstance(new, str) and old != REPLICATED:  # by way of the whole value
        return _chain(
            _step(spec, axis, old, old_sizes, REPLICATED, ()), _step(spec, axis, REPLICATED, (), new, new_sizes)
        )
    if isinstance(old, str):
        return _reduce_step(old, new, new_sizes, group)
    if isinstance(new, str):
        return _split_step(new, me)
    if new == REPLICATED:
        return _Gather(old, old_sizes, group)
    if old == REPLICATED:
        at, size = starts(new_sizes)[me], new_sizes[me]
        return lambda t: t.narrow(new, at, size)
    if old == new:
        wanted = tuple((i,) for i in own_intervals(new_sizes))
        return lambda t: exchange(t, old, old_sizes, wanted, group)
    return lambda t: comm.all_to_all_v(t, new, new_sizes, old, old_sizes, group)


@dataclass(frozen=True)
class _Gather:
    dim: int
    sizes: tuple[int, ...]
    group: str

    def __call__(self, t: Tensor) -> Tensor:
        return comm.all_gather_v(t, self.dim, self.sizes, self.group)

    def start(self, t: Tensor) -> comm.PendingGather:
        return comm.start_all_gather_v(t, self.dim, self.sizes, self.group)


def _reduce_step(op: str, new: Cut, new_sizes: tuple[int, ...], group: str) -> Step:
    """Half precision is added in float32 and rounded once, so that the error does not grow with the ranks."""

    def step(t: Tensor) -> Tensor:
        wide = t.float() if t.dtype in (torch.float16, torch.bfloat16) else t
        if isinstance(new, int) and new >= 0:
            return comm.reduce_scatter_v(wide, new, new_sizes, group, op).to(t.dtype)
        return comm.all_reduce(wide, group, op).to(t.dtype)

    return step


def _split_step(op: str, me: int) -> Step | None:
    """A whole value as what `op` reduces to it: rank 0 keeps it, the others hold the identity."""
    if me == 0 or op not in ("sum", "product"):  # the average and the extremes of copies are the value itself
        return None
    return torch.zeros_like if op == "sum" else torch.ones_like


def _chain(first: Step | None, second: Step | None) -> Step | None:
    if first is None or second is None:
        return first or second
    return lambda t: second(first(t))


def bytes_moved(src: ShardTensorSpec, dst: ShardTensorSpec) -> int:
    """Bytes that all ranks together receive on the way from `src` to `dst` (an estimate for choosing)."""
    total = src.shape.numel() * src.dtype.itemsize
    cost = 0
    for axis, n in enumerate(src.layout.shape):
        old, new = src.cuts[axis], dst.cuts[axis]
        if (old, src.sizes[axis]) == (new, dst.sizes[axis]) or old == REPLICATED:
            continue
        if new == REPLICATED:
            cost += total * (n - 1)
        elif old == new and isinstance(old, int):
            cost += total * moved(src.sizes[axis], dst.sizes[axis]) // max(1, src.shape[old])
        else:
            cost += total * (n - 1) // n
    return cost
