"""Sums, means, products, logic: each rank reduces its shard, the parts are merged, every rank holds the same result.

Sums travel as one all-reduce. Half precision is added in float32, rounded once at the end as one device would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import fill_empty
from dpzoo.shard.rules.reducing import Maths, Plan, Reduction, node, reduces, reduction_of
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


# ---------------------------------------------------------------------- sums
class _Sum(Maths):
    """Sum, or mean: the sum over the global count, so that shards weigh by their size."""

    saves = False

    def __init__(self, r: Reduction, dtype: torch.dtype | None, mean: bool) -> None:
        self.dtype, self.mean = dtype, mean
        self.divisor = r.count if mean else None
        self.wide = bool(r.groups) and (dtype or r.spec.dtype) in _HALF

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """Reduce the shard, then over the ranks."""
        if not r.groups:
            return ((torch.mean if self.mean else torch.sum)(local, r.dims, r.keepdim, dtype=self.dtype),)
        part = torch.sum(local, r.dims, r.keepdim, dtype=torch.float32 if self.wide else self.dtype)
        part = r.sum_now(part)
        if self.divisor is not None:
            part = part / self.divisor
        return (part.to(self._rounded(local)) if self.wide else part,)

    def _rounded(self, local: Tensor) -> torch.dtype:
        """The dtype of the result; autocast may widen it."""
        if torch._C._is_any_autocast_enabled():
            return (torch.mean if self.mean else torch.sum)(local.new_zeros(1), dtype=self.dtype).dtype
        return self.dtype or local.dtype

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """Every element gets the gradient of its sum."""
        return grads[0] if self.divisor is None else grads[0] / self.divisor


@reduces("sum", aten=(aten.sum.default, aten.sum.dim_IntList))
def sum_(
    spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """Sum over dims."""
    r = reduction_of(spec, dim, keepdim)
    return node(_Sum(r, dtype, mean=False), r)


@reduces("mean", aten=(aten.mean.default, aten.mean.dim))
def mean(
    spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """Mean over dims."""
    r = reduction_of(spec, dim, keepdim)
    return node(_Sum(r, dtype, mean=True), r)


@handler(*spellings("sum_to_size"), name="sum_to_size")
def sum_to_size(func: Any, x: Any, *size: Any) -> Any:
    """Sum the dims that broadcasting from `size` would have made."""
    wanted = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    lead = x.ndim - len(wanted)
    fits = lead >= 0 and all(n in (1, x.shape[lead + i]) for i, n in enumerate(wanted))
    if not fits:
        raise RuntimeError(f"size {{{list(wanted)}}} is not expandable to size {{{list(x.shape)}}}.")
    dims = [d for d in range(x.ndim) if d < lead or (wanted[d - lead] == 1 and x.shape[d] != 1)]
    out = x.sum(dims, keepdim=True) if dims else x
    return out.reshape(wanted) if lead else out


@handler(*spellings("trace"), name="trace")
def trace(func: Any, input: Any) -> Any:
    """Sum of the diagonal."""
    if input.ndim != 2:
        raise RuntimeError(f"trace: expected a matrix, but got tensor with dim {input.ndim}")
    return input.diagonal().sum()


class _NanSum(Maths):
    """Sum of what is not NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """Reduce the shard, then over the ranks."""
        wide = torch.float32 if r.groups and self.dtype in _HALF else self.dtype
        return (r.sum_now(torch.nansum(local, r.dims or None, r.keepdim, dtype=wide)).to(self.dtype),)

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """The gradient of the sum, where the element is counted."""
        return grads[0] * ~x.isnan()


@reduces("nansum", aten=(aten.nansum.default,))
def nansum(
    spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """Sum over dims, NaN as zero."""
    if not spec.dtype.is_floating_point:
        return lambda x: torch.sum(x, dim, keepdim, dtype=dtype)
    r = reduction_of(spec, dim, keepdim)
    return node(_NanSum(dtype or spec.dtype), r)


@reduces("nanmean")
def nanmean(
    spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """Mean over the values that are not NaN."""
    wide = torch.float32 if (dtype or spec.dtype) in _HALF else dtype

    def run(x: ShardTensor) -> Tensor:
        total = torch.nansum(x, dim, keepdim, dtype=wide)
        return (total / (~x.isnan()).sum(dim, keepdim)).to(dtype or spec.dtype)

    return run


@reduces("count_nonzero", aten=(aten.count_nonzero.default, aten.count_nonzero.dim_IntList))
def count_nonzero(spec: ShardTensorSpec, dim: Any = None) -> Plan | None:
    """Number of values that are not zero."""
    r = reduction_of(spec, dim)
    return lambda x: r.leave(r.sum_now(torch.count_nonzero(x._local_tensor, r.dims if spec.ndim else None)))


# ---------------------------------------------------------------------- products and logic
@reduces("prod", aten=(aten.prod.default, aten.prod.dim_int))
def prod(
    spec: ShardTensorSpec, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """Product over one dim or all."""
    r = reduction_of(spec, dim, keepdim)

    def run(x: ShardTensor) -> Tensor:
        local = to_shard(x, r.spec)
        part = torch.prod(local, dtype=dtype) if dim is None else torch.prod(local, dim, keepdim, dtype=dtype)
        return r.leave(r.stack(part).prod(0, dtype=part.dtype) if r.axes else part)

    return run


@reduces("any", aten=(aten.any.default, aten.any.dim, aten.any.dims))
def any_(spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False) -> Plan | None:
    """True where any value is true."""
    return _logic(torch.any, spec, dim, keepdim)


@reduces("all", aten=(aten.all.default, aten.all.dim, aten.all.dims))
def all_(spec: ShardTensorSpec, dim: Any = None, keepdim: bool = False) -> Plan | None:
    """True where all values are true."""
    return _logic(torch.all, spec, dim, keepdim)


def _logic(op: Any, spec: ShardTensorSpec, dim: Any, keepdim: bool) -> Plan:
    if dim == ():  # torch takes no dims here literally
        return lambda x: x != 0
    r = reduction_of(spec, dim, keepdim)

    def run(x: ShardTensor) -> Tensor:
        local = x._local_tensor
        part = op(local, r.dims, keepdim) if spec.ndim and (dim is not None or keepdim) else op(local)
        return r.leave(op(r.stack_now(part), 0) if r.axes else part)

    return run


# ---------------------------------------------------------------------- comparing whole tensors
@handler(torch.equal, torch.Tensor.equal, name="equal")
def equal(func: Any, input: Any, other: Any) -> bool:
    """Same shape and same values, the same answer on every rank."""
    if tuple(input.shape) != tuple(other.shape):
        return False
    return bool((input == other).all())


@handler(torch.allclose, torch.Tensor.allclose, name="allclose")
def allclose(
    func: Any, input: Any, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False
) -> bool:
    """All values close, the same answer on every rank."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


# ---------------------------------------------------------------------- logsumexp
class _LogSumExp(Maths):
    """log of the sum of exponentials, shifted by the global maximum."""

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """Maximum, then sum; two small collectives."""
        if not r.axes or r.empty:
            return (torch.logsumexp(local, r.dims or 0, r.keepdim),)
        wide = local.float() if local.dtype in _HALF else local
        wide = wide if wide.dtype.is_floating_point else wide.to(torch.get_default_dtype())
        top = r.stack_now(fill_empty(wide, r.dims, float("-inf")).amax(r.dims, True)).amax(0)
        top = torch.where(top.isinf(), 0.0, top)
        out = r.sum_now((wide - top).exp().sum(r.dims, True)).log() + top
        return (r.drop(out).to(local.dtype if local.dtype.is_floating_point else out.dtype),)

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """The softmax."""
        return grads[0] * (x - outs[0]).exp()


@reduces("logsumexp", aten=(aten.logsumexp.default,))
def logsumexp(spec: ShardTensorSpec, dim: Any, keepdim: bool = False) -> Plan | None:
    """log of the sum of exponentials over dims."""
    if spec.dtype.is_complex:
        return None
    r = reduction_of(spec, dim, keepdim)
    return node(_LogSumExp(), r)
