"""Ops that need one dim whole or merge it: softmax, layer_norm, rms_norm, scans, sorts.

A softmax over a cut dim shares two small reductions. The others move the cut to another dim and back (all-to-all),
so that no rank ever holds the whole tensor; a tensor without another dim is gathered, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad, stack_over, sum_over, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import cut_axes, fill_empty, global_of, groups_of, normal_dim, whole_values
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap


# ---------------------------------------------------------------------- softmax
def _softmax_on_cut(x: ShardTensor, dim: int, log: bool) -> ShardTensor:
    """Softmax over a cut dim: maximum and sum over all shards."""
    spec = whole_values(x._spec)
    axes = cut_axes(spec, (dim,))
    local = to_shard(x, spec)
    with torch.no_grad():
        top = stack_over(fill_empty(local.detach(), (dim,), float("-inf")).amax(dim, True), spec, axes).amax(0)
        top = torch.where(top.isinf(), 0.0, top) if log else top
    shifted = local - top
    total = sum_over(shifted.exp().sum(dim, keepdim=True), groups_of(spec, axes), shared=False)
    out = shifted - total.log() if log else shifted.exp() / total
    return global_of(out, spec, spec.cuts, spec.sizes)


def _softmax_family(name: str, log: bool) -> None:
    def plan(
        input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
    ) -> Dims | None:
        if dim is None:
            return None
        labels = tuple(range(input.ndim))
        op = torch.log_softmax if log else torch.softmax
        return Dims(
            [labels],
            [labels],
            lambda t: op(t, dim, dtype),
            whole=frozenset([normal_dim(dim, input.ndim)] if input.ndim else []),
        )

    rule(name=name)(plan)

    @handler(*spellings(name), name=f"{name} over a cut dim")
    def answer(func: Any, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        if isinstance(input, ShardTensor) and isinstance(dim, int) and input.ndim:
            d = normal_dim(dim, input.ndim)
            if cut_axes(input._spec, (d,)) and (input.dtype.is_floating_point or dtype is not None) and input.numel():
                return _softmax_on_cut(input if dtype is None else input.to(dtype), d, log)
        if not isinstance(dim, int) or kwargs.get("out") is not None:
            return gather_call(func, (), (input, dim, *args), kwargs)
        return RULE_OF[name](func, (), (input, dim), {"dtype": dtype})


_softmax_family("softmax", False)
_softmax_family("log_softmax", True)


@handler(F.softmin, name="softmin")
def softmin(
    func: Any, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    """Softmax of the negative."""
    return gather_call(func, (), (input, dim), {"dtype": dtype}) if dim is None else torch.softmax(-input, dim, dtype)


# ---------------------------------------------------------------------- norms over trailing dims
class _LayerNorm(torch.autograd.Function):
    """layer_norm over uncut dims as one node."""

    @staticmethod
    def forward(
        ctx: Any,
        x: ShardTensor,
        w: Tensor | None,
        b: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        groups: tuple[str, ...],
    ) -> ShardTensor:
        out, mean, rstd = torch.ops.aten.native_layer_norm.default(x._local_tensor, shape, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        ctx.shape, ctx.eps, ctx.groups, ctx.defer = shape, eps, groups, gradients.may_defer()
        ctx.out = x._spec.for_local(out)
        return wrap(out, ctx.out)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():
            rule = RULE_OF["layer_norm"]
            found = gradients.again(
                ctx, lambda x, w, b: rule(F.layer_norm, (), (x, ctx.shape, w, b, ctx.eps), {}), (x, w, b), g
            )
            return *found, None, None, None
        needs = list(ctx.needs_input_grad[:3])
        local = shard_of_grad(g, ctx.out)
        gx, gw, gb = torch.ops.aten.native_layer_norm_backward.default(
            local, x._local_tensor, ctx.shape, mean, rstd, w, b, needs
        )
        gx = wrap(gx, x._spec.for_local(gx)) if needs[0] else None
        gw = gradients.weight_grad(ctx, 1, gw, ctx.groups) if needs[1] else None
        gb = gradients.weight_grad(ctx, 2, gb, ctx.groups) if needs[2] else None
        return gx, gw, gb, None, None, None


_NORM_GROUPS: dict[Any, tuple[str, ...] | None] = {}


def _norm_groups(spec: ShardTensorSpec, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    """Groups over which weight gradients are summed; None if a normalized dim is cut or the shapes do not fit."""
    key = (spec, shape)
    if key not in _NORM_GROUPS:
        if len(_NORM_GROUPS) > 4096:
            _NORM_GROUPS.clear()
        first = spec.ndim - len(shape)
        fits = (
            len(shape) > 0
            and tuple(spec.shape[first:]) == shape
            and not spec.is_partial
            and not any(d >= first for d in spec.cut_dims)
        )
        _NORM_GROUPS[key] = groups_of(spec, cut_axes(spec, range(first))) if fits else None
    return _NORM_GROUPS[key]


@handler(F.layer_norm, torch.layer_norm, name="layer_norm as one node")
def layer_norm_call(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Plain weights, uncut normalized dims and no autocast take the one-node path."""
    if isinstance(input, ShardTensor) and torch.is_grad_enabled() and not torch._C._is_any_autocast_enabled():
        plain = all(
            t is None or (t.__class__ in (Tensor, torch.nn.Parameter) and t.dtype is input.dtype)
            for t in (weight, bias)
        )
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        groups = _norm_groups(input._spec, shape) if plain else None
        if groups is not None and (weight is None or tuple(weight.shape) == shape):
            return _LayerNorm.apply(input, weight, bias, shape, eps, groups)
    return RULE_OF["layer_norm"](func, (), (input, normalized_shape, weight, bias, eps), {})


@rule(name="layer_norm")
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Dims | None:
    """Statistics over the last dims, which each rank sees whole."""
    return _over_last(F.layer_norm, input, normalized_shape, [weight, bias], eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Dims | None:
    """Root mean square over the last dims, which each rank sees whole."""
    return _over_last(F.rms_norm, input, normalized_shape, [weight], eps)


def _over_last(op: Any, input: Tensor, shape: Sequence[int], affine: list[Tensor | None], eps: Any) -> Dims | None:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    k, n = len(shape), input.ndim
    if k == 0 or tuple(input.shape[n - k :]) != shape:
        return None
    labels: Labels = tuple(range(n))
    given = [t is not None for t in affine]

    def local(x: Tensor, *parameters: Tensor) -> Tensor:
        it = iter(parameters)
        return op(x, shape, *[next(it) if g else None for g in given], eps)

    return Dims([labels, *[labels[n - k :] for g in given if g]], [labels], local, whole=frozenset(labels[n - k :]))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- ops along one dim
def _along(names: Sequence[str], outputs: int = 1, default: int | None = None, same_length: bool = True) -> None:
    """Register ops of the form `op(input, dim, ...)` that need `dim` whole and keep (or replace) it."""
    for name in names:
        _register_along(name, outputs, default, same_length)


def _register_along(name: str, outputs: int, default: int | None, same_length: bool) -> None:
    position = _DIM_POSITION.get(name, 1)

    @rule(*spellings(name), name=name)
    def plan(input: Tensor, *args: Any, **kwargs: Any) -> Dims | None:
        if not isinstance(input, Tensor) or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            return None
        dim = kwargs.get("dim", args[position - 1] if len(args) >= position else default)
        if not isinstance(dim, int) or isinstance(dim, bool) or input.ndim == 0:
            return None
        d = normal_dim(dim, input.ndim)
        labels: Labels = tuple(range(input.ndim))
        out: Labels = labels if same_length else (*labels[:d], "new", *labels[d + 1 :])
        reduced = name in _REDUCED_UNLESS_KEPT and not kwargs.get(
            "keepdim", args[position] if len(args) > position else False
        )
        if reduced:
            out = (*labels[:d], *labels[d + 1 :])
        func = next(f for f in spellings(name) if f is not None)
        return Dims([labels], [out] * outputs, lambda t: func(t, *args, **kwargs), whole=frozenset([d, "new"]))


_DIM_POSITION = {"topk": 2, "kthvalue": 2, "diff": 2}
_REDUCED_UNLESS_KEPT = frozenset(["median", "nanmedian", "mode", "kthvalue"])

_along(["cumsum", "cumprod", "logcumsumexp"])
_along(["cummax", "cummin"], outputs=2)
_along(["sort", "msort_dim"], outputs=2, default=-1)
_along(["argsort"], default=-1)
_along(["topk"], outputs=2, default=-1, same_length=False)
_along(["median", "nanmedian"], outputs=2, same_length=False)
_along(["mode", "kthvalue"], outputs=2, default=-1, same_length=False)
_along(["diff"], default=-1, same_length=False)
_along(["glu"], default=-1, same_length=False)


@handler(*spellings("msort"), name="msort")
def msort(func: Any, input: Tensor, *, out: Any = None) -> Any:
    """Sort along dim 0."""
    return torch.sort(input, dim=0)[0] if out is None else gather_call(func, (), (input,), {"out": out})
