"""The differentiable ways between plain local tensors that communicate: rows fetched, summands added, stacks made.

The backward of each is another one, called as a differentiable function, so second order works.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard import gradients
from dpzoo.shard.exchange import Wanted, exchange, exchange_back, exchange_back_each, exchange_each
from dpzoo.shard.partition import Sizes
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tracing import is_tracing


def fetch(
    local: Tensor,
    dim: int,
    sizes: Sizes,
    wanted: Wanted,
    group: str,
    pad: tuple[int, int] = (0, 0),
    fill: float = 0.0,
) -> Tensor:
    """Rank r receives the global intervals `wanted[r]` of `dim`; backward sends every piece home and adds it there.

    Args:
        pad, fill: rows of a constant to put before and after what arrives on this rank.
    """
    if local.requires_grad and torch.is_grad_enabled():
        return _Fetch.apply(local, dim, sizes, wanted, group, pad, fill)
    return exchange(local, dim, sizes, wanted, group, pad, fill)


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        dim: int,
        sizes: Sizes,
        wanted: Wanted,
        group: str,
        pad: tuple[int, int],
        fill: float,
    ) -> Tensor:
        ctx.args, ctx.pad = (dim, sizes, wanted, group), pad
        out = exchange(local, dim, sizes, wanted, group, pad, fill)
        return out.detach() if out is local else out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        dim, (before, after) = ctx.args[0], ctx.pad
        inner = g.narrow(dim, before, g.shape[dim] - before - after) if before or after else g
        return send_home(inner, *ctx.args), None, None, None, None, None, None


def fetch_each(locals_: Sequence[Tensor], dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Sequence[Tensor]:
    """`fetch` of several tensors of one dtype, cut alike; in eager they travel together."""
    if is_tracing():
        return [fetch(t, dim, sizes, wanted, group) for t in locals_]
    if torch.is_grad_enabled() and any(t.requires_grad for t in locals_):
        return _FetchEach.apply(dim, sizes, wanted, group, *locals_)
    return exchange_each(locals_, dim, sizes, wanted, group)


class _FetchEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, sizes: Sizes, wanted: Wanted, group: str, *locals_: Tensor) -> tuple[Tensor, ...]:
        ctx.args = (dim, sizes, wanted, group)
        out = exchange_each(locals_, *ctx.args)
        return tuple(o.detach() if o is t else o for o, t in zip(out, locals_, strict=True))

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        if torch.is_grad_enabled():
            return None, None, None, None, *[send_home(g, *ctx.args) for g in gs]
        return None, None, None, None, *exchange_back_each(gs, *ctx.args)


def send_home(g: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Tensor:
    """The transpose of `fetch`: rank r holds rows `wanted[r]` of a tensor cut in `sizes`; each is added at home."""
    if g.requires_grad and torch.is_grad_enabled():
        return _SendHome.apply(g, dim, sizes, wanted, group)
    return exchange_back(g, dim, sizes, wanted, group)


class _SendHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, dim: int, sizes: Sizes, wanted: Wanted, group: str) -> Tensor:
        ctx.args = (dim, sizes, wanted, group)
        return exchange_back(g, dim, sizes, wanted, group)

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        return fetch(gg, *ctx.args), None, None, None, None


def sum_over(local: Tensor, groups: tuple[str, ...], *, shared: bool = True) -> Tensor:
    """The sum of the ranks' summands, on every rank.

    Args:
        shared: True if every rank goes on to do the same with the sum (its gradient is then whole on each of them);
            False if each rank uses it for its own part (the gradients of the parts are added).
    """
    if not groups:
        return local
    return _SumOver.apply(local, groups, shared)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, groups: tuple[str, ...], shared: bool) -> Tensor:
        ctx.groups, ctx.shared = groups, shared
        out = gradients.sum_over(local, groups)
        return out.detach() if out is local else out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (_fan_out(g, ctx.groups) if ctx.shared else sum_over(g, ctx.groups, shared=False)), None, None


def _fan_out(g: Tensor, groups: tuple[str, ...]) -> Tensor:
    """A value that is whole on every rank and used there for that rank's part: the transpose of a shared sum."""
    return _FanOut.apply(g, groups) if g.requires_grad and torch.is_grad_enabled() else g


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, groups: tuple[str, ...]) -> Tensor:
        ctx.groups = groups
        return g.detach()

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        return sum_over(gg, ctx.groups), None


def stack_over(local: Tensor, spec: ShardTensorSpec, axes: tuple[int, ...]) -> Tensor:
    """The ranks' tensors of one shape, stacked along a new dim 0; every rank then does the same with the stack."""
    for axis in axes:
        local = _StackOver.apply(local, spec.layout.groups[axis], spec.layout.shape[axis], spec.layout.coords[axis])
    return local.flatten(0, len(axes) - 1) if len(axes) > 1 else local


class _StackOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: str, n: int, me: int) -> Tensor:
        ctx.args = (group, n, me)
        return comm.all_gather_v(local.unsqueeze(0), 0, (1,) * n, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, n, me = ctx.args
        own = _OwnOfStack.apply(g, group, n, me) if g.requires_grad and torch.is_grad_enabled() else g[me]
        return own, None, None, None


class _OwnOfStack(torch.autograd.Function):
    """This rank's row of a stack that is the same on every rank: the transpose of `_StackOver`."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, group: str, n: int, me: int) -> Tensor:
        ctx.args = (group, n, me)
        return g.detach()[me]

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        return _StackOver.apply(gg, *ctx.args), None, None, None
