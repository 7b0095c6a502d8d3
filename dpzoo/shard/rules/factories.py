"""Copies, casts and new tensors below autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.diagnose import op_name
from dpzoo.shard.dispatch_door import local_for, local_in, on, wrap_in
from dpzoo.shard.errors import ShardError
from dpzoo.shard.exchange import exchange
from dpzoo.shard.fallback import replicate, whole
from dpzoo.shard.moved_view import counted, wrote
from dpzoo.shard.partition import starts
from dpzoo.shard.registry import handler
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move

aten = torch.ops.aten


@on(
    aten.clone.default,
    aten._to_copy.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.contiguous.default,
)
def _copy(op: Any, x: ShardTensor, **kwargs: Any) -> ShardTensor:
    local, spec = x._local_tensor, x._spec
    if spec.is_partial and kwargs.get("dtype", spec.dtype) is not spec.dtype:  # the cast of a sum is no sum of casts
        spec = spec.like(cuts=tuple(REPLICATED if isinstance(c, str) else c for c in spec.cuts))
        local = move(local, x._spec, spec)
    out = op(local, **kwargs)
    order = kwargs.get("memory_format")
    if order is not None and order is not torch.preserve_format:
        spec = spec.in_memory_format(order)
    return wrap(out, spec.for_local(out))


@on(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
def _like(op: Any, x: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    out = op(x._local_tensor, *args, **kwargs)
    spec = x._spec
    if spec.is_partial:  # every rank holds a summand; a new tensor is the same on all
        spec = spec.like(cuts=tuple(REPLICATED if isinstance(c, str) else c for c in spec.cuts))
    return wrap(out, spec.for_local(out))


@on(
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
)
def _new(op: Any, x: ShardTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> ShardTensor:
    """Of the same shape: cut alike; of another: the same on every rank."""
    spec = x._spec
    if op is aten.new_empty_strided.default:
        op, args = aten.new_empty.default, ()
    if tuple(size) == tuple(spec.shape) and not spec.is_partial:
        out = op(x._local_tensor, spec.local_shape, *args, **kwargs)
        return wrap(out, spec.for_local(out))
    out = op(x._local_tensor, size, *args, **kwargs)
    n = len(spec.cuts)
    return wrap_in(out, spec.layout, (REPLICATED,) * n, ((),) * n)


@handler(torch.Tensor.new_tensor, name="new_tensor")
def new_tensor(func: Any, self: Tensor, data: Any, **options: Any) -> Any:
    """A new tensor, the same on every rank."""
    assert isinstance(self, ShardTensor)
    options = {"dtype": self.dtype, "device": self.device, **options}
    needs_grad = options.pop("requires_grad", False)
    return replicate(torch.tensor(whole(data), **options), self).requires_grad_(needs_grad)


@on(aten.copy_.default)
def _copy_(op: Any, x: Any, src: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(x, ShardTensor):
        assert isinstance(src, ShardTensor)
        x.copy_(move(src._local_tensor, src._spec, src._spec.replicated()))
        return x
    if isinstance(src, ShardTensor) and same_cut(src._spec, x._spec):
        value = src._local_tensor
    elif x._spec.is_partial:
        raise ShardError(f"copy_ into the partial value {x._spec.describe()} is not defined: redistribute it first")
    else:
        value = local_for(src, x)
    counted(x._local_tensor.copy_, value, non_blocking)
    wrote(x)
    return x


def same_cut(a: ShardTensorSpec, b: ShardTensorSpec) -> bool:
    """Whether the shards of two tensors fit on each other without broadcasting."""
    return (a.shape, a.cuts, a.sizes) == (b.shape, b.cuts, b.sizes)


@on(aten.zero_.default, aten.fill_.Scalar)
def _fill_(op: Any, x: ShardTensor, *args: Any) -> ShardTensor:
    if x._spec.is_partial and op is not aten.zero_.default:
        raise ShardError(f"{op_name(op)} on the partial value {x._spec.describe()}: redistribute it first")
    counted(op, x._local_tensor, *args)
    wrote(x)
    return x


@on(aten._local_scalar_dense.default)
def _scalar(op: Any, x: ShardTensor) -> Any:
    return move(x._local_tensor, x._spec, x._spec.replicated()).item()


@on(aten.is_same_size.default)
def _is_same_size(op: Any, a: Tensor, b: Tensor) -> bool:
    return tuple(a.shape) == tuple(b.shape)


@on(aten.equal.default)
def _equal(op: Any, a: Tensor, b: Tensor) -> bool:
    if tuple(a.shape) != tuple(b.shape):
        return False
    one = a if isinstance(a, ShardTensor) else b
    assert isinstance(one, ShardTensor)
    spec = one._spec
    if spec.is_partial:
        spec = spec.replicated()
    same = torch.equal(local_in(a, spec.layout, spec.cuts, spec.sizes), local_in(b, spec.layout, spec.cuts, spec.sizes))
    flag = torch.tensor(int(same), device=one.device)
    for axis in spec.layout.axes:
        flag = comm.all_reduce(flag, spec.layout.groups[axis], "min")
    return bool(flag)


# ---------------------------------------------------------------------- joining
@on(aten.stack.default)
def _stack(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> ShardTensor:
    spec = next(t._spec for t in tensors if isinstance(t, ShardTensor))
    spec = spec if not spec.is_partial else spec.replicated()
    dim %= spec.ndim + 1
    locals_ = [local_in(t, spec.layout, spec.cuts, spec.sizes) for t in tensors]
    cuts = tuple(c + (c >= dim) if isinstance(c, int) and c >= 0 else c for c in spec.cuts)
    return wrap_in(op(locals_, dim), spec.layout, cuts, spec.sizes)


@on(aten.cat.default)
def _cat(op: Any, tensors: Sequence[Tensor], dim: int = 0) -> ShardTensor:
    tensors = [t for t in tensors if tuple(t.shape) != (0,)] or list(tensors)[:1]
    spec = next((t._spec for t in tensors if isinstance(t, ShardTensor) and t._spec.cut_dims), None)
    if spec is None:
        spec = next(t._spec for t in tensors if isinstance(t, ShardTensor)).replicated()
    spec = spec if not spec.is_partial else spec.replicated()
    dim %= spec.ndim
    axis = spec.axis_of(dim)
    if axis is None:
        return wrap_in(
            op([local_in(t, spec.layout, spec.cuts, spec.sizes) for t in tensors], dim),
            spec.layout,
            spec.cuts,
            spec.sizes,
        )
    parts = [cut_along(t, axis, spec.layout.shape[axis]) for t in tensors]
    sizes, wanted = plan_cat([p or t.shape[dim] for p, t in zip(parts, tensors, strict=True)], spec.layout.shape[axis])
    me, pieces = spec.layout.coords[axis], []
    for t, own, want in zip(tensors, parts, wanted, strict=True):
        cuts, cut_sizes = list(spec.cuts), list(spec.sizes)
        if own is None:
            cuts[axis], cut_sizes[axis] = REPLICATED, ()
            lo, hi = want[me]
            pieces.append(local_in(t, spec.layout, tuple(cuts), tuple(cut_sizes)).narrow(dim, lo, hi - lo))
        else:
            cut_sizes[axis] = own
            local = local_in(t, spec.layout, tuple(cuts), tuple(cut_sizes))
            pieces.append(exchange(local, dim, own, tuple((w,) for w in want), spec.layout.groups[axis]))
    out_sizes = list(spec.sizes)
    out_sizes[axis] = sizes
    return wrap_in(op(pieces, dim), spec.layout, spec.cuts, out_sizes)


def cut_along(t: Tensor, axis: int, parts: int) -> tuple[int, ...] | None:
    """The sizes of an operand that is cut along the joined dim by `axis`; None if it is whole there."""
    if isinstance(t, ShardTensor):
        return t._spec.sizes[axis] if isinstance(t._spec.cuts[axis], int) and t._spec.cuts[axis] != REPLICATED else None
    return None


def plan_cat(
    operands: Sequence[int | tuple[int, ...]], parts: int
) -> tuple[tuple[int, ...], list[list[tuple[int, int]]]]:
    """Sizes of a concatenation, and per operand the interval that each rank contributes to its shard of the result.

    A cut operand (its sizes) adds its shards to those of the others; a whole one (its length) goes to one shard: the
    first before any cut operand, the last after all of them, so that a class token or a padding row moves nothing.
    """
    seen_cut, total = False, [0] * parts
    for o in operands:
        if isinstance(o, int):
            total[-1 if seen_cut else 0] += o
        else:
            seen_cut = True
            total = [a + b for a, b in zip(total, o, strict=True)]
    at, out, begin = starts(tuple(total)), [], 0
    for o in operands:
        n = o if isinstance(o, int) else sum(o)
        out.append(
            [(min(n, max(0, lo - begin)), min(n, max(0, hi - begin))) for lo, hi in zip(at, at[1:], strict=False)]
        )
        begin += n
    return tuple(total), out
