"""Writing at indices: scatter and its relatives, index_add, index_copy, index_fill, index_reduce, index_put, setitem.

The dim that is indexed is whole on each rank; every other dim may be cut, and what is written lies cut alike. Index
values along a cut index dim are brought to every rank, since any of them may name any row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import broadcast_labels
from dpzoo.shard.plan import Dims, Label, Labels, probe
from dpzoo.shard.registry import handler, rule, spellings
from dpzoo.shard.rules.parts import check_index, normal_dim
from dpzoo.shard.tensor import ShardTensor

Call = Callable[..., Tensor]


# ---------------------------------------------------------------------- scatter: an index of as many dims
def _scatter(call: Call, input: Tensor, dim: Any, index: Tensor, src: Tensor | None) -> Dims | None:
    """`call(input, dim, index[, src])`. A dim that is longer in one of them than in another can not be cut."""
    tensors = [input, index] if src is None else [input, index, src]
    if not isinstance(dim, int) or input.ndim == 0 or any(t.ndim != input.ndim for t in tensors):
        return None
    d = normal_dim(dim, input.ndim)
    probe(call, input, d, *tensors[1:])
    labels: list[Labels] = []
    for name, _ in zip("xis", tensors, strict=False):
        same = [k != d and all(t.shape[k] == input.shape[k] for t in tensors) for k in range(input.ndim)]
        labels.append(tuple(k if s else f"{name}{k}" for k, s in enumerate(same)))
    n = input.shape[d]

    def check(x: Tensor, i: Tensor, *_: Tensor) -> None:
        check_index(i, 0, n, lambda i: torch.zeros(n).scatter(0, i, 1.0))

    return Dims(
        labels,
        [labels[0]],
        lambda x, *rest: call(x, d, *rest),
        whole=frozenset(label for names in labels for label in names if isinstance(label, str)),
        check=check,
    )


@rule(*spellings("scatter"))
def scatter(
    input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None, reduce: str | None = None
) -> Dims | None:
    """`out[..., index[...], ...] = src`, or a number."""
    options: dict[str, Any] = {} if reduce is None else {"reduce": reduce}
    number = src if value is None else value
    if isinstance(src, Tensor) and value is None:
        return _scatter(lambda x, d, i, s: torch.scatter(x, d, i, s, **options), input, dim, index, src)
    if isinstance(number, Tensor) or number is None:
        return None
    return _scatter(lambda x, d, i: torch.scatter(x, d, i, number, **options), input, dim, index, None)


@rule(*spellings("scatter_add"))
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Dims | None:
    """As scatter, added."""
    return _scatter(torch.scatter_add, input, dim, index, src)


@rule(*spellings("scatter_reduce"))
def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Dims | None:
    """As scatter, reduced by sum, prod, mean, amax or amin."""

    def call(x: Tensor, d: int, i: Tensor, s: Tensor) -> Tensor:
        return torch.scatter_reduce(x, d, i, s, reduce, include_self=include_self)

    return _scatter(call, input, dim, index, src)


# ---------------------------------------------------------------------- index_*: a vector of rows
def _rows(call: Call, input: Tensor, dim: Any, index: Tensor, source: Tensor | None) -> Dims | None:
    """`call(input, dim, index[, source])` with one row of `source` for each number in `index`."""
    if not isinstance(dim, int) or input.ndim == 0 or index.ndim != 1:
        return None
    if source is not None and source.ndim not in (0, input.ndim):
        return None
    d = normal_dim(dim, input.ndim)
    probe(call, input, d, index, *([] if source is None else [source]))
    labels: Labels = tuple(range(input.ndim))
    operands: list[Labels] = [labels, ("row",)]
    if source is not None:
        operands.append((*labels[:d], "row", *labels[d + 1 :]) if source.ndim else ())
    n, ones = input.shape[d], (1,) * input.ndim

    def check(x: Tensor, i: Tensor, *rest: Tensor) -> None:
        stand_in = torch.zeros((*ones[:d], n, *ones[d + 1 :]), dtype=x.dtype)
        row = [torch.zeros(ones if t.ndim else (), dtype=t.dtype) for t in rest]
        check_index(i, 0, n, lambda i: call(stand_in, d, i, *row))

    return Dims(operands, [labels], lambda x, *r: call(x, d, *r), whole=frozenset([d, "row"]), check=check)


@rule(*spellings("index_add"))
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Dims | None:
    """Rows are added."""
    return _rows(lambda x, d, i, s: torch.index_add(x, d, i, s, alpha=alpha), input, dim, index, source)


@rule(*spellings("index_copy"))
def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Dims | None:
    """Rows are replaced."""
    return _rows(torch.index_copy, input, dim, index, source)


@rule(*spellings("index_reduce"))
def index_reduce(
    input: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Dims | None:
    """Rows are reduced by prod, mean, amax or amin."""

    def call(x: Tensor, d: int, i: Tensor, s: Tensor) -> Tensor:
        return torch.index_reduce(x, d, i, s, reduce, include_self=include_self)

    return _rows(call, input, dim, index, source)


@rule(*spellings("index_fill"))
def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Dims | None:
    """Rows are filled with a number."""
    if isinstance(value, Tensor):
        return _rows(torch.index_fill, input, dim, index, value) if value.ndim == 0 else None
    return _rows(lambda x, d, i: torch.index_fill(x, d, i, value), input, dim, index, None)


# ---------------------------------------------------------------------- index_put: an index per dim
INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def _put_shape(input: Tensor, indices: Sequence[Tensor], first: int) -> tuple[int, ...]:
    index_shape = torch.broadcast_shapes(*(i.shape for i in indices))
    return *input.shape[:first], *index_shape, *input.shape[first + len(indices) :]


def can_put(input: Tensor, indices: Sequence[Any], values: Tensor, first: int) -> bool:
    """Whether `index_put` has a rule for a call, which then is also one that torch accepts."""
    if not indices or first + len(indices) > input.ndim or values.dtype is not input.dtype:
        return False
    if any(not isinstance(i, Tensor) or i.dtype not in INDEX_DTYPES for i in indices):
        return False
    try:
        shape = _put_shape(input, indices, first)
        return bool(torch.broadcast_shapes(values.shape, shape) == shape)
    except RuntimeError:
        return False


@rule(*spellings("index_put"))
def index_put(
    input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False, *, first: int = 0
) -> Dims | None:
    """`input[..., *indices] = values`, with `first` dims before those that are indexed."""
    taken = range(first, first + len(indices))
    if (first and accumulate) or not can_put(input, indices, values, first):
        return None  # torch says what is wrong with it
    slices = (slice(None),) * first
    index_labels, index_out = broadcast_labels([tuple(i.shape) for i in indices])
    labels: Labels = tuple(range(input.ndim))
    result: Labels = (*labels[:first], *(f"i{k}" for k in index_out), *labels[taken.stop :])
    shape = _put_shape(input, indices, first)
    lead = len(shape) - values.ndim
    written = tuple(result[lead + k] if n == shape[lead + k] else None for k, n in enumerate(values.shape))
    named: list[Labels] = [tuple(None if k is None else f"i{k}" for k in names) for names in index_labels]
    whole: frozenset[Label] = frozenset([*taken, *(f"i{k}" for k in index_out)])

    def local(x: Tensor, *rest: Tensor) -> Tensor:
        if not first:
            return torch.index_put(x, rest[:-1], rest[-1], accumulate)
        out = x.clone()
        at: Any = (*slices, *rest[:-1])
        out[at] = rest[-1]
        return out

    def check(x: Tensor, *rest: Tensor) -> None:
        for d, i in zip(taken, rest[:-1], strict=True):
            check_index(i, -x.shape[d], x.shape[d], torch.zeros(x.shape[d]).__getitem__)

    return Dims([labels, *named, written], [labels], local, whole=whole, check=check)


# ---------------------------------------------------------------------- in place
def _in_place(name: str) -> None:
    func = getattr(Tensor, f"{name}_")
    new = getattr(Tensor, name)

    @handler(func, name=f"{name}_")
    def answer(called: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, ShardTensor):
            return gather_call(func, (), (input, *args), kwargs)
        # of a copy: what the op keeps for its gradient must not be what is overwritten
        return input.copy_(new(input.clone(), *args, **kwargs))


for _name in (
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce", "index_fill", "index_put",
):  # fmt: skip
    _in_place(_name)
