"""Farthest point sampling of a cloud that is cut over ranks: per choice one small exchange of each rank's candidate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpzoo.ops.points_sample import narrow_gaps
from dpzoo.ops.points_search import measured
from dpzoo.shard import collectives as comm
from dpzoo.shard.partition import Sizes, starts


def farthest_points(points: Tensor, n: int, start: int, sizes: Sizes, group: str) -> Tensor:
    """Global indices (B, n), on every rank, of the choice from all ranks' points; this one holds (B, m, d) of them."""
    first = starts(sizes)[comm.group_rank(group)]
    coordinates = measured(points)
    gaps = torch.full_like(coordinates[..., 0], -1.0)
    if first <= start < first + points.shape[1]:
        gaps[:, start - first] = math.inf
    chosen: list[Tensor] = []
    for i in range(n if len(points) else 0):
        at, here = _farthest(gaps, coordinates, first, len(sizes), group)
        chosen.append(at)
        if i == 0:
            gaps.fill_(math.inf)
        narrow_gaps(gaps, coordinates, here.unsqueeze(1))
        mine = (at >= first) & (at < first + points.shape[1])
        gaps[mine.nonzero().squeeze(1), at[mine] - first] = -math.inf
    if chosen:
        return torch.stack(chosen, 1)
    return torch.empty((len(points), n), dtype=torch.int64, device=points.device)


def _farthest(gaps: Tensor, coordinates: Tensor, first: int, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Index (B,) and coordinates (B, d) of the point with the largest gap on any rank; of several the first."""
    batch, m = gaps.shape
    if m:
        at = gaps.argmax(1)
        rows = torch.arange(batch, device=gaps.device)
        candidate = torch.cat([gaps[rows, at].unsqueeze(1), coordinates[rows, at]], 1)
        index = at + first
    else:
        candidate = coordinates.new_full((batch, 1 + coordinates.shape[-1]), -math.inf)
        index = torch.full((batch,), first, device=gaps.device)
    flat = torch.cat([candidate.view(torch.uint8).flatten(), index.view(torch.uint8)])
    told = comm.all_gather_v(flat.unsqueeze(0), 0, (1,) * ranks, group)
    split = candidate.numel() * candidate.element_size()
    candidates = told[:, :split].contiguous().view(candidate.dtype).view(ranks, batch, -1)
    indices = told[:, split:].contiguous().view(torch.int64)
    best = candidates[..., 0].argmax(0)  # ranks hold rising indices, and the first of equal gaps is taken
    rows = torch.arange(batch, device=gaps.device)
    return indices[best, rows], candidates[best, rows, 1:]
