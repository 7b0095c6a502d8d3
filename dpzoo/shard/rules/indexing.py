"""Indexing: basic indices are views, index tensors over an uncut dim are local, the rest has a rule or is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call, replicate
from dpzoo.shard.function_door import native
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import normal_dim
from dpzoo.shard.tensor import ShardTensor

_BASIC = (int, slice, type(None), type(Ellipsis))


def _is_basic(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, _BASIC) and not isinstance(i, bool) for i in items)


@handler(torch.Tensor.__getitem__, name="getitem")
def getitem(func: Any, x: Any, index: Any) -> Any:
    """`x[...]`: views for ints, slices, None and Ellipsis; index tensors along one dim; the rest gathered."""
    if not isinstance(x, ShardTensor):
        index = tuple(_whole(i) for i in index) if isinstance(index, tuple) else _whole(index)
        return x[index] if not isinstance(x, ShardTensor) else x
    if _is_basic(index):
        return native(func, (ShardTensor,), (x, index), {})
    one = _one_index_tensor(index, x.ndim)
    if one is None:
        return gather_call(func, (), (x, index), {})
    dim, before, at = one
    taken = x[before] if before is not None else x
    return RULE_OF["take"](func, (ShardTensor,), (taken, dim, at), {})


def _whole(i: Any) -> Any:
    return i.full_tensor() if isinstance(i, ShardTensor) else i


def _one_index_tensor(index: Any, ndim: int) -> tuple[int, Any, Tensor] | None:
    """(dim, basic index of the other dims, index tensor) if there is one integer index tensor and else only full slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [
        torch.tensor(i) if isinstance(i, (list, range)) and len(i) and all(type(k) is int for k in i) else i
        for i in items
    ]
    found = [k for k, i in enumerate(items) if isinstance(i, Tensor)]
    if len(found) != 1 or any(not isinstance(i, (slice, type(Ellipsis), Tensor)) for i in items):
        return None
    k, at = found[0], items[found[0]]
    if at.dtype in (torch.bool, torch.uint8) or any(isinstance(i, slice) and i != slice(None) for i in items):
        return None
    dots = [j for j, i in enumerate(items) if i is Ellipsis]
    dim = k if not dots or dots[0] > k else ndim - (len(items) - k)
    return dim, None, at


@rule(name="take")
def _take(input: Tensor, dim: int, index: Tensor) -> Dims | None:
    """Rows of an uncut dim by an index of any shape; the index may be cut instead of the input."""
    labels: Labels = tuple(range(input.ndim))
    names = tuple(f"i{k}" for k in range(index.ndim))
    slices = (slice(None),) * dim
    return Dims(
        [labels, names],
        [(*labels[:dim], *names, *labels[dim + 1 :])],
        lambda x, i: x[(*slices, i)],
        whole=frozenset([dim]),
    )


@rule(*spellings("index_select"))
def index_select(input: Tensor, dim: int, index: Tensor) -> Dims | None:
    """As indexing with one index vector."""
    if index.ndim > 1 or input.ndim == 0:
        return None
    d = normal_dim(dim, input.ndim)
    labels: Labels = tuple(range(input.ndim))
    names = ("i",) * index.ndim
    out = (*labels[:d], "i", *labels[d + 1 :])
    whole: frozenset[Any] = frozenset([d]) if index.ndim else frozenset([d, "i"])
    return Dims([labels, names], [out], lambda x, i: torch.index_select(x, d, i), whole=whole)


@rule(*spellings("gather"))
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Dims | None:
    """Elements along an uncut dim; the other dims go together where they have the same length."""
    if sparse_grad or input.ndim == 0 or index.ndim != input.ndim:
        return None
    d = normal_dim(dim, input.ndim)
    same = [i != d and input.shape[i] == index.shape[i] for i in range(input.ndim)]
    x = tuple(i if s else f"x{i}" for i, s in enumerate(same))
    y = tuple(i if s else f"y{i}" for i, s in enumerate(same))
    whole = frozenset(label for label in (*x, *y) if isinstance(label, str) and label != f"y{d}")
    return Dims([x, y], [y], lambda t, i: torch.gather(t, d, i), whole=whole)


@handler(*spellings("take_along_dim"), name="take_along_dim")
def take_along_dim(func: Any, input: Tensor, indices: Tensor, dim: int | None = None, *, out: Any = None) -> Any:
    """gather with broadcasting of the other dims."""
    if out is not None or (input.ndim != indices.ndim and dim is not None):
        return gather_call(func, (), (input, indices, dim), {} if out is None else {"out": out})
    if dim is None:
        return torch.gather(input.flatten(), 0, indices.flatten())
    d = normal_dim(dim, input.ndim)
    shape = [max(a, b) if i != d else None for i, (a, b) in enumerate(zip(input.shape, indices.shape, strict=True))]
    x = input.expand([input.shape[d] if n is None else n for n in shape])
    return torch.gather(x, d, indices.expand([indices.shape[d] if n is None else n for n in shape]))


@handler(*spellings("select"), name="select")
def select(func: Any, input: Any, dim: int, index: int) -> Any:
    """One row, shared with every rank where its dim is cut."""
    return native(torch.Tensor.select, (ShardTensor,), (input, dim, index), {})


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
    return native(getattr(torch.Tensor, name), (ShardTensor,), (first, *rest), kwargs)


def _split(x: Any, split_size: Any, dim: int = 0) -> Any:
    func = torch._VF.split if isinstance(split_size, int) else torch._VF.split_with_sizes  # type: ignore[attr-defined]
    return tuple(native(func, (ShardTensor,), (x, split_size, dim), {}))


@handler(*spellings("unbind"), name="unbind")
def unbind(func: Any, input: Any, dim: int = 0) -> Any:
    """All rows of a dim."""
    return native(torch.Tensor.unbind, (ShardTensor,), (input, dim), {})


@handler(*spellings("diagonal"), name="diagonal")
def diagonal(func: Any, input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Both dims of the diagonal are needed whole."""
    return RULE_OF["diagonal rule"](func, (ShardTensor,), (input, offset, dim1, dim2), {})


@rule(name="diagonal rule")
def _diagonal(input: Tensor, offset: int, dim1: int, dim2: int) -> Dims | None:
    if input.ndim < 2:
        return None
    a, b = normal_dim(dim1, input.ndim), normal_dim(dim2, input.ndim)
    labels = tuple(range(input.ndim))
    out = (*(x for x in labels if x not in (a, b)), "diagonal")
    return Dims([labels], [out], lambda t: t.diagonal(offset, a, b), whole=frozenset([a, b, "diagonal"]))


# ---------------------------------------------------------------------- writing
@handler(torch.Tensor.__setitem__, name="setitem")
def setitem(func: Any, x: Any, index: Any, value: Any) -> None:
    """`x[...] = value`: a new tensor with the part replaced, copied into `x`; gradients as in torch."""
    if not isinstance(x, ShardTensor):
        native(torch.Tensor.copy_, (ShardTensor,), (x[index], _whole(value)), {})
        return
    if isinstance(index, Tensor) and index.dtype is torch.bool and index.shape == x.shape and _is_scalar(value):
        x.masked_fill_(index, value)
        return
    if not _is_basic(index):
        _set_gathered(x, index, value)
        return
    inside = torch.zeros_like(x, dtype=torch.bool, requires_grad=False)
    with torch.no_grad():
        _mark(inside, index)
    part = x.detach()[index]
    if not isinstance(value, Tensor):
        x.masked_fill_(inside, value)
        return
    value = value if isinstance(value, ShardTensor) else replicate(value, x)
    while value.ndim > part.ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    spread = _spread(value.to(x.dtype).expand(part.shape), x, index)
    x.copy_(torch.where(inside, spread, x))


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _mark(inside: ShardTensor, index: Any) -> None:
    """Set the indexed part of a mask, shard by shard."""
    view = native(torch.Tensor.__getitem__, (ShardTensor,), (inside, _as_slices(index, inside)), {})
    view._local_tensor.fill_(True)


def _as_slices(index: Any, x: Tensor) -> tuple[Any, ...]:
    """A basic index with ints as slices of length 1 and without None: a view of the same elements, of full ndim."""
    items = [i for i in (index if isinstance(index, tuple) else (index,)) if i is not None]
    if Ellipsis in items:
        k = items.index(Ellipsis)
        items = items[:k] + [slice(None)] * (x.ndim - len(items) + 1) + items[k + 1 :]
    if len(items) > x.ndim:
        raise IndexError(f"too many indices for tensor of dimension {x.ndim}")
    out: list[Any] = []
    for d, i in enumerate(items):
        if isinstance(i, int):
            if not -x.shape[d] <= i < x.shape[d]:
                raise IndexError(f"index {i} is out of bounds for dimension {d} with size {x.shape[d]}")
            i %= x.shape[d]
            i = slice(i, i + 1)
        out.append(i)
    return tuple(out)


def _spread(value: ShardTensor, x: ShardTensor, index: Any) -> Tensor:
    """`value` (shape of `x[index]`) at its place in a tensor shaped like `x`, zeros elsewhere: the transpose of indexing."""
    slices = _as_slices(index, x)
    value = value.reshape(
        [len(range(*s.indices(n))) for s, n in zip(slices, x.shape, strict=False)] + list(x.shape[len(slices) :])
    )
    for d, s in enumerate(slices):
        lo, hi, step = s.indices(x.shape[d])
        if (lo, hi, step) != (0, x.shape[d], 1):
            value = _Embed.apply(value, d, x.shape[d], lo, max(lo, hi), step)
    return value


class _Embed(torch.autograd.Function):
    """Rows placed at `lo, lo + step, ...` of a longer dim of zeros."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, n: int, lo: int, hi: int, step: int) -> Tensor:
        ctx.args = (dim, lo, hi, step)
        shape = [*value.shape[:dim], n, *value.shape[dim + 1 :]]
        return torch.ops.aten.slice_backward.default(value, shape, dim, lo, hi, step)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        dim, lo, hi, step = ctx.args
        return g[(*[slice(None)] * dim, slice(lo, hi, step))], None, None, None, None, None


def _set_gathered(x: ShardTensor, index: Any, value: Any) -> None:
    """An index without a rule: on the whole tensor, then back into the shards."""
    items: Sequence[Any] = index if isinstance(index, tuple) else (index,)
    whole = tuple(_whole(i) for i in items)

    def write(full: Tensor, v: Any) -> Tensor:
        full = full.clone()
        full[whole] = v
        return full

    write.__name__ = "setitem"
    x.copy_(gather_call(write, (), (x, value), {}))
