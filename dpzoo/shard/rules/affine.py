"""`x * scale` and `x + shift` with an operand that every rank holds whole, as one node: modulations, layer scales.

The general way aligns the operands, computes, and wraps the result: five nodes of autograd, each of which is paid for
anew after every large op, which leaves nothing of them in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad, to_shard
from dpzoo.shard.function_door import pointwise_now
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing


@dataclass(frozen=True)
class _Plan:
    """For operands of certain layouts.

    Attributes:
        groups: whose ranks get parts of the whole operand's gradient.
        summed: dims of the other along which the whole operand is broadcast; the cut ones are among them.
    """

    groups: tuple[str, ...]
    summed: tuple[int, ...]


class _Affine(torch.autograd.Function):
    """A shard times, or plus, a tensor that is broadcast to it."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, p: Tensor, times: bool, plan: _Plan) -> ShardTensor:
        ctx.x, ctx.p, ctx.times, ctx.plan, ctx.defer = x._spec, _meta(p), times, plan, gradients.may_defer()
        ctx.save_for_backward(*((x, p) if times else ()))
        out = x._local_tensor * _local(p) if times else x._local_tensor + _local(p)
        ctx.out = x._spec.for_local(out)
        return wrap(out, ctx.out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            return *_again(ctx, g), None, None
        need_x, need_p = ctx.needs_input_grad[:2]
        local, gx, gp = shard_of_grad(g, ctx.out), None, None
        x, p = ctx.saved_tensors if ctx.times else (None, None)
        if need_x:
            gx = local if p is None else local * _local(p)
            gx = wrap(gx, ctx.x.for_local(gx))
        if need_p:
            part = local if x is None else local * x._local_tensor
            gp = _whole_gradient(ctx, part.sum(ctx.plan.summed))
        return gx, gp, None, None


def _local(p: Tensor) -> Tensor:
    return p._local_tensor if isinstance(p, ShardTensor) else p


def _meta(p: Tensor) -> ShardTensorSpec | torch.Size:
    return p._spec if isinstance(p, ShardTensor) else p.shape


def _whole_gradient(ctx: Any, part: Tensor) -> Tensor | None:
    """What the node hands on for the whole operand, of this rank's part of its gradient."""
    if not isinstance(ctx.p, ShardTensorSpec):
        return gradients.weight_grad(ctx, 1, part.view(ctx.p), ctx.plan.groups)
    part = part.view(ctx.p.shape)
    when = gradients.When.LENT if gradients.is_lent_node(ctx.next_functions[1][0]) else gradients.When.NOW
    taken, instead = gradients.collect(when, ctx.next_functions[1][0], part, ctx.plan.groups)
    if taken:
        return instead
    total = gradients.sum_over(part, ctx.plan.groups)
    return wrap(total, ctx.p.for_local(total))


def _again(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """For second derivatives: the formulas in ops on shards."""
    need_x, need_p = ctx.needs_input_grad[:2]
    x, p = ctx.saved_tensors if ctx.times else (None, None)
    gx = (g if p is None else g * p) if need_x else None
    if not need_p:
        return gx, None
    gp = (g if x is None else g * x).sum(ctx.plan.summed)
    if isinstance(ctx.p, ShardTensorSpec):
        return gx, gp.reshape(ctx.p.shape)
    gp = gp.reshape(ctx.p)
    return gx, to_shard(gp, gp._spec.replicated()) if isinstance(gp, ShardTensor) else gp


# ---------------------------------------------------------------------- which calls
def affine(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`add` and `mul`: one node where it fits, else as any other pointwise function."""
    if len(args) == 2 and not kwargs and torch.is_grad_enabled() and not is_tracing():
        a, b = args
        for x, p in ((a, b), (b, a)):
            plan = _plan_of(x, p)
            if plan is not None:
                return _Affine.apply(x, gradients.lent(p, plan.groups), func in _TIMES, plan)
    return pointwise_now(func, types, args, kwargs)


def _plan_of(x: Any, p: Any) -> _Plan | None:
    if x.__class__ is not ShardTensor or not isinstance(p, Tensor) or not (x.requires_grad or p.requires_grad):
        return None
    if p.__class__ is ShardTensor:
        whole = p._spec
        if whole is x._spec or not whole.is_replicated or whole.layout is not x._spec.layout:
            return None
    elif p.__class__ not in _PLAIN:
        return None
    else:
        whole = (p.shape, p.dtype, p.device.type)
    key = (x._spec, whole)
    if key not in _PLANS:
        if len(_PLANS) > 4096:
            _PLANS.clear()
        _PLANS[key] = _make_plan(x._spec, p)
    return _PLANS[key]


def _make_plan(spec: ShardTensorSpec, p: Tensor) -> _Plan | None:
    if spec.is_partial or spec.is_replicated or not spec.dtype.is_floating_point or p.dtype is not spec.dtype:
        return None
    if p.device.type != spec.layout.device_type or p.ndim > spec.ndim:
        return None
    sizes = (1,) * (spec.ndim - p.ndim) + tuple(p.shape)
    if any(n not in (1, of) for n, of in zip(sizes, spec.shape, strict=True)):
        return None
    if any(sizes[dim] != 1 for dim in spec.cut_dims) or any(spec.shape[dim] == 1 for dim in spec.cut_dims):
        return None
    summed = tuple(d for d, (n, of) in enumerate(zip(sizes, spec.shape, strict=True)) if n != of)
    return _Plan(spec.layout.groups_over(spec.cut_dims.values()), summed)


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_PLANS: dict[Any, _Plan | None] = {}
_TIMES = frozenset((Tensor.mul, torch.mul))

for _func in (Tensor.add, torch.add, *_TIMES):
    FUNCTIONS[_func] = affine
