"""roll, flip, repeat and their kind along the cut dim: each rank fetches the intervals that its result is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.partition import Interval
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import handler, rule, spellings
from dpzoo.shard.rules.parts import from_intervals, normal_dim, normal_dims, on_shards, whole_values
from dpzoo.shard.tensor import ShardTensor


def _roll_one(x: ShardTensor, shift: int, dim: int) -> Any:
    n = x.shape[dim]
    axis = x._spec.axis_of(dim)
    if axis is None or n == 0:
        return on_shards(x, lambda t: t.roll(shift, dim), whole_values(x._spec).cuts, whole_values(x._spec).sizes)
    shift %= n

    def want(o: Interval) -> list[Interval]:
        lo, hi = o[0] - shift, o[1] - shift
        return [(lo + n, min(n, hi + n)), (max(0, lo), hi)] if lo < 0 else [(lo, hi)]

    return from_intervals(x, dim, x._spec.sizes[axis], want, lambda t: t)


@handler(*spellings("roll"), name="roll")
def roll(func: Any, input: Any, shifts: Any, dims: Any = None) -> Any:
    """Shift along dims, around the end."""
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = () if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    if not isinstance(input, ShardTensor) or not input.ndim or (dims and len(dims) != len(shifts)):
        return gather_call(func, (), (input, shifts, dims), {})
    if not dims:
        return torch.roll(input.flatten(), shifts, (0,)).reshape(input.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        input = _roll_one(input, shift, normal_dim(dim, input.ndim))
    return input


@handler(*spellings("flip", "fliplr", "flipud"), name="flip")
def flip(func: Any, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """Reverse along dims."""
    name = func.__name__
    given: Any = {"fliplr": (1,), "flipud": (0,)}.get(
        name, dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims or kwargs.get("dims")
    )
    if not isinstance(input, ShardTensor) or (name != "flip" and input.ndim < 2):
        return gather_call(func, (), (input, *dims), kwargs)
    chosen = normal_dims((given,) if isinstance(given, int) else given, input.ndim) if given else ()
    if len(set(chosen)) != len(chosen):
        raise RuntimeError(f"dim {chosen[0]} appears multiple times in the list of dims")
    if not chosen:
        return input.clone()
    whole = whole_values(input._spec)
    plain = [d for d in chosen if whole.axis_of(d) is None]
    out: Any = on_shards(input, lambda t: t.flip(plain), whole.cuts, whole.sizes) if plain else input
    for d in [d for d in chosen if whole.axis_of(d) is not None]:
        out = _flip_one(out, d)
    return out


def _flip_one(x: ShardTensor, dim: int) -> ShardTensor:
    n = x.shape[dim]
    axis = x._spec.axis_of(dim)
    assert axis is not None
    return from_intervals(x, dim, x._spec.sizes[axis], lambda o: [(n - o[1], n - o[0])], lambda t: t.flip(dim))


@handler(*spellings("repeat", "tile"), name="repeat")
def repeat(func: Any, input: Any, *repeats: Any, **kwargs: Any) -> Any:
    """Copies side by side; along the cut dim each shard of the result is fetched."""
    given = repeats or (kwargs.get("repeats", kwargs.get("dims")),)
    times = tuple(given[0]) if len(given) == 1 and not isinstance(given[0], int) else tuple(given)
    if not isinstance(input, ShardTensor):
        return gather_call(func, (), (input, *repeats), kwargs)
    if func.__name__ == "tile":
        times = (1,) * (input.ndim - len(times)) + times
    if len(times) < input.ndim:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    while input.ndim < len(times):
        input = input.unsqueeze(0)
    whole = whole_values(input._spec)
    cut = [d for d in whole.cut_dims if times[d] != 1]
    local = [1 if d in cut else t for d, t in enumerate(times)]
    out: Any = (
        on_shards(input, lambda t: t.repeat(local), whole.cuts, whole.sizes) if any(t != 1 for t in local) else input
    )
    for d in cut:
        out = _repeat_one(out, d, times[d])
    return out if out is not input else input.clone()


def _repeat_one(x: ShardTensor, dim: int, times: int) -> ShardTensor:
    n = x.shape[dim]
    axis = x._spec.axis_of(dim)
    assert axis is not None

    def want(o: Interval) -> list[Interval]:
        copies = range(o[0] // n, (o[1] - 1) // n + 1)
        return [(max(o[0], k * n) - k * n, min(o[1], (k + 1) * n) - k * n) for k in copies]

    return from_intervals(x, dim, tuple(s * times for s in x._spec.sizes[axis]), want, lambda t: t)


@handler(*spellings("repeat_interleave"), name="repeat_interleave")
def repeat_interleave(
    func: Any, input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Each row several times: local for a constant count."""
    if not isinstance(input, ShardTensor) or not isinstance(repeats, int) or repeats < 0:
        return gather_call(
            func,
            (),
            (input, *([] if repeats is None else [repeats])),
            {"dim": dim, "output_size": output_size} if repeats is not None else {},
        )
    if dim is None:
        return repeat_interleave(func, input.flatten(), repeats, 0)
    d, whole = normal_dim(dim, input.ndim), whole_values(input._spec)
    sizes = [tuple(n * repeats for n in s) if c == d else s for c, s in zip(whole.cuts, whole.sizes, strict=True)]
    return on_shards(input, lambda t: t.repeat_interleave(repeats, d), whole.cuts, sizes)


@rule(*spellings("rot90"))
def rot90(input: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Dims | None:
    """A turn in the plane of two dims, both whole."""
    if len(dims) != 2 or input.ndim < 2:
        return None
    a, b = (normal_dim(d, input.ndim) for d in dims)
    labels: Labels = tuple(range(input.ndim))
    out = list(labels)
    if k % 2:
        out[a], out[b] = out[b], out[a]
    return Dims([labels], [tuple(out)], lambda t: torch.rot90(t, k, (a, b)), whole=frozenset([a, b]))


def _triangle_op(name: str) -> None:
    @handler(*spellings(name), name=name)
    def answer(func: Any, input: Any, diagonal: int = 0, *, out: Any = None) -> Any:
        if not isinstance(input, ShardTensor) or input.ndim < 2 or out is not None:
            return gather_call(func, (), (input, diagonal), {} if out is None else {"out": out})
        whole = whole_values(input._spec)
        row, column = whole.offsets()[-2:]
        shifted = diagonal + row - column
        return on_shards(input, lambda t: getattr(torch, name)(t, shifted), whole.cuts, whole.sizes)

    @handler(getattr(torch.Tensor, f"{name}_"), name=f"{name}_")
    def inplace(func: Any, input: Any, diagonal: int = 0) -> Any:
        return input.copy_(getattr(torch, name)(input, diagonal))


_triangle_op("tril")
_triangle_op("triu")
