"""Rows that lie on other ranks, asked for by global index: only what is asked travels, and only once.

A `Route` settles who owes which rows to whom. `retrieve` brings rows from their owners to those who asked; `deliver`
takes values from those who asked to the owners. Each is the other's transpose, so both are differentiable, to any
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.partition import Sizes, starts


@dataclass(frozen=True)
class Route:
    """Requests of all ranks of a group, as one rank needs to know them.

    Attributes:
        order: this rank's requests sorted by owner, (m,); `asked` of them go to each rank.
        rows: local rows that this rank owes, in the order of the ranks that asked; `owed` of them to each rank.
    """

    group: str
    me: int
    order: Tensor
    asked: Sizes
    rows: Tensor
    owed: Sizes


def route_by_asking(index: Tensor, sizes: Sizes, group: str, wrong: list[int], complain: Callable[[int], Any]) -> Route:
    """A route for requests that differ by rank: global rows (m,) of a dim that is cut in `sizes`.

    Two exchanges.

    Args:
        wrong: a value that names no row, if this rank has one. If any rank has, every rank calls `complain` with it.
    """
    ranks, me = len(sizes), comm.group_rank(group)
    order, counts = _by_owner(index, sizes)
    notice = torch.stack([counts, *(torch.full_like(counts, v) for v in (len(wrong), wrong[0] if wrong else 0))], 1)
    told = comm.start_transport(notice.split(1), [3] * ranks, notice, group, wait=True).wait()
    heard = [t.tolist() for t in told]
    for _, is_wrong, value in heard:
        if is_wrong:
            complain(value)
    asked, owed = tuple(counts.tolist()), tuple(count for count, _, _ in heard)
    found = _swap(index[order].split(asked), owed, index, group, me)
    return Route(group, me, order, asked, torch.cat(found) - starts(sizes)[me], owed)


def route_by_knowing(parts: Sequence[Tensor], sizes: Sizes, group: str) -> Route:
    """A route for requests that every rank knows: rank r asks for the global rows `parts[r]`. No communication."""
    me = comm.group_rank(group)
    order, counts = _by_owner(parts[me], sizes)
    low, high = starts(sizes)[me], starts(sizes)[me + 1]
    owed = [part[(part >= low) & (part < high)] for part in parts]
    return Route(group, me, order, tuple(counts.tolist()), torch.cat(owed) - low, tuple(len(part) for part in owed))


def _by_owner(index: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Requests in a stable order of their owners, and how many go to each."""
    ends = torch.tensor(starts(sizes)[1:], device=index.device)
    owner = torch.searchsorted(ends, index, right=True).clamp(max=len(sizes) - 1)
    return owner.argsort(stable=True), owner.bincount(minlength=len(sizes))


def _swap(sends: Any, lengths: Sizes, like: Tensor, group: str, me: int) -> list[Tensor]:
    """Send a piece to each rank and receive `lengths[r]` rows from rank r; a rank keeps its own piece."""
    if len(lengths) == 1:
        return list(sends)
    row = like[:0].shape[1:].numel()
    out = [[] if r == me else [p] for r, p in enumerate(sends)]
    counts = [0 if r == me else n * row for r, n in enumerate(lengths)]
    got = comm.start_transport(out, counts, like, group, wait=True).wait()
    return [sends[r] if r == me else got[r].view(n, *like.shape[1:]) for r, n in enumerate(lengths)]


def retrieve(rows: Tensor, route: Route) -> Tensor:
    """Owed rows (len(route.rows), ...) -> the rows this rank asked for, in its order. Differentiable."""
    if rows.requires_grad and torch.is_grad_enabled():
        return _Retrieve.apply(rows, route)
    found = _swap(rows.split(route.owed), route.asked, rows, route.group, route.me)
    arrived = torch.cat(found)
    return torch.empty_like(arrived).index_copy_(0, route.order, arrived)


def deliver(values: Tensor, route: Route) -> Tensor:
    """A value (m, ...) for each row this rank asked for -> what came for the rows in `route.rows`. Differentiable.

    What several ranks (or requests) send for one row arrives side by side, in the order of ranks and requests.
    """
    if values.requires_grad and torch.is_grad_enabled():
        return _Deliver.apply(values, route)
    found = _swap(values[route.order].split(route.asked), route.owed, values, route.group, route.me)
    return torch.cat(found)


class _Retrieve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return retrieve(rows.detach(), route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return deliver(g, ctx.route), None


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return deliver(values.detach(), route)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return retrieve(g, ctx.route), None
