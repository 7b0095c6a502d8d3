"""Reductions over any dims: each rank reduces its shard, the parts are merged, every rank holds the same result.

Sums travel as one all-reduce. Other reductions gather the parts (one value per rank and output element) and merge
them by the same maths on every rank, so that the gradient needs no communication at all. Empty shards hold the
identity of the merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import stack_over, sum_over, to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import (
    cut_axes,
    fill_empty,
    global_of,
    groups_of,
    highest,
    layout_without,
    lowest,
    normal_dim,
    normal_dims,
    whole_values,
)
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


class _Reduction:
    """One reduction call: the shard, the reduced dims, and the axes over which parts are merged."""

    def __init__(self, x: ShardTensor, dim: Any, keepdim: bool) -> None:
        self.spec: ShardTensorSpec = whole_values(x._spec)
        self.dims, self.keepdim = normal_dims(dim, x.ndim), keepdim
        if len(set(self.dims)) != len(self.dims):
            raise RuntimeError(f"dim {self.dims[0]} appears multiple times in the list of dims")
        self.local = to_shard(x, self.spec)
        self.axes = cut_axes(self.spec, self.dims)
        self.groups = groups_of(self.spec, self.axes)
        self.count = math.prod(x.shape[d] for d in self.dims) if x.ndim else 1
        self.empty = x.ndim > 0 and any(x.shape[d] == 0 for d in self.dims)

    def filled(self, value: Any) -> Tensor:
        """The shard, with a row of the identity where it is empty although the global dim is not."""
        return self.local if self.empty else fill_empty(self.local, self.dims, value)

    def merge(self, part: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        """Merge the parts of all ranks by a function of their stack (dim 0)."""
        return by(stack_over(part, self.spec, self.axes)) if self.axes else part

    def sum(self, part: Tensor) -> Tensor:
        """Add the parts of all ranks."""
        return sum_over(part, self.groups)

    def out(self, value: Tensor) -> ShardTensor:
        """The merged local value as a global tensor."""
        return global_of(value, self.spec, *layout_without(self.spec, self.dims, self.keepdim))


def _reduce(op: Any, local: Tensor, dims: Sequence[int], keepdim: bool, **kw: Any) -> Tensor:
    """`op` over dims; over all of them for a 0-d tensor."""
    return op(local, dims, keepdim, **kw) if local.ndim else op(local, (), keepdim, **kw)


def _plain_input(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return gather_call(func, (), (x, *args), kwargs)


def _reduction(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `f(input, dim, keepdim, **options)` for all spellings; `axis`, `keepdims`, `*dims` and `out` are understood."""

    def register(f: Callable[..., Any]) -> Callable[..., Any]:
        def answer(func: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = {
                {"axis": "dim", "keepdims": "keepdim", "x": "input", "self": "input"}.get(k, k): v
                for k, v in kwargs.items()
            }
            if args:
                kwargs["input"], args = args[0], args[1:]
            x, out = kwargs.pop("input"), kwargs.pop("out", None)
            if not isinstance(x, ShardTensor):
                return _plain_input(func, x, *args, **kwargs)
            result = f(x, *args, **kwargs)
            if out is not None:
                out.copy_(result if isinstance(out, ShardTensor) else result.full_tensor())
                return out
            return result

        handler(*spellings(*names), name=names[0])(answer)
        return f

    return register


# ---------------------------------------------------------------------- sums
@_reduction("sum")
def sum_(x: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Sum over dims."""
    r = _Reduction(x, dim, keepdim)
    return r.out(r.sum(torch.sum(r.local, r.dims, keepdim, dtype=dtype) if x.ndim else r.local.sum(dtype=dtype)))


@_reduction("nansum")
def nansum(x: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Sum over dims, NaN as zero."""
    r = _Reduction(x, dim, keepdim)
    return r.out(r.sum(torch.nansum(r.local, r.dims or None, keepdim, dtype=dtype)))


@_reduction("mean")
def mean(x: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Mean over dims: the sum of all shards over the global count, so that shards weigh by their size."""
    if not (dtype or x.dtype).is_floating_point and not (dtype or x.dtype).is_complex:
        raise RuntimeError(
            f"mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: {x.dtype}"
        )
    r = _Reduction(x, dim, keepdim)
    if not r.axes:
        return r.out(torch.mean(r.local, r.dims, keepdim, dtype=dtype) if x.ndim else r.local.mean(dtype=dtype))
    return r.out(r.sum(torch.sum(r.local, r.dims, keepdim, dtype=dtype)) / r.count)


@_reduction("nanmean")
def nanmean(x: ShardTensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> ShardTensor:
    """Mean over the values that are not NaN."""
    r = _Reduction(x, dim, keepdim)
    dims = r.dims if x.ndim else ()
    total = r.sum(torch.nansum(r.local, dims or None, keepdim, dtype=dtype))
    return r.out(total / r.sum(torch.sum(~r.local.isnan(), dims, keepdim).to(total.dtype)))


@_reduction("count_nonzero")
def count_nonzero(x: ShardTensor, dim: Any = None) -> ShardTensor:
    """Number of values that are not zero."""
    r = _Reduction(x, dim, False)
    return r.out(r.sum(torch.count_nonzero(r.local, r.dims if x.ndim else None)))


# ---------------------------------------------------------------------- order
class _PickGradient(torch.autograd.Function):
    """A value found outside of autograd, whose gradient goes to the local elements by given weights."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.weight, None, None


def _extremum(x: ShardTensor, dim: Any, keepdim: bool, largest: bool) -> ShardTensor:
    """amax / amin: ties share the gradient evenly, over all shards."""
    r = _Reduction(x, dim, keepdim)
    op = torch.amax if largest else torch.amin
    if not r.axes:
        return r.out(op(r.local, r.dims, keepdim) if x.ndim else op(r.local, (), keepdim))
    if r.empty:
        op(r.local.new_empty((0,)), 0)  # raises as torch does
    with torch.no_grad():
        filled = fill_empty(r.local.detach(), r.dims, (lowest if largest else highest)(x.dtype))
        value = op(stack_over(op(filled, r.dims, True), r.spec, r.axes), 0)
    if r.local.requires_grad:
        hit = (r.local.detach() == value) | (r.local.detach().isnan() & value.isnan())
        ties = r.sum(hit.sum(r.dims, keepdim=True))
        value = _PickGradient.apply(r.local, value, hit.to(x.dtype) / ties)
    return r.out(value if keepdim else value.squeeze(r.dims))


@_reduction("amax")
def amax(x: ShardTensor, dim: Any = (), keepdim: bool = False) -> ShardTensor:
    """Largest value."""
    return _extremum(x, dim, keepdim, True)


@_reduction("amin")
def amin(x: ShardTensor, dim: Any = (), keepdim: bool = False) -> ShardTensor:
    """Smallest value."""
    return _extremum(x, dim, keepdim, False)


@_reduction("aminmax")
def aminmax(x: ShardTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Smallest and largest value."""
    low, high = _extremum(x, dim, keepdim, False), _extremum(x, dim, keepdim, True)
    return torch.return_types.aminmax((low, high))


def _indexed(x: ShardTensor, dim: int | None, keepdim: bool, largest: bool) -> tuple[Tensor, Tensor, _Reduction]:
    """Extreme value and global index along `dim` (of the flattened tensor for None), the first one among equals."""
    r = _Reduction(x, dim, keepdim)
    if r.empty:
        (torch.argmax if largest else torch.argmin)(r.local.new_empty((0, 1)), 0)  # raises as torch does
    worst = (lowest if largest else highest)(x.dtype)
    local = fill_empty(r.local.to(torch.uint8) if x.dtype is torch.bool else r.local, r.dims, worst)
    find = torch.argmax if largest else torch.argmin
    if dim is None:
        at = find(local)
        value = local.flatten()[at] if local.ndim else local
        index = _global_flat(at, local.shape, r.spec)
    else:
        at = find(local, dim, keepdim=True) if local.ndim else find(local)
        value = local.gather(dim, at) if local.ndim else local
        index = at + r.spec.offsets()[normal_dim(dim, x.ndim)] if x.ndim else at
    values, indices = stack_over(value, r.spec, r.axes), stack_over(index, r.spec, r.axes)
    if r.axes:
        best = values.amax(0) if largest else values.amin(0)
        hit = (values == best) | (values.isnan() & best.isnan())
        first = torch.where(hit, indices, torch.iinfo(torch.int64).max).argmin(0, keepdim=True)
        values, indices = values.gather(0, first)[0], indices.gather(0, first)[0]
    if dim is not None and not keepdim and x.ndim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    if dim is None and keepdim:
        values, indices = values.reshape((1,) * x.ndim), indices.reshape((1,) * x.ndim)
    return values, indices, r


def _global_flat(at: Tensor, shape: torch.Size, spec: ShardTensorSpec) -> Tensor:
    """A flat index of the shard as flat index of the global tensor."""
    out, step = torch.zeros_like(at), 1
    for d in reversed(range(len(shape))):
        out = out + (at % shape[d] + spec.offsets()[d]) * step
        at, step = at // shape[d], step * spec.shape[d]
    return out


@_reduction("argmax")
def argmax(x: ShardTensor, dim: int | None = None, keepdim: bool = False) -> ShardTensor:
    """Global index of the largest value."""
    _, indices, r = _indexed(x, dim, keepdim, True)
    return r.out(indices)


@_reduction("argmin")
def argmin(x: ShardTensor, dim: int | None = None, keepdim: bool = False) -> ShardTensor:
    """Global index of the smallest value."""
    _, indices, r = _indexed(x, dim, keepdim, False)
    return r.out(indices)


def _max_or_min(x: ShardTensor, largest: bool, *args: Any, **kwargs: Any) -> Any:
    other = kwargs.get("other", args[0] if args else None)
    if isinstance(other, Tensor):
        return (torch.maximum if largest else torch.minimum)(x, other)
    if not args and "dim" not in kwargs:
        return _extremum(x, None, False, largest)
    dim, keepdim = _dim_keepdim(*args, **kwargs)
    values, indices, r = _indexed(x, dim, keepdim, largest)
    if values.dtype is not x.dtype:
        values = values.to(x.dtype)
    kind = torch.return_types.max if largest else torch.return_types.min
    return kind((r.out(values), r.out(indices)))


def _dim_keepdim(dim: int, keepdim: bool = False) -> tuple[int, bool]:
    return dim, keepdim


@_reduction("max")
def max_(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Largest value, or (values, global indices) along a dim, or the elementwise maximum with another tensor."""
    return _max_or_min(x, True, *args, **kwargs)


@_reduction("min")
def min_(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Smallest value, or (values, global indices) along a dim, or the elementwise minimum with another tensor."""
    return _max_or_min(x, False, *args, **kwargs)


# ---------------------------------------------------------------------- products and logic
@_reduction("prod")
def prod(
    x: ShardTensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> ShardTensor:
    """Product over one dim or all."""
    r = _Reduction(x, dim, keepdim)
    part = torch.prod(r.local, dtype=dtype) if dim is None else torch.prod(r.local, dim, keepdim, dtype=dtype)
    return r.out(r.merge(part, lambda s: s.prod(0)))


@_reduction("any")
def any_(x: ShardTensor, dim: Any = None, keepdim: bool = False) -> ShardTensor:
    """True where any value is true."""
    return _logic(torch.any, x, dim, keepdim)


@_reduction("all")
def all_(x: ShardTensor, dim: Any = None, keepdim: bool = False) -> ShardTensor:
    """True where all values are true."""
    return _logic(torch.all, x, dim, keepdim)


def _logic(op: Any, x: ShardTensor, dim: Any, keepdim: bool) -> ShardTensor:
    r = _Reduction(x, dim, keepdim)
    part = op(r.local) if not x.ndim or (dim is None and not keepdim) else op(r.local, r.dims, keepdim)
    return r.out(r.merge(part, lambda s: op(s, 0)))


@_reduction("logsumexp")
def logsumexp(x: ShardTensor, dim: Any, keepdim: bool = False) -> ShardTensor:
    """log of the sum of exponentials, shifted by the global maximum."""
    r = _Reduction(x, dim, keepdim)
    if not r.axes or r.empty:
        return r.out(torch.logsumexp(r.local, r.dims if x.ndim else 0, keepdim))
    local = r.local if x.dtype.is_floating_point else r.local.to(torch.get_default_dtype())
    with torch.no_grad():
        top = stack_over(fill_empty(local.detach(), r.dims, float("-inf")).amax(r.dims, True), r.spec, r.axes).amax(0)
        top = torch.where(top.isinf(), 0.0, top)
    total = r.sum((local - top).exp().sum(r.dims, keepdim))
    return r.out(total.log() + (top if keepdim else top.squeeze(r.dims)))


# ---------------------------------------------------------------------- moments
def moments(r: _Reduction) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations over all shards, both with the reduced dims kept.

    Parts are merged by count (Chan, Golub and LeVeque 1979) in float32 or better, so that a large mean costs no digits.
    """
    local = r.local.float() if r.local.dtype in (torch.float16, torch.bfloat16) else r.local
    n = math.prod(local.shape[d] for d in r.dims)
    mine = local.sum(r.dims, True) / max(n, 1)
    deviation = (local - mine).square().sum(r.dims, True)
    if not r.axes:
        return mine, deviation
    means, deviations = stack_over(mine, r.spec, r.axes), stack_over(deviation, r.spec, r.axes)
    counts = stack_over(torch.full_like(mine.detach(), n), r.spec, r.axes)
    mean_ = means[:1] + (counts * (means - means[:1])).sum(0, keepdim=True) / r.count
    return mean_[0], (deviations + counts * (means - mean_).square()).sum(0)


def _variance(x: ShardTensor, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[_Reduction, Tensor, Tensor]:
    """Variance and mean of a `var`-like call in any of torch's spellings."""
    names = ["dim", "unbiased", "keepdim"] if not (args and isinstance(args[0], bool)) else ["unbiased"]
    options = {**options, **dict(zip(names, args, strict=False))}
    keepdim = bool(options.get("keepdim", False))
    correction = options.get("correction")
    if correction is None:
        correction = 1 if options.get("unbiased", True) or options.get("unbiased") is None else 0
    r = _Reduction(x, options.get("dim"), keepdim)
    mean_, deviation = moments(r)
    var = (
        deviation / max(0, r.count - correction)
        if r.count - correction > 0
        else deviation / torch.zeros_like(deviation)
    )
    if not keepdim:
        var, mean_ = var.squeeze(r.dims), mean_.squeeze(r.dims)
    return r, var.to(x.dtype), mean_.to(x.dtype)


def _root(var: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero, as torch defines it for std."""
    zero = var == 0
    return torch.where(zero, torch.zeros_like(var), torch.where(zero, torch.ones_like(var), var).sqrt())


def _moment_op(name: str, pick: Callable[[Tensor, Tensor], Any]) -> None:
    def answer(x: ShardTensor, *args: Any, **options: Any) -> Any:
        if (
            x.dtype.is_complex
            or not x.dtype.is_floating_point
            or not x.ndim
            or not cut_axes(whole_values(x._spec), range(x.ndim))
        ):
            return _local_moments(getattr(torch, name), x, args, options)
        r, var, mean_ = _variance(x, args, options)
        out = pick(var, mean_)
        return tuple(r.out(t) for t in out) if isinstance(out, tuple) else r.out(out)

    _reduction(name)(answer)


def _local_moments(func: Any, x: ShardTensor, args: Any, options: Any) -> Any:
    """Nothing is cut (or torch itself must say what is wrong): the whole tensor on every rank."""
    return gather_call(func, (), (x, *args), options)


_moment_op("var", lambda var, mean_: var)
_moment_op("std", lambda var, mean_: _root(var))
_moment_op("var_mean", lambda var, mean_: (var, mean_))
_moment_op("std_mean", lambda var, mean_: (_root(var), mean_))


# ---------------------------------------------------------------------- norms
def vector_norm(x: ShardTensor, p: float, dim: Any, keepdim: bool, dtype: torch.dtype | None = None) -> ShardTensor:
    """p-norm over dims: the norm of the ranks' norms."""
    if dtype is not None:
        x = x.to(dtype)
    if math.isinf(p) and x.ndim:
        return _extremum(x.abs(), dim, keepdim, p > 0)
    r = _Reduction(x, dim, keepdim)
    if not x.ndim:
        return r.out(torch.linalg.vector_norm(r.local, p))
    local = r.filled(float("inf")) if p < 0 else r.local
    part = torch.linalg.vector_norm(local, p, r.dims, keepdim)
    return r.out(r.sum(part) if p == 0 else r.merge(part, lambda s: torch.linalg.vector_norm(s, p, 0)))


@_reduction("vector_norm")
def _linalg_vector_norm(
    x: ShardTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if dim is None and keepdim is False:
        return vector_norm(x, ord, None, False, dtype)
    return vector_norm(x, ord, dim, keepdim, dtype)


@_reduction("norm", "frobenius_norm")
def norm(
    x: ShardTensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    ord: Any = "unset",
) -> Any:
    """`torch.norm` and `Tensor.norm`: vector norms; matrix norms are gathered."""
    if ord != "unset" or p == "nuc" or isinstance(p, (tuple, list)):
        return gather_call(
            torch.linalg.norm if ord != "unset" else torch.norm,
            (),
            (x, *([p] if ord == "unset" else [ord])),
            {"dim": dim, "keepdim": keepdim, "dtype": dtype},
        )
    return vector_norm(x, 2 if p in ("fro", None) else float(p), dim, keepdim, dtype)


@handler(torch.linalg.norm, name="linalg.norm")
def linalg_norm(
    func: Any,
    x: Any,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Any:
    """`torch.linalg.norm`: vector cases are native, matrix norms are gathered."""
    vector = (
        isinstance(x, ShardTensor)
        and out is None
        and (ord is None or (isinstance(ord, (int, float)) and (isinstance(dim, int) or x.ndim == 1)))
    )
    if not vector:
        return gather_call(
            func, (), (x, ord, dim, keepdim), {"dtype": dtype, **({"out": out} if out is not None else {})}
        )
    return vector_norm(x, 2 if ord is None else float(ord), dim, keepdim, dtype)


@handler(F.normalize, name="normalize")
def normalize(func: Any, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divide by the norm along a dim."""
    if not isinstance(input, ShardTensor) or out is not None:
        return gather_call(func, (), (input, p, dim, eps), {} if out is None else {"out": out})
    return input / vector_norm(input, p, dim, True).clamp_min(eps).expand_as(input)


@handler(F.cosine_similarity, torch.cosine_similarity, name="cosine_similarity")
def cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Dot product over norms along a dim; each norm is bounded below by eps, as in torch."""
    n1, n2 = torch.linalg.vector_norm(x1, 2, dim, True), torch.linalg.vector_norm(x2, 2, dim, True)
    return ((x1 / n1.clamp_min(eps)) * (x2 / n2.clamp_min(eps))).sum(dim)
