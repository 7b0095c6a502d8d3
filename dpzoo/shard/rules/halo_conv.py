"""A convolution along a cut dim that borrows a few rows and copies none: shard first, then the seams.

The shard is convolved where it lies, with zeros around it; only the outputs whose windows reach into a neighbour are
computed again, on a slab of a few rows, when these have arrived. Backward is the same by linearity: the whole gradient
goes through the shard with zeros around it, and what the borrowed rows add to the weight's gradient, and their own
gradient, come from the slabs. So the shard is neither copied nor padded, and rows may travel while it is convolved.

Where shard and windows do not fit (a stride that the shard's start does not divide, a shard smaller than a window) a
rank joins the rows and convolves them; the messages are the same, so that each rank decides this for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.exchange import Wanted, foreign, joined, parted, start_exchange, start_return
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.partition import Interval, Sizes, overlap, own_intervals
from dpzoo.shard.rules.window import Windows

# A slab goes through the weight once more, a joined shard through memory: what costs less follows from their sizes.
ELEMENTS_PER_WEIGHT = 40
_overlap = False


@contextmanager
def halo_overlap(enabled: bool = True) -> Iterator[None]:
    """Inside the block, convolutions compute on their shard while the rows at its seams travel.

    Off by default: between processes of one machine the rows take less time than there is to win; docs/windows.md says
    how to measure it where links are slow. Values are the same.
    """
    global _overlap
    before, _overlap = _overlap, enabled
    try:
        yield
    finally:
        _overlap = before


@dataclass(frozen=True)
class ConvCall:
    """The static arguments of a convolution, a number per spatial dim."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def run(self, x: Tensor, w: Tensor, b: Tensor | None, dim: int, padding: int) -> Tensor:
        """The convolution, with another padding of tensor dim `dim`."""
        return torch.convolution(
            x, w, b, self.stride, self._padded(dim, padding), self.dilation, False, (0,) * len(self.stride), self.groups
        )

    def gradients(
        self, g: Tensor, x: Tensor, w: Tensor, has_bias: bool, dim: int, padding: int, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of input, weight and bias, where needed."""
        found = torch.ops.aten.convolution_backward(
            g,
            x,
            w,
            [w.shape[0]] if has_bias else None,
            self.stride,
            self._padded(dim, padding),
            self.dilation,
            False,
            (0,) * len(self.stride),
            self.groups,
            [bool(n) for n in needed],
        )
        return list(found)

    def _padded(self, dim: int, padding: int) -> tuple[int, ...]:
        return (*self.padding[: dim - 2], padding, *self.padding[dim - 1 :])


@dataclass(frozen=True)
class Halo:
    """How one rank's windows lie on its shard, along one cut dim.

    Attributes:
        borrowed: rows each rank wants of others.
        kept: the rows of this rank's shard that it needs itself, counted from the shard's start.
        before, after: how many rows it borrows on either side.
        zeros: rows of zeros around all of them.
        padding: of the shard, so that the convolution's outputs are this rank's; None where that cannot be.
        outputs: how many this rank computes.
        head, tail: how many of them see borrowed rows, at either end.
        tail_start: first row of the shard that the tail's windows see.
        reach: rows from the first to the last tap of a window.
    """

    dim: int
    sizes: Sizes
    group: str
    borrowed: Wanted
    kept: Interval
    before: int
    after: int
    zeros: tuple[int, int]
    padding: int | None
    outputs: int
    head: int
    tail: int
    tail_start: int
    stride: int
    reach: int

    @property
    def head_end(self) -> int:
        """Rows of the shard that the head's windows see."""
        return (self.head - 1) * self.stride + self.reach - self.zeros[0] - self.before


@lru_cache(maxsize=4096)
def halo_of(dim: int, sizes: Sizes, plan: Windows, me: int, group: str, reach: int, stride: int) -> Halo:
    """The halo of rank `me`; `plan` are forward windows of this reach and stride."""
    own = own_intervals(sizes)
    borrowed = foreign(plan.wanted, sizes)
    lo, hi = own[me]
    kept = overlap(plan.wanted[me][0], own[me]) if plan.wanted[me] else None
    before = sum(b - a for a, b in borrowed[me] if b <= lo)
    after = sum(b - a for a, b in borrowed[me] if a >= hi)
    zeros, n_out = plan.pads[me], plan.out_sizes[me]
    padding: int | None = None
    head = tail = start = 0
    if kept == own[me] and hi - lo >= reach and n_out:
        padding = zeros[0] + before
        head = min(n_out, -(-padding // stride)) if before else 0
        covered = (hi - lo + padding - reach) // stride + 1  # outputs whose windows end inside of the shard
        tail = max(0, n_out - covered) if after else 0
        start = (n_out - tail) * stride - padding
        own_head_rows = (head - 1) * stride + reach - padding if head else 0
        whole = (hi - lo + 2 * padding - reach) // stride + 1 == n_out
        if not whole or padding >= reach or start < 0 or own_head_rows < 0:
            padding = None
    kept = kept or (lo, lo)
    return Halo(
        dim,
        sizes,
        group,
        borrowed,
        (kept[0] - lo, kept[1] - lo),
        before,
        after,
        zeros,
        padding,
        n_out,
        head,
        tail,
        start,
        stride,
        reach,
    )


def halo_conv(x: Tensor, w: Tensor, b: Tensor | None, call: ConvCall, halo: Halo) -> Tensor:
    """Convolve a shard (N, C, ...) whose dim `halo.dim` is cut; differentiable, also twice. All ranks take part."""
    return _HaloConv.apply(x, w, b, call, halo)


class _HaloConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, call: ConvCall, halo: Halo) -> Tensor:
        in_place = halo.padding is not None and x.numel() >= ELEMENTS_PER_WEIGHT * w.numel()
        late = in_place and _overlap
        pending = start_exchange([x], halo.dim, halo.sizes, halo.borrowed, halo.group, wait=not late)
        ctx.call, ctx.halo, ctx.in_place = call, halo, in_place
        ctx.save_for_backward(x, w, b)
        if not in_place:
            ctx.rows = _sides(pending.wait()[0], halo)
            return call.run(_joined(x, ctx.rows, halo), w, b, halo.dim, 0)
        assert halo.padding is not None
        out = call.run(x, w, b, halo.dim, halo.padding)
        ctx.rows = _sides(pending.wait()[0], halo)
        for slab, at, n in _slabs(x, ctx.rows, halo):
            out.narrow(halo.dim, at, n).copy_(call.run(slab, w, b, halo.dim, 0))
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w, b = ctx.saved_tensors
        call, halo, needed = ctx.call, ctx.halo, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return *_again(x, w, b, g, call, halo, needed), None, None
        if not any(needed):
            return (None,) * 5
        back = _backward_in_place if ctx.in_place else _backward_joined
        return *back(g, x, w, b is not None, ctx.rows, call, halo, needed), None, None


def _sides(pieces: Sequence[Tensor], halo: Halo) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Borrowed rows before and after the shard's."""
    return parted(pieces, halo.dim, halo.before)


def _joined(x: Tensor, rows: tuple[Sequence[Tensor], Sequence[Tensor]], halo: Halo) -> Tensor:
    """All rows that this rank's windows see."""
    lo, hi = halo.kept
    own = [x.narrow(halo.dim, lo, hi - lo)] if lo < hi else []
    return joined([*rows[0], *own, *rows[1]], x, halo.dim, halo.zeros)


def _slabs(
    x: Tensor, rows: tuple[Sequence[Tensor], Sequence[Tensor]], halo: Halo, shard: bool = True
) -> Iterator[tuple[Tensor, int, int]]:
    """(rows, first output, number of outputs) of either seam; without `shard` its own rows are zeros."""
    dim, n = halo.dim, x.shape[halo.dim]
    if halo.head:
        own = halo.head_end
        near = [x.narrow(dim, 0, own)] if shard else []
        yield joined([*rows[0], *near], x, dim, (halo.zeros[0], 0 if shard else own)), 0, halo.head
    if halo.tail:
        own = n - halo.tail_start
        near = [x.narrow(dim, halo.tail_start, own)] if shard else []
        slab = joined([*near, *rows[1]], x, dim, (0 if shard else own, halo.zeros[1]))
        yield slab, halo.outputs - halo.tail, halo.tail


def _backward_in_place(
    g: Tensor, x: Tensor, w: Tensor, bias: bool, rows: Any, call: ConvCall, halo: Halo, needed: Sequence[bool]
) -> list[Tensor | None]:
    dim, extra = halo.dim, []
    homeward = []
    for slab, at, n in _slabs(x, rows, halo, shard=False):
        part = call.gradients(g.narrow(dim, at, n), slab, w, False, dim, 0, (needed[0], needed[1], False))
        extra.append(part[1])
        if part[0] is not None:
            first = halo.zeros[0] if at == 0 else x.shape[dim] - halo.tail_start
            homeward.append(part[0].narrow(dim, first, halo.before if at == 0 else halo.after))
    home = None
    if needed[0]:
        borrowed = joined(homeward, g.new_empty([*x.shape[:dim], 0, *x.shape[dim + 1 :]]), dim)
        home = start_return([borrowed], dim, halo.sizes, halo.borrowed, halo.group, wait=not _overlap)
    assert halo.padding is not None
    found = call.gradients(g, x, w, bias, dim, halo.padding, needed)
    for more in extra:
        if more is not None and found[1] is not None:
            found[1].add_(more)
    if home is not None and found[0] is not None:
        home.add_to([found[0]])
    return found


def _backward_joined(
    g: Tensor, x: Tensor, w: Tensor, bias: bool, rows: Any, call: ConvCall, halo: Halo, needed: Sequence[bool]
) -> list[Tensor | None]:
    dim, (lo, hi) = halo.dim, halo.kept
    gx, gw, gb = call.gradients(g, _joined(x, rows, halo), w, bias, dim, 0, needed)
    if gx is None:
        return [None, gw, gb]
    _, before, own, after, _ = gx.split([halo.zeros[0], halo.before, hi - lo, halo.after, halo.zeros[1]], dim)
    home = start_return([torch.cat([before, after], dim)], dim, halo.sizes, halo.borrowed, halo.group, wait=True)
    out = torch.empty_like(x)
    out.narrow(dim, 0, lo).zero_()
    out.narrow(dim, hi, x.shape[dim] - hi).zero_()
    out.narrow(dim, lo, hi - lo).copy_(own)
    home.add_to([out])
    return [out, gw, gb]


def _again(
    x: Tensor, w: Tensor, b: Tensor | None, g: Tensor, call: ConvCall, halo: Halo, needed: Sequence[bool]
) -> list[Tensor | None]:
    """For second derivatives: the same of differentiable parts."""
    used = [t for t, n in zip((x, w, b), needed, strict=True) if n and t is not None]
    with torch.enable_grad():
        rows = _sides_of(fetch(x, halo.dim, halo.sizes, halo.borrowed, halo.group), halo)
        out = call.run(_joined(x, rows, halo), w, b, halo.dim, 0)
    found = iter(torch.autograd.grad(out, used, g, create_graph=True))
    return [next(found) if n else None for n in needed]


def _sides_of(rows: Tensor, halo: Halo) -> tuple[list[Tensor], list[Tensor]]:
    before, after = rows.split([halo.before, halo.after], halo.dim)
    return [before], [after]
