"""Views below autograd of parts of a dim: slices, rows, all parts at once, and what goes back into the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpzoo.shard.dispatch_door import on
from dpzoo.shard.moved_view import alias_of, counted
from dpzoo.shard.partition import Sizes, cut_at, local_range, starts
from dpzoo.shard.rules.parts import normal_dim
from dpzoo.shard.rules.view_plan import VIEWS, ViewPlan, plan_of, renumber, run_view, view, without_cut
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap

aten = torch.ops.aten


# ---------------------------------------------------------------------- parts of a dim
_HINTS: dict[Any, Sizes] = {}  # how a dim was cut before it was sliced: lets the gradient come back in that layout


def remember(spec: ShardTensorSpec, dim: int, part: Any) -> None:
    """Note the sizes of a cut dim that a part is taken of."""
    axis = spec.axis_of(dim)
    if axis is not None:
        if len(_HINTS) > 4096:
            _HINTS.clear()
        _HINTS[spec.layout, axis, tuple(spec.shape), dim, part] = spec.sizes[axis]


def recall(layout: Any, axis: int, shape: Sequence[int], dim: int, part: Any) -> Sizes | None:
    """The sizes noted by `remember`."""
    return _HINTS.get((layout, axis, tuple(shape), dim, part))


def slice_bounds(n: int, start: int | None, end: int | None, step: int) -> tuple[int, int, int]:
    """Python slice semantics, as (start, end, step) with 0 <= start <= end <= n."""
    lo, hi, step = slice(start, None if end is None or end > n else end, step).indices(n)
    return lo, max(lo, hi), step


@view(aten.slice.Tensor)
def _slice(
    op: Any, spec: ShardTensorSpec, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ViewPlan:
    dim %= spec.ndim
    lo, hi, step = slice_bounds(spec.shape[dim], start, end, step)
    axis = spec.axis_of(dim)
    if axis is None:
        return ViewPlan(spec, lambda t: aten.slice.Tensor(t, dim, lo, hi, step), spec.cuts, spec.sizes)
    own = (spec.local_start(axis), spec.local_start(axis) + spec.local_shape[dim])
    here = local_range(own, lo, hi, step)
    stop = here.start + max(0, len(here) - 1) * step + (1 if len(here) else 0)
    sizes = list(spec.sizes)
    sizes[axis] = cut_at(spec.sizes[axis], lo, hi, step)
    remember(spec, dim, (lo, hi, step, sizes[axis]))
    first = min(here.start, spec.local_shape[dim])
    return ViewPlan(spec, lambda t: aten.slice.Tensor(t, dim, first, max(first, stop), step), spec.cuts, sizes)


@on(aten.slice_backward.default)
def _slice_backward(
    op: Any, g: ShardTensor, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> ShardTensor:
    spec = g._spec
    dim %= spec.ndim
    lo, hi, step = slice_bounds(shape[dim], start, end, step)
    axis = spec.axis_of(dim)
    sizes = list(spec.sizes)
    if axis is None:
        local = aten.slice_backward.default(
            g._local_tensor, _swap(spec.local_shape, dim, shape[dim]), dim, lo, hi, step
        )
        return wrap(local, spec.like(shape=shape, sizes=sizes).for_local(local))
    known = recall(spec.layout, axis, shape, dim, (lo, hi, step, spec.sizes[axis]))
    sizes[axis] = known or _grown(spec.sizes[axis], shape[dim], lo, step)
    out = spec.like(shape=shape, sizes=sizes)
    here = local_range((out.local_start(axis), out.local_start(axis) + out.local_shape[dim]), lo, hi, step)
    local = g._local_tensor.new_zeros(out.local_shape)
    if len(here):
        aten.slice.Tensor(local, dim, here.start, here.stop, step).copy_(g._local_tensor)
    return wrap(local, out.for_local(local))


def _grown(sizes: Sizes, total: int, lo: int, step: int) -> Sizes:
    """Sizes of a dim of which `sizes` were kept: the rows left out go to the shard before them."""
    borders = [min(total, lo + step * b) if b else 0 for b in starts(sizes)[1:-1]]
    borders = [0, *borders, total]
    return tuple(b - a for a, b in zip(borders, borders[1:], strict=False))


def _swap(shape: Sequence[int], dim: int, n: int) -> list[int]:
    return [*shape[:dim], n, *shape[dim + 1 :]]


@on(aten.select.int)
def _select(op: Any, x: ShardTensor, dim: int, index: int) -> ShardTensor:
    spec = x._spec
    dim = normal_dim(dim, spec.ndim)
    n = spec.shape[dim] if spec.ndim else 0
    if not -n <= index < n:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {list(spec.shape)} at dimension {dim}"
        )
    index %= n
    axis = spec.axis_of(dim)
    if axis is None:
        return run_view(_SELECT, x, dim, index)
    remember(spec, dim, ("select", index))
    # The row is on one rank and the others learn it: a slice, whose dim of size 1 is then squeezed.
    return run_view(aten.squeeze.dims, run_view(aten.slice.Tensor, x, dim, index, index + 1), (dim,))


_SELECT = aten.select.int


def _select_plan(op: Any, spec: ShardTensorSpec, dim: int, index: int) -> ViewPlan:
    return ViewPlan(spec, lambda t: t.select(dim, index), renumber(spec, lambda c: c - (c > dim)), spec.sizes)


VIEWS[_SELECT] = _select_plan


@on(aten.select_backward.default)
def _select_backward(op: Any, g: ShardTensor, shape: Sequence[int], dim: int, index: int) -> ShardTensor:
    spec = g._spec
    dim %= len(shape)
    index %= shape[dim]
    cuts, sizes = list(renumber(spec, lambda c: c + (c >= dim))), list(spec.sizes)
    for axis, cut in enumerate(cuts):
        known = recall(spec.layout, axis, shape, dim, ("select", index)) if cut == REPLICATED else None
        if known is not None and dim not in cuts:
            cuts[axis], sizes[axis] = dim, known
    out = spec.like(cuts=cuts, sizes=sizes, shape=shape)
    local = g._local_tensor.new_zeros(out.local_shape)
    start = out.offsets()[dim]
    if start <= index < start + out.local_shape[dim]:
        local.select(dim, index - start).copy_(g._local_tensor)
    return wrap(local, out)


# ---------------------------------------------------------------------- all parts of a dim
@on(aten.split.Tensor)
def _split(op: Any, x: ShardTensor, size: int, dim: int = 0) -> list[ShardTensor]:
    n = x.shape[dim]
    return _split_sizes(op, x, [min(size, n - i) for i in range(0, n, size)] if size and n else [0], dim)


@on(aten.split_with_sizes.default)
def _split_sizes(op: Any, x: ShardTensor, sizes: Sequence[int], dim: int = 0) -> list[ShardTensor]:
    at = starts(tuple(sizes))
    if at[-1] != x.shape[dim] or min(sizes, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {x.shape[dim]} (input tensor's size at dimension "
            f"{dim}), but got split_sizes={list(sizes)}"
        )
    return [run_view(aten.slice.Tensor, x, dim, lo, hi) for lo, hi in zip(at, at[1:], strict=False)]


@on(aten.unbind.int)
def _unbind(op: Any, x: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    row = plan_of((id(op), x._spec, dim), lambda: _row_plan(op, x._spec, dim))
    if row.source is not x._spec:
        x = ViewPlan(row.source, lambda t: t, row.source.cuts, row.source.sizes).run(x)
    rows = [row.finish(t, x._spec) for t in counted(x._local_tensor.unbind, dim)]
    return tuple(rows if x.__class__ is ShardTensor else [alias_of(x, made) for made in rows])


def _row_plan(op: Any, spec: ShardTensorSpec, dim: int) -> ViewPlan:
    dim = normal_dim(dim, spec.ndim)
    return _select_plan(op, without_cut(spec, dim), dim, 0)
