"""Sliding windows over a cut dim: which rank computes which outputs, and which input rows it needs for them.

One integer rule serves convolution, pooling and transposed convolution, for any kernel, stride, padding and dilation,
any shard sizes, halos over several ranks. A window belongs to the rank that holds its centre, so that an odd "same"
kernel keeps the borders where they are. Rows outside of the domain are zeros. A rank without outputs still takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.exchange import Wanted
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.partition import Interval, Sizes, own_intervals, starts
from dpzoo.shard.rules.parts import fill_empty, global_of
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


@dataclass(frozen=True)
class Windows:
    """One cut dim, for all ranks of its axis.

    Attributes:
        wanted: input intervals each rank needs, inside the domain, in order.
        pads: rows of zeros each rank puts before and after them.
        out_sizes: how the output is cut.
        skips: rows of the local result that lie before each rank's first output.
    """

    wanted: Wanted
    pads: tuple[tuple[int, int], ...]
    out_sizes: Sizes
    skips: Sizes


@lru_cache(maxsize=4096)
def forward_windows(
    sizes: Sizes, n_out: int, kernel: int, stride: int = 1, before: int = 0, dilation: int = 1
) -> Windows:
    """Windows of a convolution or pooling: output j sees inputs `j * stride - before + t * dilation`, t < kernel.

    Args:
        sizes: how the input dim is cut.
        n_out: global number of outputs.
        before: padding rows in front; those at the end follow from `n_out`.
    """
    n, reach = sum(sizes), dilation * (kernel - 1) + 1
    centre = (reach - 1) // 2 - before
    borders = [min(n_out, max(0, -(-(b - centre) // stride))) for b in starts(sizes)[1:-1]]
    borders = [0, *borders, n_out]
    wanted: list[tuple[Interval, ...]] = []
    pads = []
    for a, b in zip(borders, borders[1:], strict=False):
        if a == b:  # no outputs: one window of fill, so that the op has something to run on
            wanted.append(())
            pads.append((reach, 0))
            continue
        lo, hi = a * stride - before, (b - 1) * stride - before + reach
        inside = (min(n, max(0, lo)), min(n, max(0, hi)))
        wanted.append((inside,) if inside[0] < inside[1] else ())
        pads.append(_fill_around(lo, hi, inside))
    out = tuple(b - a for a, b in zip(borders, borders[1:], strict=False))
    return Windows(tuple(wanted), tuple(pads), out, (0,) * len(out))


def _fill_around(lo: int, hi: int, inside: Interval) -> tuple[int, int]:
    """Fill rows before and after the part of [lo, hi) that lies in the domain."""
    if inside[0] >= inside[1]:
        return (hi - lo, 0)
    return (inside[0] - lo, hi - inside[1])


@lru_cache(maxsize=4096)
def transposed_windows(
    sizes: Sizes, n_out: int, kernel: int, stride: int = 1, before: int = 0, dilation: int = 1
) -> Windows:
    """Windows of a transposed convolution: input i adds to outputs `i * stride - before + t * dilation`, t < kernel."""
    n, reach = sum(sizes), dilation * (kernel - 1) + 1
    shift = (reach - stride + 1) // 2 - before
    borders = [min(n_out, max(0, b * stride + shift)) for b in starts(sizes)[1:-1]]
    borders = [0, *sorted(borders), n_out]
    wanted: list[tuple[Interval, ...]] = []
    pads, skips = [], []
    for a, b in zip(borders, borders[1:], strict=False):
        if a == b:
            wanted.append(())
            pads.append((1, 0))
            skips.append(0)
            continue
        first = min(-(-(a + before - reach + 1) // stride), (a + before) // stride)
        last = (b - 1 + before) // stride
        if last * stride - before + reach < b:  # outputs between windows: one more input closes the gap
            last += 1
        lo, hi = min(n, max(0, first)), min(n, max(0, last + 1))
        pad = (0, 0) if lo < hi else (1, 0)
        wanted.append(((lo, hi),) if lo < hi else ())
        pads.append(pad)
        skips.append(a - (lo * stride - before))
    out = tuple(b - a for a, b in zip(borders, borders[1:], strict=False))
    return Windows(tuple(wanted), tuple(pads), out, tuple(skips))


def windows_of_cut_dims(
    windows: Callable[..., Windows],
    spec: ShardTensorSpec,
    shape: Sequence[int],
    first: int,
    *options: Sequence[int],
) -> dict[int, Windows]:
    """The windows of every cut spatial dim.

    Args:
        windows: `forward_windows` or `transposed_windows`.
        shape: of the global output.
        first: the first spatial dim.
        options: kernel, stride, padding before and dilation, each with a number per spatial dim.
    """
    return {
        d: windows(spec.sizes[axis], shape[d], *[o[d - first] for o in options])
        for d, axis in spec.cut_dims.items()
        if d >= first
    }


@lru_cache(maxsize=4096)
def with_edge_copies(plan: Windows, n: int, dilation: int) -> Windows:
    """The fill as copies of domain rows that the same windows see anyway: it changes no maximum, not even of -inf."""
    wanted, pads = [], []
    for rows, (before, after) in zip(plan.wanted, plan.pads, strict=True):
        if not rows:  # no outputs: zeros will do
            wanted.append(rows)
            pads.append((before, after))
            continue
        head = [source_row(i, n, dilation) for i in range(-before, 0)]
        tail = [source_row(n + i, n, dilation) for i in range(after)]
        wanted.append((*((i, i + 1) for i in head), *rows, *((i, i + 1) for i in tail)))
        pads.append((0, 0))
    return replace(plan, wanted=tuple(wanted), pads=tuple(pads))


def source_row(i: int, n: int, dilation: int) -> int:
    """The nearest domain row that a window with a tap on row `i`, outside of the domain, has a tap on, too."""
    if i < 0:
        return min(n - 1, i % dilation)
    return max(0, i - -(-(i - n + 1) // dilation) * dilation) if i >= n else i


def run_windows(
    x: ShardTensor,
    spec: ShardTensorSpec,
    plans: Mapping[int, Windows],
    op: Callable[[Tensor], Any],
    batch_dims: Sequence[int] = (),
    fetched_by_op: int | None = None,
) -> Any:
    """Fetch what each rank needs along every planned dim, run `op` on it, keep this rank's outputs.

    Args:
        spec: layout to start from; its cut dims that have no plan are batch-like.
        plans: cut dim -> windows. `op` must not pad these dims. It may return a tuple.
        batch_dims: dims in front of the windows, of which `op` wants at least one row.
        fetched_by_op: a planned dim that `op` gets as the shard has it, and borrows rows of by itself.
    """
    local = to_shard(x, spec)
    for dim, plan in plans.items():
        if dim != fetched_by_op:
            local = fetch_window(local, spec, dim, plan)
    missing = [d for d in batch_dims if local.shape[d] == 0]
    out = op(fill_empty(local, missing, 0))
    sizes = out_sizes(spec, plans)

    def leave(t: Tensor) -> ShardTensor:
        for d in missing:
            t = t.narrow(d, 0, 0)
        return global_of(keep_own(t, spec, plans), spec, spec.cuts, sizes)

    return leave(out) if isinstance(out, Tensor) else tuple(leave(t) for t in out)


def fetch_window(local: Tensor, spec: ShardTensorSpec, dim: int, plan: Windows) -> Tensor:
    """This rank's input rows of one dim, zeros included."""
    axis = spec.cut_dims[dim]
    sizes, pad = spec.sizes[axis], plan.pads[spec.layout.coords[axis]]
    if pad == (0, 0) and stays(plan, sizes):
        return local
    return fetch(local, dim, sizes, plan.wanted, spec.layout.groups[axis], pad)


def stays(plan: Windows, sizes: Sizes) -> bool:
    """Every rank wants the rows it has; the same on all ranks."""
    return plan.wanted == tuple((o,) for o in own_intervals(sizes))


def keep_own(out: Tensor, spec: ShardTensorSpec, plans: Mapping[int, Windows]) -> Tensor:
    """Drop rows that belong to other ranks."""
    for dim, plan in plans.items():
        me = spec.layout.coords[spec.cut_dims[dim]]
        if out.shape[dim] != plan.out_sizes[me] or plan.skips[me]:
            out = out.narrow(dim, plan.skips[me], plan.out_sizes[me])
    return out


def out_sizes(spec: ShardTensorSpec, plans: Mapping[int, Windows]) -> list[Sizes]:
    """Shard sizes of the result, per mesh axis."""
    dims = {axis: dim for dim, axis in spec.cut_dims.items()}
    return [plans[dims[a]].out_sizes if dims.get(a) in plans else s for a, s in enumerate(spec.sizes)]
