"""Nearest neighbours when the points are cut over ranks: blocks of points go around, each rank keeps a running choice.

At any time a rank holds its own points, one block of another rank and the choice for its queries: memory falls with
the number of ranks. A block whose bounding box is farther from a query than the choice it has already is not searched
for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpzoo.ops.points_search import FAR, ROWS, PointIndex, measured, merge, nothing_yet
from dpzoo.shard import collectives as comm
from dpzoo.shard.partition import Sizes, starts

Choice = tuple[Tensor, Tensor]  # squared distances and global indices, (B, M, k)
_BUCKETS = 8  # groups of queries with a like reach, which bounds their search


def ring_nearest(points: Tensor, queries: Tensor, k: int, radius: float, sizes: Sizes, group: str) -> Choice:
    """The choice for this rank's queries (B, m, d) among the points of all ranks, of which this one holds (B, n, d).

    Args:
        sizes: how the points are cut over the group.
    """
    ranks, me, at = len(sizes), comm.group_rank(group), starts(sizes)
    boxes = comm.all_gather_v(_box(points).unsqueeze(0), 0, (1,) * ranks, group)
    best, block = nothing_yet(queries, k), points
    for step in range(ranks):
        owner, following = (me - step) % ranks, (me - step - 1) % ranks
        shape = (*points.shape[:-2], sizes[following], points.shape[-1])
        pending = comm.shift(block, shape, group) if step < ranks - 1 else None
        if sizes[owner]:
            best = _searched(block, queries, boxes[owner], best, k, radius, at[owner])
        if pending is not None:
            block = pending.wait()
    return best


def gathered_nearest(points: Tensor, queries: Tensor, k: int, radius: float, sizes: Sizes, group: str) -> Choice:
    """The choice for queries that every rank of the group holds: each searches its own points, then all join."""
    ranks, me = len(sizes), comm.group_rank(group)
    found = _searched(points, queries, _box(points), nothing_yet(queries, k), k, radius, starts(sizes)[me])
    squared, indices = (comm.all_gather_v(t.unsqueeze(0), 0, (1,) * ranks, group) for t in found)
    best = squared[0], indices[0]
    for r in range(1, ranks):
        best = merge(best, (squared[r], indices[r]), k)
    return best


def _box(points: Tensor) -> Tensor:
    """Bounding boxes (B, 2, d) of clouds (B, n, d); of nothing, one that is infinitely far from everything."""
    wide = measured(points)
    if not points.shape[1]:
        nowhere = wide.new_full((*points.shape[:1], 1, points.shape[-1]), math.inf)
        return torch.cat([nowhere, -nowhere], 1)
    return torch.stack([wide.amin(1), wide.amax(1)], 1)


def _searched(block: Tensor, queries: Tensor, boxes: Tensor, best: Choice, k: int, radius: float, first: int) -> Choice:
    """The choice with one more block of points, whose global indices begin at `first`."""
    for b in range(len(queries)):
        _search(block[b], queries[b], boxes[b], (best[0][b], best[1][b]), k, radius, first)
    return best


def _search(block: Tensor, queries: Tensor, box: Tensor, best: Choice, k: int, radius: float, first: int) -> None:
    """Improve the choice for one cloud, in place."""
    if not len(queries) or not len(block):
        return
    reach = best[0][:, -1].clamp(max=radius * radius)
    wide = measured(queries)
    gap = torch.maximum(box[0] - wide, wide - box[1]).clamp_(min=0).square_().sum(-1)
    rows = (gap <= reach * (1 + 1e-12)).nonzero().squeeze(1)
    if not len(rows):
        return
    index = PointIndex(block)
    rows = rows[reach[rows].argsort()]
    for group in rows.tensor_split(_BUCKETS) if bool(torch.isfinite(reach[rows[0]])) else (rows,):
        if not len(group):
            continue
        bound = math.sqrt(float(reach[group[-1]])) * (1 + 1e-12)
        for part in group.split(ROWS):
            squared, indices = index.nearest(queries[part], k, bound)
            indices = torch.where(indices == FAR, indices, indices + first)
            joined = merge((best[0][part], best[1][part]), (squared, indices), k)
            best[0][part], best[1][part] = joined
