"""Views below autograd: the local view of a shard, and where the cut dims end up.

A plan is made once per (op, layout, arguments). A view that would tear a cut dim first moves borders (`source`); the
function-door rules in `reshape.py` do that move above autograd, so that here it happens only inside formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.dispatch_door import on, spec_in
from dpzoo.shard.moved_view import alias_of, counted, moved_view
from dpzoo.shard.partition import Sizes, align_sizes, cut_at, even_sizes, local_range, starts
from dpzoo.shard.rules.parts import normal_dim
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec, same_order
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move

aten = torch.ops.aten


@dataclass
class ViewPlan:
    """`source`: the layout the input must have; `local`: the local view; `cuts`, `sizes`: the layout of the output."""

    source: ShardTensorSpec
    local: Callable[[Tensor], Tensor]
    cuts: Sequence[Cut]
    sizes: Sequence[Sizes]
    spec: ShardTensorSpec | None = None
    stride: tuple[int, ...] | None = None  # of the global view; this rank's shard alone may not tell (when it is empty)

    def run(self, x: ShardTensor) -> ShardTensor:
        """Apply to a tensor (no autograd)."""
        if x._spec is self.source:
            return alias_of(x, self.finish(counted(self.local, x._local_tensor), x._spec))
        out = self.finish(self._part(x), x._spec)
        return moved_view(out, x, lambda: self._part(x), lambda part: self._home(x, part))

    def _part(self, x: ShardTensor) -> Tensor:
        return self.local(move(x._local_tensor, x._spec, self.source))

    def _home(self, x: ShardTensor, part: Tensor) -> None:
        whole = move(x._local_tensor, x._spec, self.source)
        self.local(whole).copy_(part)
        counted(x._local_tensor.copy_, move(whole, self.source, x._spec))

    def finish(self, out: Tensor, like: ShardTensorSpec) -> ShardTensor:
        """Wrap a local view."""
        spec = self.spec
        if spec is None or spec.dtype is not out.dtype:
            spec = spec_in(out, like.layout, tuple(self.cuts), tuple(self.sizes))
            if self.stride is not None and same_order(self.stride, out):
                spec = spec.like(stride=self.stride)
            self.spec = spec
        return wrap(out, spec)


_PLANS: dict[Any, ViewPlan] = {}
VIEWS: dict[Any, Callable[..., ViewPlan]] = {}


def view(*ops: Any) -> Callable[[Callable[..., ViewPlan]], Callable[..., ViewPlan]]:
    """Register `planner(op, spec, *args)` for aten views of one tensor."""

    def register(planner: Callable[..., ViewPlan]) -> Callable[..., ViewPlan]:
        for op in ops:
            VIEWS[op] = planner
        on(*ops)(_run_view)
        return planner

    return register


def _run_view(op: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        key = (op, x._spec, args, tuple(kwargs.items())) if kwargs else (op, x._spec, args)
        plan = _PLANS.get(key)
    except TypeError:  # lists
        args = tuple(tuple(a) if isinstance(a, list) else a for a in args)
        key = (op, x._spec, args, tuple(kwargs.items())) if kwargs else (op, x._spec, args)
        plan = _PLANS.get(key)
    if plan is None:
        plan = _plan_of(key, lambda: _planned(op, x._spec, args, kwargs))
    return plan.run(x)


def _planned(op: Any, spec: ShardTensorSpec, args: Any, kwargs: dict[str, Any]) -> ViewPlan:
    op(torch.empty(spec.shape, dtype=spec.dtype, device="meta"), *args, **kwargs)  # raises what torch raises
    plan = VIEWS[op](op, spec, *args, **kwargs)
    if plan.source is spec:
        try:
            meta = op(torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta"), *args, **kwargs)
        except RuntimeError:  # not a view of the global strides
            return plan
        plan.stride = meta.stride()
    return plan


def _plan_of(key: Any, make: Callable[[], ViewPlan]) -> ViewPlan:
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) > 16384:
            _PLANS.clear()
        plan = _PLANS[key] = make()
    return plan


def without_cut(spec: ShardTensorSpec, *dims: int) -> ShardTensorSpec:
    """The layout with these dims whole."""
    keep = [not (isinstance(c, int) and c in dims) for c in spec.cuts]
    return spec.like(
        cuts=tuple(c if k else REPLICATED for c, k in zip(spec.cuts, keep, strict=True)),
        sizes=tuple(s if k else () for s, k in zip(spec.sizes, keep, strict=True)),
    )


def _renumber(spec: ShardTensorSpec, new: Callable[[int], int]) -> tuple[Cut, ...]:
    return tuple(new(c) if isinstance(c, int) and c >= 0 else c for c in spec.cuts)


# ---------------------------------------------------------------------- same shape
@view(
    aten.alias.default,
    aten.detach.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.view_as_real.default,
    aten.lift_fresh.default,
)
def _same(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    return ViewPlan(spec, op, spec.cuts, spec.sizes)


@view(aten.view_as_complex.default)
def _as_complex(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    source = without_cut(spec, spec.ndim - 1)
    return ViewPlan(source, lambda t: op(_tidy(t)), source.cuts, source.sizes)


def _tidy(t: Tensor) -> Tensor:
    """An empty shard may have any strides, where the op insists on those of the other ranks."""
    return t if t.numel() else t.new_empty(t.shape)


@view(aten.view.dtype)
def _view_dtype(op: Any, spec: ShardTensorSpec, dtype: torch.dtype) -> ViewPlan:
    source = spec if dtype.itemsize == spec.dtype.itemsize else without_cut(spec, spec.ndim - 1)
    return ViewPlan(source, lambda t: _tidy(t).view(dtype), source.cuts, source.sizes)


# ---------------------------------------------------------------------- renumbered dims
@view(aten.permute.default)
def _permute(op: Any, spec: ShardTensorSpec, dims: Sequence[int]) -> ViewPlan:
    order = [d % spec.ndim for d in dims]
    return ViewPlan(spec, lambda t: t.permute(order), _renumber(spec, order.index), spec.sizes)


@view(aten.transpose.int)
def _transpose(op: Any, spec: ShardTensorSpec, a: int, b: int) -> ViewPlan:
    order = list(range(spec.ndim))
    if order:
        a, b = a % spec.ndim, b % spec.ndim
        order[a], order[b] = order[b], order[a]
    return _permute(op, spec, order)


@view(aten.t.default)
def _t(op: Any, spec: ShardTensorSpec) -> ViewPlan:
    if spec.ndim > 2:
        raise RuntimeError(f"t() expects a tensor with <= 2 dimensions, but self is {spec.ndim}D")
    return _permute(op, spec, list(range(spec.ndim))[::-1])


@view(aten.unsqueeze.default)
def _unsqueeze(op: Any, spec: ShardTensorSpec, dim: int) -> ViewPlan:
    dim %= spec.ndim + 1
    return ViewPlan(spec, lambda t: t.unsqueeze(dim), _renumber(spec, lambda c: c + (c >= dim)), spec.sizes)


@view(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: Any, spec: ShardTensorSpec, dims: Any = None) -> ViewPlan:
    asked = range(spec.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = sorted({d % max(spec.ndim, 1) for d in asked if spec.ndim and spec.shape[d] == 1})
    source = without_cut(spec, *gone)
    return ViewPlan(
        source,
        lambda t: aten.squeeze.dims(t, gone),
        _renumber(source, lambda c: c - sum(g < c for g in gone)),
        source.sizes,
    )


@view(aten.expand.default)
def _expand(op: Any, spec: ShardTensorSpec, size: Sequence[int], *, implicit: bool = False) -> ViewPlan:
    lead = len(size) - spec.ndim
    full = [spec.shape[i - lead] if n == -1 else n for i, n in enumerate(size)]
    grown = [d for d in range(spec.ndim) if spec.shape[d] == 1 and full[d + lead] != 1]
    source = without_cut(spec, *grown)
    local = list(full)
    for d in source.cut_dims:
        if full[d + lead] != spec.shape[d]:
            raise RuntimeError(
                f"The expanded size of the tensor ({full[d + lead]}) must match the existing size ({spec.shape[d]}) at "
                f"non-singleton dimension {d + lead}.  Target sizes: {list(size)}.  Tensor sizes: {list(spec.shape)}"
            )
        local[d + lead] = source.local_shape[d]
    return ViewPlan(source, lambda t: t.expand(local), _renumber(source, lambda c: c + lead), source.sizes)


@view(aten.unfold.default)
def _unfold(op: Any, spec: ShardTensorSpec, dim: int, size: int, step: int) -> ViewPlan:
    source = without_cut(spec, dim % max(spec.ndim, 1))
    return ViewPlan(source, lambda t: t.unfold(dim, size, step), source.cuts, source.sizes)


@on(aten.unfold_backward.default)
def _unfold_backward(op: Any, g: ShardTensor, shape: Sequence[int], dim: int, size: int, step: int) -> ShardTensor:
    dim %= max(len(shape), 1)
    source = without_cut(_whole(g._spec), dim, len(shape))
    out = source.like(shape=shape) if shape else source.like(shape=(), cuts=(REPLICATED,) * len(source.cuts))
    local = op(move(g._local_tensor, g._spec, source), out.local_shape, dim, size, step)
    return wrap(local, out.for_local(local))


def _whole(spec: ShardTensorSpec) -> ShardTensorSpec:
    return (
        spec.like(cuts=tuple(REPLICATED if isinstance(c, str) else c for c in spec.cuts)) if spec.is_partial else spec
    )


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
        return _run_view(_SELECT, x, dim, index)
    remember(spec, dim, ("select", index))
    # The row is on one rank and the others learn it: a slice, whose dim of size 1 is then squeezed.
    return _run_view(aten.squeeze.dims, _run_view(aten.slice.Tensor, x, dim, index, index + 1), (dim,))


_SELECT = aten.select.int


def _select_plan(op: Any, spec: ShardTensorSpec, dim: int, index: int) -> ViewPlan:
    return ViewPlan(spec, lambda t: t.select(dim, index), _renumber(spec, lambda c: c - (c > dim)), spec.sizes)


VIEWS[_SELECT] = _select_plan


@on(aten.select_backward.default)
def _select_backward(op: Any, g: ShardTensor, shape: Sequence[int], dim: int, index: int) -> ShardTensor:
    spec = g._spec
    dim %= len(shape)
    index %= shape[dim]
    cuts, sizes = list(_renumber(spec, lambda c: c + (c >= dim))), list(spec.sizes)
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


# ---------------------------------------------------------------------- diagonals
def _diagonal_sizes(sizes: Sizes, lo: int, hi: int) -> Sizes:
    """How many diagonal elements each shard of a cut dim has: those at places `lo` to `hi` of that dim."""
    return cut_at(sizes, lo, max(lo, hi))


@view(aten.diagonal.default)
def _diagonal(op: Any, spec: ShardTensorSpec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ViewPlan:
    """Where one of the two dims is cut, so is the diagonal: each shard holds the part that passes through it."""
    a, b = dim1 % spec.ndim, dim2 % spec.ndim
    source = without_cut(spec, b) if spec.axis_of(a) is not None else spec
    cuts, sizes = list(_renumber(source, lambda c: c - (c > a) - (c > b))), list(source.sizes)
    cut = a if source.axis_of(a) is not None else b
    axis, local_offset = source.axis_of(cut), offset
    if axis is not None:
        start = source.local_start(axis)
        local_offset += start if cut == a else -start
        other, lead = (spec.shape[b], -offset) if cut == a else (spec.shape[a], offset)
        sizes[axis] = _diagonal_sizes(source.sizes[axis], max(0, lead), min(spec.shape[cut], other + lead))
        cuts[axis] = spec.ndim - 2
        remember(source, cut, ("diagonal", offset, a, b, sizes[axis]))
    return ViewPlan(source, lambda t: t.diagonal(local_offset, a, b), cuts, sizes)


@on(aten.diagonal_backward.default)
def _diagonal_backward(op: Any, g: ShardTensor, shape: Sequence[int], offset: int, dim1: int, dim2: int) -> ShardTensor:
    a, b = dim1 % len(shape), dim2 % len(shape)
    spec = _whole(g._spec)
    last, cut, known = g.ndim - 1, None, None
    axis = spec.axis_of(last)
    if axis is not None:
        for dim in (a, b):
            found = recall(spec.layout, axis, shape, dim, ("diagonal", offset, a, b, spec.sizes[axis]))
            cut, known = (dim, found) if found is not None and known is None else (cut, known)
        if known is None:
            spec = without_cut(spec, last)
    small, large = sorted((a, b))
    cuts, sizes = list(_renumber(spec, lambda c: (c + (c >= small)) + (c + (c >= small) >= large))), list(spec.sizes)
    local_offset = offset
    if axis is not None and cut is not None and known is not None:
        cuts[axis], sizes[axis] = cut, known
        start = starts(known)[spec.layout.coords[axis]]
        local_offset += start if cut == a else -start
    out = spec.like(cuts=cuts, sizes=sizes, shape=shape)
    local = g._local_tensor.new_zeros(out.local_shape)
    local.diagonal(local_offset, a, b).copy_(move(g._local_tensor, g._spec, spec))
    return wrap(local, out)


# ---------------------------------------------------------------------- all parts of a dim
@on(aten.split.Tensor)
def _split(op: Any, x: ShardTensor, size: int, dim: int = 0) -> list[ShardTensor]:
    n = x.shape[dim]
    return _split_sizes(op, x, [min(size, n - i) for i in range(0, n, size)] if size else [0], dim)


@on(aten.split_with_sizes.default)
def _split_sizes(op: Any, x: ShardTensor, sizes: Sequence[int], dim: int = 0) -> list[ShardTensor]:
    at = starts(tuple(sizes))
    if at[-1] != x.shape[dim] or min(sizes, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {x.shape[dim]} (input tensor's size at dimension "
            f"{dim}), but got split_sizes={list(sizes)}"
        )
    return [_run_view(aten.slice.Tensor, x, dim, lo, hi) for lo, hi in zip(at, at[1:], strict=False)]


@on(aten.unbind.int)
def _unbind(op: Any, x: ShardTensor, dim: int = 0) -> tuple[ShardTensor, ...]:
    dim = normal_dim(dim, x.ndim)
    if x._spec.axis_of(dim) is not None:
        source = without_cut(x._spec, dim)
        x = ViewPlan(source, lambda t: t, source.cuts, source.sizes).run(x)
    spec = x._spec
    plan = _plan_of((op, spec, dim), lambda: _select_plan(op, spec, dim, 0))
    return tuple(alias_of(x, plan.finish(t, spec)) for t in counted(x._local_tensor.unbind, dim))


# ---------------------------------------------------------------------- view / reshape
@view(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.reshape.default)
def plan_reshape(op: Any, spec: ShardTensorSpec, size: Sequence[int], *_: Any) -> ViewPlan:
    """Reshape: which layout the input needs, and how the output is then cut."""
    size = resolve_size(spec.shape, size)
    source = reshape_source(spec, size)
    cuts, sizes = _reshaped_cuts(source, size)
    local = list(size)
    for axis, cut in enumerate(cuts):
        if isinstance(cut, int) and cut >= 0:
            local[cut] = sizes[axis][spec.layout.coords[axis]]
    copies = op is aten._unsafe_view.default or source is not spec
    return ViewPlan(
        source, (lambda t: t.reshape(local)) if copies else (lambda t: _view_or_copy(t, local)), cuts, sizes
    )


def _view_or_copy(t: Tensor, size: list[int]) -> Tensor:
    try:
        return t.view(size)
    except RuntimeError:  # a shard with gaps that the global strides do not show
        return t.reshape(size)


def resolve_size(shape: Sequence[int], size: Sequence[int]) -> tuple[int, ...]:
    """Fill in -1; raises as torch does when the sizes do not fit."""
    total, known = math.prod(shape), math.prod(n for n in size if n != -1)
    if -1 in size and not known and not total:
        raise RuntimeError(
            f"cannot reshape tensor of 0 elements into shape {list(size)} because the unspecified dimension size -1 "
            "can be any value and is ambiguous"
        )
    out = tuple((total // known if known else 0) if n == -1 else int(n) for n in size)
    if math.prod(out) != total or list(size).count(-1) > 1 or min(out, default=0) < 0:
        raise RuntimeError(f"shape '{list(size)}' is invalid for input of size {total}")
    return out


def _groups(shape: Sequence[int], size: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest runs of input dims and output dims with equal products, dims of size 1 left out."""
    a = [d for d, n in enumerate(shape) if n != 1]
    b = [d for d, n in enumerate(size) if n != 1]
    out = []
    while a or b:
        i, j = [a.pop(0)] if a else [], [b.pop(0)] if b else []
        p, q = math.prod(shape[d] for d in i), math.prod(size[d] for d in j)
        while p != q:
            if p < q:
                i.append(a.pop(0))
                p *= shape[i[-1]]
            else:
                j.append(b.pop(0))
                q *= size[j[-1]]
        out.append((i, j))
    return out


def reshape_source(spec: ShardTensorSpec, size: Sequence[int]) -> ShardTensorSpec:
    """The layout nearest to `spec` whose shards are still one piece after the reshape."""
    if math.prod(size) == 0:
        return spec.replicated() if tuple(size) != tuple(spec.shape) else spec
    cuts, sizes = list(spec.cuts), list(spec.sizes)
    groups = _groups(spec.shape, size)
    kept = [i[0] for i, j in groups if len(i) == len(j) == 1]  # dims that stay as they are
    ones = [d for d in spec.cut_dims if spec.shape[d] == 1]
    for dim in ones:
        axis = spec.cut_dims[dim]
        cuts[axis], sizes[axis] = REPLICATED, ()
    for i, j in groups:
        for dim in [d for d in i if d in cuts]:
            axis = cuts.index(dim)
            ranks = spec.layout.shape[axis]
            if dim != i[0]:  # rows of different outer indices would interleave
                target = _other_cut(spec, cuts, i[0], kept, ranks)
                cuts[axis] = REPLICATED if target is None else target
                sizes[axis] = () if target is None else even_sizes(spec.shape[target], ranks)
            if cuts[axis] == i[0]:
                inner_in = math.prod(spec.shape[d] for d in i[1:])
                inner_out = math.prod(size[d] for d in j[1:])
                multiple = inner_out // math.gcd(inner_in, inner_out)
                if any(b % multiple for b in starts(sizes[axis])):
                    sizes[axis] = align_sizes(sizes[axis], multiple)
    return spec.like(cuts=cuts, sizes=sizes)


def _other_cut(spec: ShardTensorSpec, cuts: list[Cut], first: int, kept: list[int], ranks: int) -> int | None:
    """What to cut instead of an inner dim of a merged group: its first dim if every rank gets a row, or the longest of
    the dims that are kept."""
    free = [(spec.shape[d], d) for d in kept if d not in cuts]
    length, spare = max(free, default=(0, None))
    if first in cuts:
        return spare
    return spare if spec.shape[first] < min(ranks, length) else first


def _reshaped_cuts(source: ShardTensorSpec, size: Sequence[int]) -> tuple[list[Cut], list[Sizes]]:
    if math.prod(size) == 0:
        return list(source.cuts), list(source.sizes)
    cuts, sizes = list(source.cuts), list(source.sizes)
    for i, j in _groups(source.shape, size):
        for axis, cut in enumerate(source.cuts):
            if i and cut == i[0]:
                inner_in = math.prod(source.shape[d] for d in i[1:])
                inner_out = math.prod(size[d] for d in j[1:])
                cuts[axis] = j[0]
                sizes[axis] = tuple(n * inner_in // inner_out for n in source.sizes[axis])
    return cuts, sizes
