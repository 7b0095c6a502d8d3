"""Adaptive pooling on cut dims: output j averages (or maximises) input [floor(j n / m), ceil((j + 1) n / m)).

Both are separable. An average is a sum, so a rank adds up the rows it has and only partial sums travel, never rows.
Dims are pooled from the last to the first: among equal values the first in memory order then wins, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.local_bridges import fetch, send_home, sum_over
from dpzoo.shard.partition import Interval, Sizes, own_intervals, starts
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import fill_empty, global_of, on_shards, whole_values
from dpzoo.shard.spec import REPLICATED
from dpzoo.shard.tensor import ShardTensor


def _bounds(n: int, m: int, a: int, b: int) -> Interval:
    """Input rows of outputs a..b-1 of m."""
    return (a * n // m, -(-b * n // m)) if a < b else (0, 0)


def _touched(n: int, m: int, own: Interval) -> Interval:
    """The outputs to which the input rows `own` contribute."""
    if own[0] == own[1] or m == 0:
        return (0, 0)
    return own[0] * m // n, -(-own[1] * m // n)


def _out_sizes(sizes: Sizes, m: int) -> Sizes:
    """How the output is cut: its borders lie where those of the input do."""
    n = sum(sizes)
    borders = [0, *[min(m, round(b * m / n)) if n else 0 for b in starts(sizes)[1:-1]], m]
    return tuple(b - a for a, b in zip(borders, borders[1:], strict=False))


def _mean_dim(x: ShardTensor, dim: int, m: int) -> ShardTensor:
    """Average along one cut dim; a result of fewer rows than ranks is held whole by all of them."""
    spec = whole_values(x._spec)
    axis = spec.cut_dims[dim]
    sizes, group, n = spec.sizes[axis], spec.layout.groups[axis], x.shape[dim]
    own = own_intervals(sizes)
    wanted = tuple(_touched(n, m, o) for o in own)
    me = spec.layout.coords[axis]
    parts = _partial_means(to_shard(x, spec), dim, own[me], wanted[me], n, m)
    cuts, out = list(spec.cuts), list(spec.sizes)
    if m < len(sizes):
        (lo, hi), ends = wanted[me], [0, 0] * (x.ndim - dim)
        ends[-2:] = [lo, m - hi]
        cuts[axis], out[axis] = REPLICATED, ()
        return global_of(sum_over(F.pad(parts, ends), (group,)), spec, cuts, out)
    out[axis] = _out_sizes(sizes, m)
    rows = tuple((w,) if w[0] < w[1] else () for w in wanted)
    return global_of(send_home(parts, dim, out[axis], rows, group), spec, cuts, out)


def _partial_means(t: Tensor, dim: int, own: Interval, outputs: Interval, n: int, m: int) -> Tensor:
    """What the rows of this rank add to the averages they belong to."""
    rows = []
    for j in range(*outputs):
        lo, hi = _bounds(n, m, j, j + 1)
        a, b = max(lo, own[0]), min(hi, own[1])
        rows.append(t.narrow(dim, a - own[0], b - a).sum(dim, keepdim=True) / (hi - lo))
    return torch.cat(rows, dim) if rows else t.narrow(dim, 0, 0)


def _max_dim(x: ShardTensor, dim: int, m: int) -> ShardTensor:
    """Maximum along one cut dim, on the rows that a rank's outputs see."""
    if m == 1:
        return torch.max(x, dim, keepdim=True)[0]  # type: ignore[return-value]
    spec = whole_values(x._spec)
    axis, n = spec.cut_dims[dim], x.shape[dim]
    out = list(spec.sizes)
    out[axis] = _out_sizes(spec.sizes[axis], m)
    spans = [_bounds(n, m, *o) for o in own_intervals(out[axis])]
    wanted = tuple((s,) if s[0] < s[1] else () for s in spans)
    local = fetch(to_shard(x, spec), dim, spec.sizes[axis], wanted, spec.layout.groups[axis])
    me = spec.layout.coords[axis]
    rows = []
    for j in range(*own_intervals(out[axis])[me]):
        lo, hi = _bounds(n, m, j, j + 1)
        rows.append(local.narrow(dim, lo - spans[me][0], hi - lo).max(dim, keepdim=True)[0])
    return global_of(torch.cat(rows, dim) if rows else local.narrow(dim, 0, 0), spec, spec.cuts, out)


def _uncut_dim(x: ShardTensor, func: Any, dims: int, dim: int, m: int) -> ShardTensor:
    """Pool an uncut dim of the shards by torch; the others keep their size."""
    spec = whole_values(x._spec)

    def local(t: Tensor) -> Tensor:
        missing = [d for d in range(t.ndim) if t.shape[d] == 0]
        full = fill_empty(t, missing, 0)
        out = func(full, [m if d == dim else full.shape[d] for d in range(t.ndim - dims, t.ndim)])
        for d in missing:
            out = out.narrow(d, 0, 0)
        return out

    return on_shards(x, local, spec.cuts, spec.sizes)


def _adaptive(dims: int, kind: str) -> Callable[..., Any]:
    func: Any = getattr(F, f"adaptive_{kind}_pool{dims}d")

    def answer(called: Any, input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        indexed = return_indices or called in _INDEXED[dims]
        if not isinstance(input, ShardTensor):
            return gather_call(func, (), (input, output_size), {"return_indices": True} if indexed else {})
        shape = output_shape(func, input, output_size)
        if indexed:
            return _with_indices(input, _INDEXED[dims][0], dims, shape, output_size)
        x: Any = input.float() if kind == "avg" and input.dtype.itemsize == 2 else input
        return _pooled(x, func, dims, shape, kind).to(input.dtype)

    return answer


def _pooled(x: Any, func: Any, dims: int, shape: Sequence[int], kind: str) -> Any:
    first = x.ndim - dims
    spec = whole_values(x._spec)
    if not any(d >= first for d in spec.cut_dims) and all(spec.shape[:first]):
        return on_shards(x, lambda t: _run_whole(t, func, shape[first:], first), spec.cuts, spec.sizes)
    for d in reversed(range(first, x.ndim)):
        if d not in whole_values(x._spec).cut_dims:
            x = _uncut_dim(x, func, dims, d, shape[d])
        else:
            x = (_mean_dim if kind == "avg" else _max_dim)(x, d, shape[d])
    return x


def _run_whole(t: Tensor, func: Any, size: Sequence[int], first: int) -> Tensor:
    missing = [d for d in range(first) if t.shape[d] == 0]
    out = func(fill_empty(t, missing, 0), list(size))
    for d in missing:
        out = out.narrow(d, 0, 0)
    return out


# ---------------------------------------------------------------------- maximum and where it is
_INDEXED: dict[int, tuple[Any, ...]] = {
    n: tuple(
        f
        for f in (getattr(F, f"adaptive_max_pool{n}d_with_indices"), getattr(torch, f"adaptive_max_pool{n}d", None))
        if f is not None
    )
    for n in (1, 2, 3)
}


def _with_indices(x: ShardTensor, func: Any, dims: int, shape: Sequence[int], output_size: Any) -> Any:
    """Maxima and their flat indices in the global plane; each output row of a cut dim is one call of torch's op."""
    first, spec = x.ndim - dims, whole_values(x._spec)
    cut = {d: a for d, a in spec.cut_dims.items() if d >= first}
    if any(shape[d] < len(spec.sizes[a]) for d, a in cut.items()) or not x.numel():
        return gather_call(func, (), (x, output_size), {})  # fewer rows than ranks: some would hold all the rows
    local, sizes, rows, starts_at = to_shard(x, spec), list(spec.sizes), {}, {}
    for d, axis in cut.items():
        n, m, me = x.shape[d], shape[d], spec.layout.coords[axis]
        sizes[axis] = _out_sizes(spec.sizes[axis], m)
        outputs = own_intervals(sizes[axis])
        spans = [_bounds(n, m, *o) for o in outputs]
        wanted = tuple((s,) if s[0] < s[1] else () for s in spans)
        local = fetch(local, d, spec.sizes[axis], wanted, spec.layout.groups[axis])
        bins = [_bounds(n, m, j, j + 1) for j in range(*outputs[me])]
        rows[d], starts_at[d] = [(lo - spans[me][0], hi - spans[me][0]) for lo, hi in bins], spans[me][0]
    missing = [d for d in range(x.ndim) if local.shape[d] == 0]
    local = fill_empty(local, missing, 0)
    values, index = _maxima(
        local, func, first, [1 if d in cut else shape[d] for d in range(first, x.ndim)], rows, x, starts_at
    )
    for d in missing:
        values, index = values.narrow(d, 0, 0), index.narrow(d, 0, 0)
    return global_of(values, spec, spec.cuts, sizes), global_of(index, spec, spec.cuts, sizes)


def _maxima(
    t: Tensor,
    func: Any,
    first: int,
    size: Sequence[int],
    rows: dict[int, list[Interval]],
    x: ShardTensor,
    starts_at: dict[int, int],
) -> tuple[Tensor, Tensor]:
    """Pool `t`, whose rows of dim d begin at global row `starts_at[d]`, into one output per interval of `rows[d]`."""
    if not rows:
        values, index = func(t, list(size))
        return values, _in_global_plane(index, t.shape, x.shape, first, starts_at)
    (d, bins), *rest = rows.items()
    parts = [
        _maxima(t.narrow(d, lo, hi - lo), func, first, size, dict(rest), x, {**starts_at, d: starts_at[d] + lo})
        for lo, hi in bins or [(0, 1)]
    ]
    values, index = (torch.cat(p, d) for p in zip(*parts, strict=True))
    return values, index


def _in_global_plane(
    index: Tensor, shape: Sequence[int], whole: Sequence[int], first: int, starts_at: dict[int, int]
) -> Tensor:
    """Flat indices into a part of the spatial plane, as flat indices into all of it."""
    flat, step = torch.zeros_like(index), 1
    for d in reversed(range(first, len(whole))):
        flat = flat + (index % shape[d] + starts_at.get(d, 0)) * step
        index, step = index // shape[d], step * whole[d]
    return flat


for _n in (1, 2, 3):
    for _kind in ("avg", "max"):
        _name = f"adaptive_{_kind}_pool{_n}d"
        _funcs = dict.fromkeys((getattr(F, _name), getattr(torch, _name, getattr(F, _name))))
        handler(*_funcs, name=_name)(_adaptive(_n, _kind))
    handler(_INDEXED[_n][0], name=f"adaptive_max_pool{_n}d_with_indices")(_adaptive(_n, "max"))
