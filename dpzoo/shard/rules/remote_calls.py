"""`x[i]`, index_select, gather, index_add, scatter_add and relatives along a *cut* dim: only what is asked travels.

`install` puts these answers before those that the functions have; what is declined here (an indexed dim that is not
cut, odd layouts, tracing) goes on to them. Sums over rows that are cut into a tensor that is not (`segment sums`) are
each rank's own sum, added up at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, RULES, rule, spellings
from dpzoo.shard.rules.parts import check_index, cut_axes, normal_dim, whole_values
from dpzoo.shard.rules.precedence import put_before
from dpzoo.shard.rules.remote_layout import DeclinedError, axis_that_cuts
from dpzoo.shard.rules.remote_rows import Complaint, Elements, take_rows, write_rows
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing


def _complaint(op: Callable[..., Any], input: Tensor, dim: int) -> Complaint:
    """Raise what `op` raises for an index that does not exist, on a stand-in of the same length along `dim`."""
    n, shape = input.shape[dim], [s if d == dim else 1 for d, s in enumerate(input.shape)]

    def raise_for(value: int) -> None:
        op(torch.zeros(shape), dim, torch.tensor([value]))
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {n}")

    return raise_for


def _writes_one_row(op: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, index: op(x, dim, index, x.narrow(dim, 0, 1) if x.shape[dim] else x)


def _picks_one(x: Tensor, dim: int, index: Tensor) -> Tensor:
    return x.gather(dim, index.view([-1 if d == dim else 1 for d in range(x.ndim)]))


def _rows(input: Tensor, dim: int, index: Tensor) -> int:
    """The dim counted from the front, for functions of whole rows."""
    if index.ndim != 1:
        raise DeclinedError
    return normal_dim(dim, input.ndim)


def _elements(op: Callable[..., Any], input: Tensor, dim: int, index: Tensor, *args: Any, **kwargs: Any) -> Elements:
    d = normal_dim(dim, input.ndim)
    axis_that_cuts(input, d)
    probe(op, input, d, index, *args, **kwargs)
    return Elements.of(input, d, index, _complaint(_picks_one, input, d))


# ---------------------------------------------------------------------- reading
def index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows from their owners."""
    d = _rows(input, dim, index)
    axis_that_cuts(input, d)
    probe(torch.index_select, input, d, index)
    return take_rows(input, d, index, _complaint(torch.index_select, input, d))


def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Elements from their owners."""
    if sparse_grad:
        raise DeclinedError
    return _elements(torch.gather, input, dim, index).read()


def _take(x: Tensor, dim: int, *indices: Tensor) -> Any:
    """`x[..., i, ...]` with one index tensor; it may count from the end."""
    if len(indices) != 1:
        raise DeclinedError
    axis_that_cuts(x, dim)
    n, index = x.shape[dim], indices[0]

    def complain(value: int) -> None:
        raise IndexError(f"index {value} is out of bounds for dimension {dim} with size {n}")

    return take_rows(x, dim, torch.where(index < 0, index + n, index), complain)


# ---------------------------------------------------------------------- writing
def index_add(input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: Any = 1) -> Tensor:
    """Rows are sent to the owners, who add them."""
    d = _rows(input, dim, index)
    if source.ndim != input.ndim:
        raise DeclinedError
    if _is_whole(input, d) and _is_cut(source, d):
        probe(torch.index_add, input, d, index, source, alpha=alpha)
        parts = RULE_OF["index_add of parts"](torch.index_add, (ShardTensor,), (input.shape[d], d, index, source), {})
        return input + (parts if alpha == 1 else parts * alpha)
    axis_that_cuts(input, d)
    probe(torch.index_add, input, d, index, source, alpha=alpha)

    def write(x: Tensor, dim: int, rows: Tensor, arrived: Tensor) -> Tensor:
        return x.index_add(dim, rows, arrived, alpha=alpha)

    return write_rows(input, d, index, source, write, _complaint(_writes_one_row(torch.index_add), input, d))


def index_copy(input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Rows are sent to the owners, who put them there."""
    d = _rows(input, dim, index)
    axis_that_cuts(input, d)
    if source.ndim != input.ndim:
        raise DeclinedError
    probe(torch.index_copy, input, d, index, source)
    return write_rows(
        input, d, index, source, torch.index_copy, _complaint(_writes_one_row(torch.index_copy), input, d)
    )


def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Elements are sent to the owners, who add them."""
    d = normal_dim(dim, input.ndim)
    others_fit = index.ndim == input.ndim and all(index.shape[e] == input.shape[e] for e in range(input.ndim) if e != d)
    if others_fit and index.shape == src.shape and _is_whole(input, d) and (_is_cut(index, d) or _is_cut(src, d)):
        probe(torch.scatter_add, input, d, index, src)
        return input + RULE_OF["scatter_add of parts"](
            torch.scatter_add, (ShardTensor,), (input.shape[d], d, index, src), {}
        )
    to = _elements(torch.scatter_add, input, dim, index, src)
    arrived = to.arrived(src)
    return to.write(lambda x, rows: x.index_add(0, rows, arrived))


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Elements are sent to the owners, who reduce them."""
    to = _elements(torch.scatter_reduce, input, dim, index, src, reduce, include_self=include_self)
    arrived = to.arrived(src)
    return to.write(lambda x, rows: x.scatter_reduce(0, rows, arrived, reduce, include_self=include_self))


def scatter(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Tensor:
    """Elements are sent to the owners, who put them there."""
    src = value if src is None else src
    to = _elements(torch.scatter, input, dim, index, src)
    arrived = to.arrived(src) if isinstance(src, Tensor) else src
    return to.write(lambda x, rows: x.scatter(0, rows, arrived))


# ---------------------------------------------------------------------- segment sums
def _is_cut(t: Tensor, dim: int) -> bool:
    return isinstance(t, ShardTensor) and bool(cut_axes(whole_values(t._spec), (dim,)))


def _is_whole(t: Tensor, dim: int) -> bool:
    return not _is_cut(t, dim) and not is_tracing()


def _summed(name: str, index_labels: Callable[[int, int], Labels], local: Callable[..., Tensor]) -> None:
    @rule(name=name)
    def plan(n: int, dim: int, index: Tensor, source: Tensor) -> Dims:
        labels: Labels = tuple("row" if d == dim else d for d in range(source.ndim))
        out: Labels = tuple("segment" if d == dim else d for d in range(source.ndim))

        def add(i: Tensor, s: Tensor) -> Tensor:
            return local(s.new_zeros([n if d == dim else size for d, size in enumerate(s.shape)]), dim, i, s)

        return Dims(
            [index_labels(source.ndim, dim), labels],
            [out],
            add,
            sums=frozenset(["row"]),
            whole=frozenset(["segment"]),
            check=lambda i, _: check_index(i, 0, n, lambda i: torch.gather(torch.zeros(n), 0, i.flatten())),
        )


_summed("index_add of parts", lambda n, d: ("row",), torch.index_add)
_summed("scatter_add of parts", lambda n, d: tuple("row" if e == d else e for e in range(n)), torch.scatter_add)


# ---------------------------------------------------------------------- registration
_ANSWERS: tuple[Callable[..., Tensor], ...] = (
    index_select,
    gather,
    index_add,
    index_copy,
    scatter_add,
    scatter_reduce,
    scatter,
)
_READS = (index_select, gather)


def install() -> None:
    """Put these answers before those of all rules; called once, after all rules are registered."""
    for answer in _ANSWERS:
        name = answer.__name__
        put_before(f"{name} along a cut dim", spellings(name), answer)
        if answer not in _READS:
            put_before(f"{name}_ along a cut dim", (getattr(Tensor, f"{name}_"),), _in_place(answer))
    earlier = RULE_OF["take"]

    def take(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return _take(*args)
        except DeclinedError:
            return earlier(func, types, args, kwargs)

    RULES["take along a cut dim"] = ()
    RULE_OF["take"] = take


def _in_place(answer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def write(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(input, ShardTensor):
            raise DeclinedError
        # of a copy: what the op keeps for its gradient must not be what is overwritten
        return input.copy_(answer(input.clone(), *args, **kwargs))

    write.__signature__ = inspect.signature(answer)  # type: ignore[attr-defined]
    return write
