"""The differentiable ways between plain tensors, shards and layouts.

Invariants: `_local_tensor` is never part of a graph; the gradient of a tensor has its layout (whole where the value was
partial). The backward of each bridge is another bridge called as a differentiable function, so second order works.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.errors import ShardError
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move, start_move


def grad_spec(spec: ShardTensorSpec) -> ShardTensorSpec:
    """Layout of the gradient of a tensor: where its value is a sum of parts, every part gets the whole gradient."""
    if not spec.is_partial:
        return spec
    if any(isinstance(c, str) and c not in ("sum", "avg") for c in spec.cuts):
        raise ShardError(f"the gradient of {spec.describe()} is not defined: only sum and avg can be differentiated")
    return spec.like(cuts=tuple(REPLICATED if isinstance(c, str) else c for c in spec.cuts))


def _is_laid_out(x: ShardTensor, spec: ShardTensorSpec) -> bool:
    return x._spec is spec or (x._spec.cuts == spec.cuts and x._spec.sizes == spec.sizes)


def partial_over(spec: ShardTensorSpec, axes: tuple[int, ...]) -> ShardTensorSpec:
    """The spec of a value of which each rank of `axes` holds a summand."""
    return spec.like(cuts=tuple("sum" if a in axes else c for a, c in enumerate(spec.cuts)))


# ---------------------------------------------------------------------- local -> global
def from_shard(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """The global tensor with this shard; differentiable in `local`."""
    if local.requires_grad and torch.is_grad_enabled():
        return _FromShard.apply(local, spec)
    return wrap(local.detach() if local.requires_grad else local, spec)


class _FromShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
        ctx.spec = spec
        return wrap(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        spec = ctx.spec
        if not (spec.is_partial or torch.is_grad_enabled()):
            return shard_of_grad(g, spec), None
        summed = tuple(axis for axis, cut in enumerate(spec.cuts) if isinstance(cut, str))
        g_local = to_shard(as_sharded(g, spec), grad_spec(spec), summed)
        for axis, cut in enumerate(spec.cuts):
            if cut == "avg":
                g_local = g_local / spec.layout.shape[axis]
        return g_local, None


def as_sharded(g: Tensor, like: ShardTensorSpec) -> ShardTensor:
    """A gradient as a ShardTensor: C++ formulas and users may hand in a plain, global one."""
    if isinstance(g, ShardTensor):
        return g
    return from_shard(g, like.replicated().for_local(g))


def shard_of_grad(g: Tensor, spec: ShardTensorSpec) -> Tensor:
    """The local tensor of a gradient in the layout of the value it belongs to."""
    if isinstance(g, ShardTensor) and _is_laid_out(g, spec):
        return g._local_tensor
    return to_shard(as_sharded(g, spec), spec)


# ---------------------------------------------------------------------- global -> local
def to_shard(x: ShardTensor, spec: ShardTensorSpec, sum_axes: tuple[int, ...] = ()) -> Tensor:
    """The local tensor of `x` in the layout `spec`; differentiable.

    Args:
        sum_axes: axes over which the ranks use the value for different parts of the work, so that their gradients add.
    """
    if x.requires_grad and torch.is_grad_enabled():
        if sum_axes and _is_laid_out(x, spec) and not spec.is_partial:
            x = gradients.lent(x, spec.layout.groups_over(sum_axes))  # type: ignore[assignment]
        return _ToShard.apply(x, spec, sum_axes)
    return move(x._local_tensor, x._spec, spec)


class _ToShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor, spec: ShardTensorSpec, sum_axes: tuple[int, ...]) -> Tensor:
        ctx.spec, ctx.src, ctx.sum_axes = spec, x._spec, sum_axes
        ctx.groups = spec.layout.groups_over(sum_axes) if sum_axes and gradients.is_lent(x) else ()
        return move(x._local_tensor, x._spec, spec).detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        spec = ctx.spec
        if spec is ctx.src and not (ctx.sum_axes or spec.is_partial or torch.is_grad_enabled()):
            return wrap(g, spec.for_local(g)), None, None
        if ctx.groups:
            taken, _ = gradients.collect(gradients.When.LENT, ctx.next_functions[0][0], g, ctx.groups)
            if taken:
                return None, None, None
        spec = grad_spec(spec)
        if ctx.sum_axes:
            spec = partial_over(spec, ctx.sum_axes)
        if g.dtype is not spec.dtype:
            spec = spec.of_dtype(g.dtype)
        return relayout(from_shard(g, spec), grad_spec(ctx.src)), None, None


# ---------------------------------------------------------------------- layout -> layout
def relayout(x: ShardTensor, spec: ShardTensorSpec, fresh: bool = False) -> ShardTensor:
    """`x` in the layout of `spec` (its dtype and strides follow `x`); differentiable.

    Args:
        fresh: what is not `x` itself has memory of its own, so that it may be written to. Without it the result is for
            reading: a part of a whole tensor is a slice of it.
    """
    if _is_laid_out(x, spec):
        return x
    if x.requires_grad and torch.is_grad_enabled():
        return _Relayout.apply(x, spec, fresh)
    return _relayout(x, spec, fresh)


def _relayout(x: ShardTensor, spec: ShardTensorSpec, fresh: bool) -> ShardTensor:
    target = x._spec.like(cuts=spec.cuts, sizes=spec.sizes)
    local = move(x._local_tensor, x._spec, target)
    if fresh and shares_memory(local, x._local_tensor):
        local = local.clone()
    elif local is x._local_tensor:
        local = local.detach()
    return wrap(local, target if local.stride() == x._local_tensor.stride() else target.for_local(local))


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Do two plain tensors lie in the same storage?"""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor, spec: ShardTensorSpec, fresh: bool) -> ShardTensor:
        ctx.src = x._spec
        return _relayout(x, spec, fresh)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return relayout(as_sharded(g, ctx.src), grad_spec(ctx.src)), None, None


# ---------------------------------------------------------------------- plain -> local
def plain_to_shard(p: Tensor, spec: ShardTensorSpec, sum_axes: tuple[int, ...]) -> Tensor:
    """This rank's part of a plain tensor that every rank holds whole; its gradient is complete on every rank."""
    if p.requires_grad and torch.is_grad_enabled():
        groups = _sharers(spec, sum_axes)
        return _PlainToShard.apply(gradients.lent(p, groups), spec, sum_axes, groups)
    return _slice(p, spec)


def _sharers(spec: ShardTensorSpec, sum_axes: tuple[int, ...]) -> tuple[str, ...]:
    """The groups whose ranks get parts of the gradient of a plain tensor that is used in the layout `spec`."""
    return spec.layout.groups_over(sorted({*sum_axes, *spec.cut_dims.values()}))


def _slice(p: Tensor, spec: ShardTensorSpec) -> Tensor:
    for dim, axis in spec.cut_dims.items():
        p = p.narrow(dim, spec.local_start(axis), spec.sizes[axis][spec.layout.coords[axis]])
    return p


class _PlainToShard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, p: Tensor, spec: ShardTensorSpec, sum_axes: tuple[int, ...], groups: tuple[str, ...]
    ) -> Tensor:
        ctx.spec, ctx.sum_axes, ctx.groups, ctx.defer = spec, sum_axes, groups, gradients.may_defer()
        return _slice(p.detach(), spec)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        spec, axes = ctx.spec, ctx.sum_axes
        if not axes and spec.is_replicated:
            return g, None, None, None
        if ctx.defer:
            taken, instead = _postpone(ctx, g)
            if taken:
                return instead, None, None, None
        return _joined(g, spec, axes), None, None, None


def _joined(g: Tensor, spec: ShardTensorSpec, sum_axes: tuple[int, ...]) -> Tensor:
    """The whole gradient of a tensor of which each rank used its part; differentiable."""
    return to_shard(from_shard(g, partial_over(spec, sum_axes)), spec.replicated())


def _postpone(ctx: Any, g: Tensor) -> tuple[bool, Tensor | None]:
    """See `gradients.collect`."""
    spec, node = ctx.spec, ctx.next_functions[0][0]
    if not ctx.groups:
        return spec.is_replicated, g
    join = None
    if not spec.is_replicated:
        if ctx.defer is gradients.When.BY_THE_WRAPPER:  # a slice is a part too, with zeros around it
            whole = g.new_zeros(spec.shape)
            _slice(whole, spec).copy_(g)
            g = whole
        else:  # gathering the slices costs less than a sum of all
            join = partial(start_move, src=partial_over(spec, ctx.sum_axes), dst=spec.replicated())
    return gradients.collect(ctx.defer, node, g, ctx.groups, join)
