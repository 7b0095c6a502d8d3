"""Views below autograd, what they share: the local view of a shard, and where the cut dims end up.

A plan is made once per (op, layout, arguments). A view that would tear a cut dim first moves borders (`source`); the
function-door rules in `reshape.py` do that move above autograd, so that here it happens only inside formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.dispatch_door import on, spec_in
from dpzoo.shard.moved_view import alias_of, counted, moved_view
from dpzoo.shard.partition import Sizes
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, same_order
from dpzoo.shard.tensor import DISPATCH, ShardTensor, wrap
from dpzoo.shard.transfer import move


@dataclass
class ViewPlan:
    """`source`: the layout the input must have; `local`: the local view; `cuts`, `sizes`: the layout of the output."""

    source: ShardTensorSpec
    local: Callable[[Tensor], Tensor]
    cuts: Sequence[Cut]
    sizes: Sequence[Sizes]
    spec: ShardTensorSpec | None = None
    stride: tuple[int, ...] | None = None  # of the global view; this rank's shard alone may not tell (when it is empty)

    def run(self, x: ShardTensor) -> ShardTensor:
        """Apply to a tensor (no autograd)."""
        if x._spec is self.source:
            return alias_of(x, self.finish(counted(self.local, x._local_tensor), x._spec))
        out = self.finish(self._part(x), x._spec)
        return moved_view(out, x, lambda: self._part(x), lambda part: self._home(x, part))

    def _part(self, x: ShardTensor) -> Tensor:
        return self.local(move(x._local_tensor, x._spec, self.source))

    def _home(self, x: ShardTensor, part: Tensor) -> None:
        whole = move(x._local_tensor, x._spec, self.source)
        self.local(whole).copy_(part)
        counted(x._local_tensor.copy_, move(whole, self.source, x._spec))

    def finish(self, out: Tensor, like: ShardTensorSpec) -> ShardTensor:
        """Wrap a local view."""
        spec = self.spec
        if spec is None or spec.dtype is not out.dtype:
            spec = spec_in(out, like.layout, tuple(self.cuts), tuple(self.sizes))
            if self.stride is not None and same_order(self.stride, out):
                spec = spec.like(stride=self.stride)
            self.spec = spec
        return wrap(out, spec)


_PLANS: dict[Any, ViewPlan] = {}
VIEWS: dict[Any, Callable[..., ViewPlan]] = {}


def view(*ops: Any) -> Callable[[Callable[..., ViewPlan]], Callable[..., ViewPlan]]:
    """Register `planner(op, spec, *args)` for aten views of one tensor."""

    def register(planner: Callable[..., ViewPlan]) -> Callable[..., ViewPlan]:
        for op in ops:
            VIEWS[op] = planner
        on(*ops)(run_view)
        for op in ops:
            DISPATCH[op] = _known_first(DISPATCH[op])
        return planner

    return register


def _known_first(answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer` for an aten view, after a look for the plan of the call as it came: most are of a kind met before."""

    def call(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], args[1:]
        if x.__class__ is ShardTensor and not kwargs:
            if rest and rest[0].__class__ is list:
                rest = (tuple(rest[0]), *rest[1:])
            try:
                plan = _PLANS.get((id(op), x._spec, rest))
            except TypeError:  # a symbol of a graph
                plan = None
            if plan is not None and plan.source is x._spec and plan.spec is not None:
                return wrap(counted(plan.local, x._local_tensor), plan.spec)
        return answer(op, types, args, kwargs)

    return call


def run_view(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer a view op that has a planner."""
    if args and args[0].__class__ is list:
        args = (tuple(args[0]), *args[1:])
    # An op lives for ever, and its own hash is slow.
    key = (id(op), x._spec, args, tuple(kwargs.items())) if kwargs else (id(op), x._spec, args)
    plan = _PLANS.get(key)
    if plan is None:
        plan = plan_of(key, lambda: _planned(op, x._spec, args, kwargs))
    return plan.run(x)


def _planned(op: Any, spec: ShardTensorSpec, args: Any, kwargs: dict[str, Any]) -> ViewPlan:
    op(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), *args, **kwargs)  # raises what torch raises
    plan = VIEWS[op](op, spec, *args, **kwargs)
    if plan.source is spec:
        try:
            meta = op(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"), *args, **kwargs)
        except RuntimeError:  # not a view of the global strides
            return plan
        plan.stride = meta.stride()
    return plan


def plan_of(key: Any, make: Callable[[], ViewPlan]) -> ViewPlan:
    """The cached plan of a key, made at the first call."""
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) > 16384:
            _PLANS.clear()
        plan = _PLANS[key] = make()
    return plan


def without_cut(spec: ShardTensorSpec, *dims: int) -> ShardTensorSpec:
    """The layout with these dims whole."""
    keep = [not (isinstance(c, int) and c in dims) for c in spec.cuts]
    return spec.like(
        cuts=tuple(c if k else REPLICATED for c, k in zip(spec.cuts, keep, strict=True)),
        sizes=tuple(s if k else () for s, k in zip(spec.sizes, keep, strict=True)),
    )


def renumber(spec: ShardTensorSpec, new: Callable[[int], int]) -> tuple[Cut, ...]:
    """The cuts of a layout after dim `d` became dim `new(d)`."""
    return tuple(new(c) if isinstance(c, int) and c >= 0 else c for c in spec.cuts)
