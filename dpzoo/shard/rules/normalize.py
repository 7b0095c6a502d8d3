"""Softmax, layer_norm and rms_norm over any dims.

Over uncut dims they are local. Over a cut dim they share one or two small reductions: nothing else moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.local_bridges import stack_over, sum_over
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import cut_axes, fill_empty, global_of, normal_dim, whole_values
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap

_HALF = (torch.float16, torch.bfloat16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results of this dtype are kept and added in, as torch's own kernels do."""
    return torch.float32 if dtype in _HALF else dtype


def result_dtype(op: Callable[[Tensor], Tensor], x: Tensor) -> torch.dtype:
    """The dtype of `op(x)`, which autocast or the promotion of integers may change."""
    if x.dtype.is_floating_point and not torch._C._is_any_autocast_enabled():
        return x.dtype
    return op(torch.zeros(1, dtype=x.dtype, device=x.device)).dtype


# ---------------------------------------------------------------------- softmax
def _softmax_on_cut(x: Any, dim: int, log: bool) -> ShardTensor:
    """Softmax over a cut dim: maximum and sum over all shards."""
    spec = whole_values(x._spec)
    axes = cut_axes(spec, (dim,))
    dtype = result_dtype(lambda t: (torch.log_softmax if log else torch.softmax)(t, 0), x)
    local = to_shard(x, spec).to(wide_dtype(x.dtype))
    with torch.no_grad():
        top = stack_over(fill_empty(local.detach(), (dim,), float("-inf")).amax(dim, True), spec, axes).amax(0)
    shifted = local - top
    total = sum_over(shifted.exp().sum(dim, keepdim=True), spec.layout.groups_over(axes), shared=False)
    out = shifted - total.log() if log else shifted.exp() / total
    return global_of(out.to(dtype), spec, spec.cuts, spec.sizes)


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
        out, mean, rstd = torch.native_layer_norm(x._local_tensor, shape, w, b, eps)
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
        gb = gradients.weight_grad(ctx, 1 if w is None else 2, gb, ctx.groups) if needs[2] else None
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
        _NORM_GROUPS[key] = spec.layout.groups_over(cut_axes(spec, range(first))) if fits else None
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
    """One node for plain weights and uncut normalized dims; two reductions where a normalized dim is cut."""
    if isinstance(input, ShardTensor):
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        spec = input._spec
        groups = _norm_groups(spec, shape)
        plain = _is_plain(weight, spec, shape) and _is_plain(bias, spec, shape)
        if groups is not None and plain and not torch._C._is_any_autocast_enabled():
            if torch.is_grad_enabled():
                weight, bias = gradients.lent(weight, groups), gradients.lent(bias, groups)
                return _LayerNorm.apply(input, weight, bias, shape, eps, groups)
            out = torch.layer_norm(input._local_tensor, shape, weight, bias, eps)
            return wrap(out, spec.for_local(out))
        if _cuts_statistics(input, shape, weight, bias):
            return _layer_norm_on_cut(input, len(shape), weight, bias, eps)
    return RULE_OF["layer_norm"](func, (), (input, normalized_shape, weight, bias, eps), {})


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def _is_plain(parameter: Tensor | None, spec: ShardTensorSpec, shape: tuple[int, ...]) -> bool:
    return parameter is None or (
        parameter.__class__ in _PLAIN and parameter.dtype is spec.dtype and parameter.shape == shape
    )


def _cuts_statistics(x: ShardTensor, shape: tuple[int, ...], *affine: Tensor | None) -> bool:
    """Whether some normalized dim is cut, in a call that torch would take."""
    first = x.ndim - len(shape)
    return (
        bool(shape)
        and tuple(x.shape[first:]) == shape
        and all(t is None or tuple(t.shape) == shape for t in affine)
        and x.dtype.is_floating_point
        and x.numel() > 0
        and bool(cut_axes(x._spec, range(first, x.ndim)))
    )


def _layer_norm_on_cut(x: ShardTensor, k: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Mean and variance are two small reductions over the shards; nothing else moves."""
    dims = tuple(range(x.ndim - k, x.ndim))
    dtype = result_dtype(lambda t: F.layer_norm(t, (1,)), x)
    wide = x.to(wide_dtype(x.dtype))
    centred = wide - wide.mean(dims, keepdim=True)
    out = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _affine(out, weight, bias).to(dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * weight.to(x.dtype)
    return x if bias is None else x + bias.to(x.dtype)


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


@handler(F.rms_norm, torch.rms_norm, name="rms_norm over a cut dim")
def rms_norm_call(func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """One small reduction over the shards where a normalized dim is cut."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not isinstance(input, ShardTensor) or not _cuts_statistics(input, shape, weight):
        return RULE_OF["rms_norm"](func, (), (input, normalized_shape, weight, eps), {})
    dims = tuple(range(input.ndim - len(shape), input.ndim))
    dtype = result_dtype(lambda t: F.rms_norm(t, (1,)), input)
    wide = input.to(wide_dtype(input.dtype))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    out = wide * (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _affine(out, weight, None).to(dtype)


@rule(name="rms_norm")
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
    probe(op, input, shape, *affine, eps)
    labels: Labels = tuple(range(n))
    given = [t is not None for t in affine]

    def local(x: Tensor, *parameters: Tensor) -> Tensor:
        it = iter(parameters)
        return op(x, shape, *[next(it) if g else None for g in given], eps)

    return Dims([labels, *[labels[n - k :] for g in given if g]], [labels], local, whole=frozenset(labels[n - k :]))  # type: ignore[arg-type]
