"""What all reductions share: what is known before any value is (`Reduction`), and one autograd node around the values.

A rule is a planner: it gets the layout and the arguments and returns what runs on tensors of that layout. The plan is
cached, so a repeated call does no arithmetic on layouts. Below autograd the aten op runs the same plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import as_sharded, relayout, shard_of_grad
from dpzoo.shard.dispatch_door import on, spec_in
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.local_bridges import stack_over, sum_over
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import cut_axes, global_of, layout_without, normal_dims, whole_values
from dpzoo.shard.spec import Cut, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap

Plan = Callable[[ShardTensor], Any]

_ALIASES = {"axis": "dim", "keepdims": "keepdim"}
_PLANS: dict[Any, Plan | None] = {}
_SMALL = 1 << 16  # an expanded gradient of at most so many elements is written out: cheaper than what copies it later


class Reduction:
    """The reduced dims of a layout, and the mesh axes over which the ranks' parts are merged.

    Attributes:
        axes, groups: mesh axes that cut a reduced dim, and their groups.
        count: number of global elements that one result is made of; `empty` if that is none.
    """

    __slots__ = ("_by_out", "axes", "count", "dims", "empty", "groups", "keepdim", "layout", "spec")

    def __init__(self, spec: ShardTensorSpec, dims: tuple[int, ...], keepdim: bool) -> None:
        self.spec, self.dims, self.keepdim = spec, dims, keepdim
        self.axes = cut_axes(spec, dims)
        self.groups = spec.layout.groups_over(self.axes)
        self.count = math.prod(spec.shape[d] for d in dims)
        self.empty = self.count == 0
        self.layout: tuple[Sequence[Cut], Sequence[Any]] = layout_without(spec, dims, keepdim)
        self._by_out: dict[Any, ShardTensorSpec] = {}

    def sum(self, part: Tensor) -> Tensor:
        """Add the parts of all ranks; differentiable."""
        return sum_over(part, self.groups)

    def sum_now(self, part: Tensor) -> Tensor:
        """Add the parts of all ranks, outside of autograd."""
        for group in self.groups:
            part = comm.all_reduce(part, group)
        return part

    def stack(self, part: Tensor) -> Tensor:
        """The parts of all ranks along a new dim 0; differentiable."""
        return stack_over(part, self.spec, self.axes) if self.axes else part.unsqueeze(0)

    def stack_now(self, part: Tensor) -> Tensor:
        """The parts of all ranks along a new dim 0, outside of autograd."""
        with torch.no_grad():
            return self.stack(part)

    def spec_of(self, out: Tensor) -> ShardTensorSpec:
        """The layout of a result of which this rank holds `out`."""
        key = (out.dtype, out.stride())
        spec = self._by_out.get(key)
        if spec is None:
            cuts, sizes = self.layout
            spec = self._by_out[key] = spec_in(out, self.spec.layout, tuple(cuts), tuple(sizes))
        return spec

    def leave(self, out: Tensor) -> ShardTensor:
        """A merged local result as a global tensor; differentiable."""
        return global_of(out, self.spec, *self.layout)

    def keep(self, t: Tensor) -> Tensor:
        """A result with its reduced dims as dims of size 1, whether or not they were kept."""
        if self.keepdim or not t.ndim:  # what has no dims broadcasts as it is
            return t
        for d in sorted(self.dims):
            t = t.unsqueeze(d)
        return t

    def drop(self, t: Tensor) -> Tensor:
        """A result with dims of size 1, as the caller wants it."""
        return t if self.keepdim else t.squeeze(self.dims)


@lru_cache(maxsize=8192)
def _reduction(spec: ShardTensorSpec, dims: tuple[int, ...], keepdim: bool) -> Reduction:
    return Reduction(spec, dims, keepdim)


def reduction_of(spec: ShardTensorSpec, dim: Any, keepdim: bool = False) -> Reduction:
    """The (cached) reduction of a layout over `dim` as users write it; raises as torch does for dims that are wrong."""
    dims = normal_dims(dim, spec.ndim)
    if len(set(dims)) != len(dims):
        twice = next(d for d in dims if dims.count(d) > 1)
        raise RuntimeError(f"dim {twice} appears multiple times in the list of dims")
    return _reduction(spec, dims if spec.ndim else (), bool(keepdim))


# ---------------------------------------------------------------------- one node
class Maths:
    """Values and gradient of a reduction. Stateless; one instance per plan."""

    saves = True  # the gradient reads the input and the outputs

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """The merged outputs on this rank, communication included; no autograd."""
        raise NotImplementedError

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """The gradient of the input, in ops that broadcast: it runs on shards, and on ShardTensors for second order.

        Args:
            outs, grads: outputs and their gradients (or None) with the reduced dims kept.
            add: sums over the reduced dims (kept) and over all ranks.
        """
        raise NotImplementedError


class ReduceNode(torch.autograd.Function):
    """A reduction as one node."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, maths: Maths, r: Reduction) -> Any:
        outs = tuple(wrap(o, r.spec_of(o)) for o in maths.values(r, x._local_tensor))
        ctx.maths, ctx.r, ctx.spec = maths, r, x._spec
        ctx.specs = tuple(o._spec for o in outs)
        ctx.set_materialize_grads(False)
        if maths.saves:
            ctx.save_for_backward(x, *outs)
        return outs if len(outs) > 1 else outs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return _gradient_of_gradient(ctx, grads), None, None
        maths, r, spec = ctx.maths, ctx.r, ctx.spec
        local = [None if g is None else r.keep(shard_of_grad(g, s)) for g, s in zip(grads, ctx.specs, strict=True)]
        if all(g is None for g in local):
            return None, None, None
        x, outs = None, []
        if maths.saves:
            x, *outs = (t._local_tensor for t in ctx.saved_tensors)
        g = maths.gradient(r, x, [r.keep(o) for o in outs], local, lambda t: r.sum_now(t.sum(r.dims, True)))
        if g.dtype is not spec.dtype:
            g = g.to(spec.dtype)
        if g.shape != spec.local_shape:
            g = g.expand(spec.local_shape)
            if spec.shape.numel() <= _SMALL:
                g = g.contiguous()
        return wrap(g, spec.for_local(g)), None, None


def _gradient_of_gradient(ctx: Any, grads: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient as a differentiable expression of ShardTensors."""
    r, spec = ctx.r, ctx.spec
    if all(g is None for g in grads):
        return None
    kept = [None if g is None else r.keep(as_sharded(g, s)) for g, s in zip(grads, ctx.specs, strict=True)]
    x, outs = None, []
    if ctx.maths.saves:
        x, *outs = ctx.saved_tensors
    g = ctx.maths.gradient(r, x, [r.keep(o) for o in outs], kept, lambda t: t.sum(r.dims, keepdim=True))
    return relayout(g.to(spec.dtype).expand(spec.shape), spec)


def node(maths: Maths, r: Reduction) -> Plan:
    """The plan of a reduction that is one node."""

    def run(x: ShardTensor) -> Any:
        if torch.is_grad_enabled() and x.requires_grad:
            return ReduceNode.apply(x, maths, r)
        outs = maths.values(r, x._local_tensor)
        if len(outs) == 1:
            return wrap(outs[0], r.spec_of(outs[0]))
        return tuple(wrap(o, r.spec_of(o)) for o in outs)

    return run


# ---------------------------------------------------------------------- registering
def reduces(
    *names: str, funcs: Sequence[Any] = (), aten: Sequence[Any] = ()
) -> Callable[[Callable[..., Plan | None]], Callable[..., Any]]:
    """Register `planner(spec, *args, **options)` for functions in all their spellings (or `funcs`), and for aten ops.

    `axis`, `keepdims` and `out` are understood. A planner that returns None leaves the call to the fallback.
    """

    def register(planner: Callable[..., Plan | None]) -> Callable[..., Any]:
        def answer(func: Any, *args: Any, **kwargs: Any) -> Any:
            if args:
                x, args = args[0], args[1:]
            else:
                x = kwargs.pop("input" if "input" in kwargs else "self" if "self" in kwargs else "x")
            if not isinstance(x, ShardTensor):
                return gather_call(func, (), (x, *args), kwargs)
            if x._spec.is_partial:
                x = relayout(x, whole_values(x._spec))
            if "out" in kwargs and kwargs["out"] is not None:
                return _into(answer, func, x, args, kwargs)
            try:
                key = (func, x._spec, args, tuple(kwargs.items())) if kwargs else (func, x._spec, args)
                plan = _PLANS.get(key)
            except TypeError:  # lists
                args, kwargs = _frozen(args), {k: _frozen(v) for k, v in kwargs.items()}
                key = (func, x._spec, args, tuple(kwargs.items()))
                plan = _PLANS.get(key)
            if plan is None:
                plan = _plan(planner, key, func, x._spec, args, kwargs)
                if plan is None:
                    return gather_call(func, (), (x, *args), kwargs)
            return plan(x)

        handler(*(funcs or spellings(*names)), name=names[0])(answer)
        if aten:
            on(*aten)(_below_autograd(answer))
        return answer

    return register


def _below_autograd(answer: Callable[..., Any]) -> Callable[..., Any]:
    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return answer(op, *args, **kwargs)

    return run


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, (list, tuple)) else value


def _plan(planner: Any, key: Any, func: Any, spec: ShardTensorSpec, args: Any, kwargs: dict[str, Any]) -> Plan | None:
    """Make and keep the plan of a call; raises what torch raises for the global tensor, so on every rank alike."""
    ask_torch(func, spec, args, kwargs)
    options = {_ALIASES.get(k, k): v for k, v in kwargs.items() if k != "out"}
    plan: Plan | None = planner(spec, *args, **options)
    if len(_PLANS) > 16384:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def ask_torch(func: Any, spec: ShardTensorSpec, args: Any, kwargs: dict[str, Any]) -> None:
    """Run `func` on a small tensor with as many dims, empty where the global one is: raises what torch raises."""
    with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = torch.zeros([min(n, 1) for n in spec.shape], dtype=spec.dtype, device=spec.layout.device_type)
        func(small, *args, **kwargs)


def _into(answer: Any, func: Any, x: ShardTensor, args: Any, kwargs: dict[str, Any]) -> Any:
    """`out=`: the result is copied into the given tensor, or tensors."""
    out = kwargs.pop("out")
    ask_torch(func, x._spec, args, {**kwargs, "out": _empty_like(out)})
    result = answer(func, x, *args, **kwargs)
    for target, value in zip(out, result, strict=True) if isinstance(out, (tuple, list)) else [(out, result)]:
        if tuple(target.shape) != tuple(value.shape):
            raise RuntimeError(
                f"{func.__name__}: out has shape {tuple(target.shape)}, the result {tuple(value.shape)}; a sharded or "
                "shared out cannot be resized"
            )
        target.copy_(value if isinstance(target, ShardTensor) else value.full_tensor())
    return out


def _empty_like(out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return tuple(_empty_like(o) for o in out)
    return torch.empty(0, dtype=out.dtype, device=out.device)
