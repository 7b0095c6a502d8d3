"""Neighborhood attention written from its definition: all scores, one mask. It shares nothing with the library."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def visible(i: int, t: int, n: int, kernel: int, stride: int, dilation: int, causal: bool) -> bool:
    """Does the query at position i see the key at position t of a dim of n?"""
    if i % dilation != t % dilation:
        return False
    group = list(range(i % dilation, n, dilation))
    query, key, last = group.index(i), group.index(t), len(group) - 1
    if causal:
        leader = min(query // stride * stride + stride - 1, last)
        return key <= query and leader - key < kernel
    leader = min(query // stride * stride + stride // 2, last)
    left, right = kernel // 2, kernel - kernel // 2 - 1
    centre = max(left, min(leader, last - right))  # the window is shifted so that it fits
    return centre - left <= key <= centre + right


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    scale: float | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """The attention of (B, *grid, heads, dim) tensors."""
    grid = q.shape[1:-2]
    points = list(itertools.product(*map(range, grid)))
    lines = list(zip(grid, kernel, stride, dilation, causal, strict=True))
    mask = torch.tensor(
        [[all(visible(i, t, *line) for i, t, line in zip(a, b, lines, strict=True)) for b in points] for a in points]
    )
    groups = q.shape[-2] // k.shape[-2]
    k, v = (t.repeat_interleave(groups, -2) for t in (k, v))
    a, b, c = (t.flatten(1, -3).transpose(1, 2) for t in (q, k, v))
    scores = a @ b.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if table is not None:
        scores = scores + _bias(points, kernel, dilation, mask, table)
    out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ c
    return out.transpose(1, 2).unflatten(1, grid)


def _bias(points: list[tuple[int, ...]], kernel: Sequence[int], dilation: Sequence[int], mask: Tensor, table: Tensor):
    rows = []
    for x, a in enumerate(points):
        for y, b in enumerate(points):
            steps = [(t - i) // d for i, t, d in zip(a, b, dilation, strict=True)]
            entry = [s + k - 1 for s, k in zip(steps, kernel, strict=True)]
            rows.append(table[(slice(None), *entry)] if mask[x, y] else table.new_zeros(table.shape[0]))
    return torch.stack(rows, 1).unflatten(1, (len(points), len(points)))
