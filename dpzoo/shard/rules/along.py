"""Scans, sorts and other ops along one dim: `op(input, dim, ...)`.

They need the dim whole. A cut of it moves to another dim and back (all-to-all), so that no rank ever holds the whole
tensor; a tensor without another dim is gathered, with a warning. A running sum shares one number per shard instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.normalize import result_dtype, wide_dtype
from dpzoo.shard.rules.parts import cut_axes, global_of, normal_dim, whole_values
from dpzoo.shard.spec import REPLICATED
from dpzoo.shard.tensor import ShardTensor


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
        kwargs = {_NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
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


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}
_DIM_POSITION = {"topk": 2, "kthvalue": 2, "diff": 2}
_REDUCED_UNLESS_KEPT = frozenset(["median", "nanmedian", "mode", "kthvalue"])

_along(["cumsum", "cumprod", "logcumsumexp"])


@handler(*spellings("cumsum"), name="cumsum over a cut dim")
def cumsum_call(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Each shard's own running sum, plus the totals of the shards before it."""
    named = {_NUMPY_NAMES.get(k, k): v for k, v in kwargs.items()}
    dim = args[0] if len(args) == 1 else named.get("dim")
    if isinstance(input, ShardTensor) and isinstance(dim, int) and not named.keys() - {"dim", "dtype"}:
        d = normal_dim(dim, input.ndim)
        if cut_axes(input._spec, (d,)):
            return _cumsum_on_cut(input, d, named.get("dtype"))
    return RULE_OF["cumsum"](func, (), (input, *args), kwargs)


def _cumsum_on_cut(x: ShardTensor, d: int, dtype: torch.dtype | None) -> ShardTensor:
    spec = whole_values(x._spec)
    (axis,) = cut_axes(spec, (d,))
    dtype = dtype or result_dtype(lambda t: t.cumsum(0), x)
    local = to_shard(x, spec).to(wide_dtype(dtype))
    one_each = [(1,) * len(z) if a == axis else z for a, z in enumerate(spec.sizes)]
    totals = global_of(local.sum(d, keepdim=True), spec, spec.cuts, one_each)
    everywhere = totals._spec.like(
        cuts=[REPLICATED if a == axis else c for a, c in enumerate(spec.cuts)],
        sizes=[() if a == axis else z for a, z in enumerate(one_each)],
    )
    before = to_shard(totals, everywhere, (axis,)).narrow(d, 0, spec.layout.coords[axis]).sum(d, keepdim=True)
    return global_of((local.cumsum(d) + before).to(dtype), spec, spec.cuts, spec.sizes)


def _in_place(name: str) -> None:
    @handler(getattr(torch.Tensor, f"{name}_"), name=f"{name}_")
    def answer(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # of a copy: what the op keeps for its gradient must not be what is overwritten
        return input.copy_(getattr(torch, name)(input.clone(), *args, **kwargs))


_in_place("cumsum")
_in_place("cumprod")

_along(["cummax", "cummin"], outputs=2)
_along(["sort"], outputs=2, default=-1)
_along(["argsort"], default=-1)
_along(["topk"], outputs=2, default=-1, same_length=False)
_along(["median", "nanmedian"], outputs=2, same_length=False)
_along(["mode", "kthvalue"], outputs=2, default=-1, same_length=False)
_along(["diff"], default=-1, same_length=False)
_along(["glu"], default=-1, same_length=False)


@handler(*spellings("diff"), name="diff with more rows")
def diff(
    func: Any,
    input: Any,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
    *,
    out: Any = None,
    **_: Any,
) -> Any:
    """What is prepended and appended is joined first."""
    dim = _.get("axis", dim)
    rows = [t for t in (prepend, input, append) if t is not None]
    if n == 0 or out is not None or input.ndim == 0:
        return gather_call(func, (), (input, n, dim, prepend, append), {} if out is None else {"out": out})
    return RULE_OF["diff"](func, (), (torch.cat(rows, dim) if len(rows) > 1 else input, n, dim), {})


@handler(*spellings("msort"), name="msort")
def msort(func: Any, input: Tensor, *, out: Any = None) -> Any:
    """Sort along dim 0."""
    return torch.sort(input, dim=0)[0] if out is None else gather_call(func, (), (input,), {"out": out})
