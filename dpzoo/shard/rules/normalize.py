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

from dpzoo.shard.bridges import stack_over, sum_over, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import cut_axes, fill_empty, global_of, groups_of, normal_dim, whole_values
from dpzoo.shard.tensor import ShardTensor


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
    def plan(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Dims | None:
        if dim is None:
            return None
        labels = tuple(range(input.ndim))
        op = torch.log_softmax if log else torch.softmax
        return Dims([labels], [labels], lambda t: op(t, dim, dtype), whole=frozenset([normal_dim(dim, input.ndim)] if input.ndim else []))

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
def softmin(func: Any, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    """Softmax of the negative."""
    return gather_call(func, (), (input, dim), {"dtype": dtype}) if dim is None else torch.softmax(-input, dim, dtype)


# ---------------------------------------------------------------------- norms over trailing dims
@rule(F.layer_norm, torch.layer_norm)
def layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, cudnn_enable: bool = True) -> Dims | None:
    """Statistics over the last dims, which each rank sees whole."""
    return _over_last(F.layer_norm, input, normalized_shape, [weight, bias], eps)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Dims | None:
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
        reduced = name in _REDUCED_UNLESS_KEPT and not kwargs.get("keepdim", args[position] if len(args) > position else False)
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


