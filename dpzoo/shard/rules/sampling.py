"""grid_sample, affine_grid and fold: native where a sample, a channel or a point to sample at is cut.

A point may lie anywhere, so each rank must see whole fields: a field cut in space moves its cut to channels or samples
(all-to-all) and back, or, where the points are cut as well, is gathered, which is said. `F.fold` adds blocks that are
numbered over the whole picture: cut samples stay, cut blocks move their cut to samples or are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import relayout
from dpzoo.shard.fallback import gather_call, note_gather
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import fill_empty
from dpzoo.shard.spec import REPLICATED
from dpzoo.shard.tensor import ShardTensor


@rule(name="grid_sample of whole fields")
def _sample_whole_fields(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool | None) -> Dims:
    n = input.ndim - 2
    space = tuple(f"in{i}" for i in range(n))
    points: Labels = tuple(f"out{i}" for i in range(n))

    def local(x: Tensor, g: Tensor) -> Tensor:
        missing = [d for d in (0, 1) if x.shape[d] == 0]  # torch wants a sample and a channel
        x, g = fill_empty(x, missing, 0), fill_empty(g, [d for d in missing if d == 0], 0)
        out = F.grid_sample(x, g, mode, padding_mode, align_corners)
        for d in missing:
            out = out.narrow(d, 0, 0)
        return out

    operands: list[Labels] = [("n", "c", *space), ("n", *points, "xy")]
    return Dims(operands, [("n", "c", *points)], local, whole=frozenset([*space, "xy"]))


@handler(F.grid_sample, name="grid_sample")
def grid_sample(
    func: Any,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    """Values of a field at points of [-1, 1]^n: (N, C, *space) and (N, *points, n) -> (N, C, *points)."""
    align = bool(align_corners)  # torch's default, without its warning about a default that changed long ago
    output_shape(F.grid_sample, input, grid, mode, padding_mode, align)
    if isinstance(input, ShardTensor) and isinstance(grid, ShardTensor):
        input = _whole_where_points_are_cut(func, input, grid)
    return RULE_OF["grid_sample of whole fields"](F.grid_sample, (), (input, grid, mode, padding_mode, align), {})


def _whole_where_points_are_cut(func: Any, x: ShardTensor, grid: ShardTensor) -> ShardTensor:
    """A mesh axis that cuts the points leaves them where they are; the field it cuts, too, becomes whole."""
    spec = x._spec
    both = [
        a
        for a, (c, points) in enumerate(zip(spec.cuts, grid._spec.cuts, strict=True))
        if isinstance(c, int) and c >= 1 and isinstance(points, int) and 1 <= points < grid.ndim - 1
    ]
    if not both:
        return x
    if x.numel() and any(spec.layout.shape[a] > 1 for a in both):
        note_gather(func, (x, grid), {}, x.numel() * x.dtype.itemsize)
    cuts = tuple(REPLICATED if a in both else c for a, c in enumerate(spec.cuts))
    return relayout(x, spec.like(cuts=cuts, sizes=tuple(() if a in both else s for a, s in enumerate(spec.sizes))))


@rule(F.affine_grid)
def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Dims | None:
    """The points of a transformed grid, per sample: (N, n, n + 1) -> (N, *space, n)."""
    align, shape = bool(align_corners), tuple(size)
    output_shape(F.affine_grid, theta, shape, align)
    space: Labels = tuple(f"out{i}" for i in range(len(shape) - 2))

    def local(t: Tensor) -> Tensor:
        full = fill_empty(t, [0], 0)
        return F.affine_grid(full, [full.shape[0], *shape[1:]], align).narrow(0, 0, t.shape[0])

    return Dims([("n", "row", "column")], [("n", *space, "row")], local, whole=frozenset(["row", "column"]))


@rule(name="fold of whole pictures")
def _fold_whole_pictures(input: Tensor, sizes: Sequence[Any]) -> Dims:
    def local(t: Tensor) -> Tensor:
        return F.fold(fill_empty(t, [0], 0), *sizes).narrow(0, 0, t.shape[0])

    return Dims([("n", "k", "blocks")], [("n", "c", "y", "x")], local, whole=frozenset(["k", "blocks", "c", "y", "x"]))


@handler(F.fold, torch._C._nn.col2im, name="fold")
def fold(
    func: Any,
    input: Tensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Any:
    """col2im: (N, C * kernel, blocks) added up to (N, C, H, W)."""
    sizes = (output_size, kernel_size, dilation, padding, stride)
    if not isinstance(input, ShardTensor) or input.ndim != 3 or not input.shape[0]:
        return gather_call(F.fold, (), (input, *sizes), {})
    output_shape(F.fold, input, *sizes)
    frozen = tuple(tuple(v) if isinstance(v, list) else v for v in sizes)
    return RULE_OF["fold of whole pictures"](F.fold, (), (input, frozen), {})
