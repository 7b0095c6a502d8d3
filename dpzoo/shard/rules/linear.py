"""`F.linear`: one node for plain weights and an uncut last dim, a planned rule for any other mix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, rule
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor, wrap


class _Linear(torch.autograd.Function):
    """x @ w.T + b on shards of any but the last dim, as one node: the shape of most of a transformer's time."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardTensor, w: Tensor, b: Tensor | None, out: ShardTensorSpec, groups: tuple[str, ...]
    ) -> ShardTensor:
        ctx.save_for_backward(x, w, b)
        ctx.groups, ctx.defer, ctx.out = groups, gradients.may_defer(), out
        return wrap(F.linear(x._local_tensor, w, b), out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b = ctx.saved_tensors
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *gradients.again(ctx, lambda *t: RULE_OF["linear"](F.linear, (), t, {}), (x, w, b), g), None, None
        local, x_local = shard_of_grad(g, ctx.out), x._local_tensor
        gx = gw = gb = None
        if need_x:
            gx = local @ w
            gx = wrap(gx, x._spec.for_local(gx))
        flat = _rows(local)
        if need_w:
            gw = gradients.weight_grad(ctx, 1, flat.t() @ _rows(x_local), ctx.groups)
        if need_b:
            gb = gradients.weight_grad(ctx, 2, flat.sum(0), ctx.groups)
        return gx, gw, gb, None, None


def _rows(t: Tensor) -> Tensor:
    """The vectors of the last dim as a matrix."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def linear(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`F.linear` with any mix of operands; plain weights and an uncut last dim take the one-node path."""
    input, weight, bias = args if len(args) == 3 and not kwargs else _linear_args(*args, **kwargs)
    if isinstance(input, ShardTensor):
        found = _one_node(input._spec, weight, bias)
        if found is not None:
            out, groups = found
            if torch.is_grad_enabled():
                weight, bias = gradients.lent(weight, groups), gradients.lent(bias, groups)
                return _Linear.apply(input, weight, bias, out, groups)
            return wrap(F.linear(input._local_tensor, weight, bias), out)
    if bias is not None and _contraction_cut(input, weight):
        product = RULE_OF["linear"](func, types, (input, weight), {})
        return product + (bias.to(product.dtype) if torch._C._is_any_autocast_enabled() else bias)
    return RULE_OF["linear"](func, types, (input, weight, bias), {})


def _linear_args(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _one_node(
    spec: ShardTensorSpec, weight: Tensor, bias: Tensor | None
) -> tuple[ShardTensorSpec, tuple[str, ...]] | None:
    """Layout of the output and groups of the weight gradient; None for a call that needs the planned rule."""
    if weight.__class__ not in _PLAIN or weight.dtype is not spec.dtype or weight.ndim != 2:
        return None
    if torch._C._is_any_autocast_enabled():
        return None
    features, width = weight.shape
    if bias is not None and (bias.__class__ not in _PLAIN or bias.dtype is not spec.dtype or bias.shape != (features,)):
        return None
    key = (spec, features, width)
    if key not in _LINEAR:
        if len(_LINEAR) > 4096:
            _LINEAR.clear()
        _LINEAR[key] = _linear_layout(spec, features, width)
    return _LINEAR[key]


def _linear_layout(spec: ShardTensorSpec, features: int, width: int) -> tuple[ShardTensorSpec, tuple[str, ...]] | None:
    if not spec.ndim or spec.shape[-1] != width or spec.is_partial or spec.ndim - 1 in spec.cuts:
        return None
    groups = spec.layout.groups_over(spec.cut_dims.values())
    return spec.like(shape=(*spec.shape[:-1], features)), groups


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LINEAR: dict[tuple[ShardTensorSpec, int, int], tuple[ShardTensorSpec, tuple[str, ...]] | None] = {}


def _contraction_cut(x: Tensor, w: Tensor) -> bool:
    return any(isinstance(t, ShardTensor) and t.ndim - 1 in t._spec.cuts for t in (x, w))


@rule(name="linear")
def _linear_rule(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Dims:
    probe(F.linear, input, weight, bias)
    batch: Labels = tuple(range(input.ndim - 1))
    w: Labels = ("o", "i") if weight.ndim == 2 else ("i",)
    operands: list[Labels] = [(*batch, "i"), w]
    if bias is not None:  # it may be broadcast, as a 0-d bias or one of a single value is
        operands.append(w[:-1] if bias.shape == weight.shape[:-1] else (None,) * bias.ndim)
    return Dims(
        operands,
        [(*batch, *w[:-1])],
        F.linear,
        sums=frozenset("i") if bias is None else frozenset(),
        whole=frozenset() if bias is None else frozenset("i"),
    )


FUNCTIONS[F.linear] = linear
FUNCTIONS[torch._C._nn.linear] = linear
