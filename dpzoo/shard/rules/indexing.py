"""Indexing: basic indices are views, index tensors over an uncut dim are local, the rest has a rule or is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import broadcast_labels
from dpzoo.shard.moved_view import copied_view
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import check_index, native_part, normal_dim
from dpzoo.shard.tensor import ShardTensor

aten = torch.ops.aten

_BASIC = (int, slice, type(None), type(Ellipsis))
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def items_of(index: Any) -> list[Any]:
    """The parts of an index, lists of ints as tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    return [torch.tensor(i) if isinstance(i, (list, range)) and _all_ints(i) else i for i in parts]


def _all_ints(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(type(v) is int for v in values)


def is_basic(index: Any) -> bool:
    """Is it made of ints, slices, None and Ellipsis alone, so that it stands for a view?"""
    return all(isinstance(i, _BASIC) and not isinstance(i, bool) for i in items_of(index))


@handler(torch.Tensor.__getitem__, name="getitem")
def getitem(func: Any, x: Any, index: Any) -> Any:
    """`x[...]`: views for ints, slices, None and Ellipsis; index tensors over uncut dims are local."""
    if is_basic(index):
        return native_part(func, x, index)
    found = run_of_tensors(items_of(index), x.ndim)
    if found is None:
        return gather_call(func, (), (x, index), {})
    basic, dim, tensors = found
    part = x if all(i == slice(None) for i in basic if i is not Ellipsis) else x[tuple(basic)]
    return RULE_OF["take"](func, (ShardTensor,), (part, dim, *tensors), {})


def run_of_tensors(items: list[Any], ndim: int) -> tuple[list[Any], int, list[Tensor]] | None:
    """An index with integer tensors side by side and else slices, None and Ellipsis, in two steps.

    Returns the index without the tensors, the dim of its result where they apply, and the tensors; None for others.
    """
    at = [k for k, i in enumerate(items) if isinstance(i, Tensor)]
    tensors = [items[k] for k in at]
    fits = all(isinstance(i, (slice, Tensor, type(None), type(Ellipsis))) for i in items)
    if not fits or not at or at[-1] - at[0] + 1 != len(at) or any(t.dtype not in _INDEX_DTYPES for t in tensors):
        return None
    basic = [slice(None) if isinstance(i, Tensor) else i for i in items]
    used = sum(i is not None and i is not Ellipsis for i in basic)
    if used > ndim:
        return None  # torch says what is wrong with it
    dots = [k for k, i in enumerate(basic) if i is Ellipsis]
    dim = at[0] + (ndim - used - 1 if dots and dots[0] < at[0] else 0)
    return basic, dim, tensors


@rule(name="take")
def _take(input: Tensor, dim: int, *indices: Tensor) -> Dims | None:
    """Elements of uncut dims by index tensors that broadcast together; an index may be cut instead of the input."""
    labels: Labels = tuple(range(input.ndim))
    taken = range(dim, dim + len(indices))
    index_labels, out_index = broadcast_labels([tuple(i.shape) for i in indices])
    named = [tuple(None if k is None else f"i{k}" for k in names) for names in index_labels]
    slices = (slice(None),) * dim

    def check(x: Tensor, *found: Tensor) -> None:
        for d, i in zip(taken, found, strict=True):
            check_index(i, -x.shape[d], x.shape[d], torch.zeros(x.shape[d]).__getitem__)

    return Dims(
        [labels, *named],
        [(*labels[:dim], *(f"i{k}" for k in out_index), *labels[taken.stop :])],
        lambda x, *i: x[(*slices, *i)],
        whole=frozenset(taken),
        check=check,
    )


@rule(*spellings("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> Dims | None:
    """As indexing with one index vector."""
    if index.ndim > 1 or input.ndim == 0:
        return None
    d = normal_dim(dim, input.ndim)
    probe(torch.index_select, input, d, index)
    labels: Labels = tuple(range(input.ndim))
    names = ("i",) * index.ndim
    out = (*labels[:d], "i", *labels[d + 1 :])
    whole: frozenset[Any] = frozenset([d]) if index.ndim else frozenset([d, "i"])
    n, stand_in = input.shape[d], torch.zeros([s if k == d else 1 for k, s in enumerate(input.shape)])
    return Dims(
        [labels, names],
        [out],
        lambda x, i: torch.index_select(x, d, i),
        whole=whole,
        check=lambda x, i: check_index(i, 0, n, lambda i: torch.index_select(stand_in, d, i)),
    )


@rule(*spellings("gather"))
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Dims | None:
    """Elements along an uncut dim; the other dims go together where they have the same length."""
    if sparse_grad or input.ndim == 0 or index.ndim != input.ndim:
        return None
    d = normal_dim(dim, input.ndim)
    probe(torch.gather, input, d, index)
    same = [i != d and input.shape[i] == index.shape[i] for i in range(input.ndim)]
    x = tuple(i if s else f"x{i}" for i, s in enumerate(same))
    y = tuple(i if s else f"y{i}" for i, s in enumerate(same))
    whole = frozenset(label for label in (*x, *y) if isinstance(label, str) and label != f"y{d}")
    n = input.shape[d]
    return Dims(
        [x, y],
        [y],
        lambda t, i: torch.gather(t, d, i),
        whole=whole,
        check=lambda t, i: check_index(i, 0, n, lambda i: torch.gather(torch.zeros(n), 0, i.flatten())),
    )


@handler(*spellings("take_along_dim"), name="take_along_dim")
def take_along_dim(func: Any, input: Tensor, indices: Tensor, dim: int | None = None, *, out: Any = None) -> Any:
    """gather with broadcasting of the other dims."""
    if out is not None or (input.ndim != indices.ndim and dim is not None):
        return gather_call(func, (), (input, indices, dim), {} if out is None else {"out": out})
    if dim is None:
        return take_along_dim(func, input.flatten(), indices.flatten(), 0)
    d = normal_dim(dim, input.ndim)
    shape = [max(a, b) if i != d else None for i, (a, b) in enumerate(zip(input.shape, indices.shape, strict=True))]
    x = input.expand([input.shape[d] if n is None else n for n in shape])
    indices = torch.where(indices < 0, indices + input.shape[d], indices)  # gather does not count from the end
    return torch.gather(x, d, indices.expand([indices.shape[d] if n is None else n for n in shape]))


@handler(*spellings("select"), name="select")
def select(func: Any, input: Any, dim: int, index: int) -> Any:
    """One row, shared with every rank where its dim is cut."""
    return native_part(torch.Tensor.select, input, dim, index)


@handler(*spellings("narrow"), name="narrow")
def narrow(func: Any, input: Any, dim: int, start: Any, length: int) -> Any:
    """Some rows, as a view of the shards."""
    if isinstance(start, Tensor):
        return gather_call(func, (), (input, dim, start, length), {})
    return native_part(torch.Tensor.narrow, input, dim, start, length)


@handler(*spellings("diagonal"), name="diagonal")
def diagonal(func: Any, input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """A view; where both dims are cut they are brought together first."""
    a, b = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    if input._spec.is_partial or (input._spec.axis_of(a) is not None and input._spec.axis_of(b) is not None):
        return copied_view(RULE_OF["diagonal rule"](func, (ShardTensor,), (input, offset, dim1, dim2), {}), input)
    return native_part(torch.Tensor.diagonal, input, offset, dim1, dim2)


@rule(name="diagonal rule")
def _diagonal(input: Tensor, offset: int, dim1: int, dim2: int) -> Dims | None:
    if input.ndim < 2:
        return None
    a, b = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    labels: Labels = tuple(range(input.ndim))
    out: Labels = (*(x for x in labels if x not in (a, b)), "diagonal")
    return Dims([labels], [out], lambda t: t.diagonal(offset, a, b), whole=frozenset([a, b, "diagonal"]))
