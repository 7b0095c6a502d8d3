"""Indexing: basic indices are views, index tensors over an uncut dim are local, the rest has a rule or is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dpzoo.shard.fallback import gather_call, whole
from dpzoo.shard.function_door import broadcast_labels, native
from dpzoo.shard.moved_view import copied_view
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import check_index, native_part, normal_dim
from dpzoo.shard.tensor import ShardTensor

aten = torch.ops.aten

_BASIC = (int, slice, type(None), type(Ellipsis))
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _items(index: Any) -> list[Any]:
    """The parts of an index, lists of ints as tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    return [torch.tensor(i) if isinstance(i, (list, range)) and _all_ints(i) else i for i in parts]


def _all_ints(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(type(v) is int for v in values)


def _is_basic(index: Any) -> bool:
    return all(isinstance(i, _BASIC) and not isinstance(i, bool) for i in _items(index))


@handler(torch.Tensor.__getitem__, name="getitem")
def getitem(func: Any, x: Any, index: Any) -> Any:
    """`x[...]`: views for ints, slices, None and Ellipsis; index tensors over uncut dims are local."""
    if _is_basic(index):
        return native_part(func, x, index)
    found = _run_of_tensors(_items(index), x.ndim)
    if found is None:
        return gather_call(func, (), (x, index), {})
    basic, dim, tensors = found
    part = x if all(i == slice(None) for i in basic if i is not Ellipsis) else x[tuple(basic)]
    return RULE_OF["take"](func, (ShardTensor,), (part, dim, *tensors), {})


def _run_of_tensors(items: list[Any], ndim: int) -> tuple[list[Any], int, list[Tensor]] | None:
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


@handler(
    *spellings(
        "narrow",
        "split",
        "split_with_sizes",
        "chunk",
        "tensor_split",
        "unsafe_split",
        "unsafe_chunk",
        "hsplit",
        "vsplit",
        "dsplit",
    ),
    name="split",
)
def parts(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Parts along a dim are views of the shards."""
    if any(
        isinstance(a, Tensor)
        for a in (*args[1:], *(v for k, v in kwargs.items() if k not in ("input", "self", "tensor")))
    ):
        return gather_call(func, (), args, kwargs)
    name = {"unsafe_split": "split", "unsafe_chunk": "chunk"}.get(func.__name__, func.__name__)
    if "axis" in kwargs:
        kwargs = {("dim" if k == "axis" else k): v for k, v in kwargs.items()}
    first = args[0] if args else kwargs.pop("input", kwargs.pop("tensor", kwargs.pop("self", None)))
    rest = args[1:]
    if name == "split":
        return _split(
            first, *rest, **{("split_size" if k == "split_size_or_sections" else k): v for k, v in kwargs.items()}
        )
    return native_part(getattr(torch.Tensor, name), first, *rest, **kwargs)


def _split(x: Any, split_size: Any, dim: int = 0) -> Any:
    func = torch._VF.split if isinstance(split_size, int) else torch._VF.split_with_sizes  # type: ignore[attr-defined]
    return tuple(native_part(func, x, split_size, dim))


@handler(*spellings("unbind"), name="unbind")
def unbind(func: Any, input: Any, dim: int = 0) -> Any:
    """All rows of a dim."""
    return native_part(torch.Tensor.unbind, input, dim)


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


# ---------------------------------------------------------------------- writing
@handler(torch.Tensor.__setitem__, name="setitem")
def setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    """`x[...] = value`: a write into the view, where `x[...]` is one; gradients as in torch."""
    if not isinstance(x, ShardTensor):
        x[tree_map(whole, index)] = whole(value)
        return
    scalar = not isinstance(value, Tensor) or value.ndim == 0
    if scalar and isinstance(index, Tensor) and index.dtype is torch.bool and 0 < index.ndim <= x.ndim:
        _set_masked(x, index, value)
    elif _is_basic(index):
        _set_view(native(torch.Tensor.__getitem__, (ShardTensor,), (x, index), {}), value)
    else:
        _set_gathered(x, index, value)


def _set_masked(x: ShardTensor, mask: Tensor, value: Any) -> None:
    if mask.shape != x.shape[: mask.ndim]:
        raise IndexError(
            f"The shape of the mask {list(mask.shape)} does not match the shape of the indexed tensor {list(x.shape)}"
        )
    x.masked_fill_(mask.reshape([*mask.shape, *[1] * (x.ndim - mask.ndim)]), value)


def _set_view(view: Tensor, value: Any) -> None:
    if not isinstance(value, Tensor):
        view.fill_(value)
        return
    while value.ndim > view.ndim and value.shape[0] == 1:  # torch drops leading dims of size 1 here
        value = value.squeeze(0)
    view.copy_(value)


def _set_gathered(x: ShardTensor, index: Any, value: Any) -> None:
    """An index without a rule: on the whole tensor, then back into the shards."""
    at = tree_map(whole, index)

    def write(full: Tensor, v: Any) -> Tensor:
        full = full.clone()
        full[at] = v
        return full

    write.__name__ = "setitem"
    x.copy_(gather_call(write, (), (x, value), {}))
