"""Several tensors change the dim that is cut in one message to each rank, since small inputs pay for every message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.partition import Sizes, with_size
from dpzoo.shard.tracing import is_tracing


def all_to_all_together(
    ts: Sequence[Tensor],
    split_dim: int,
    split_sizes: Sequence[Sizes],
    cat_dim: int,
    cat_sizes: Sequence[Sizes],
    group: str,
) -> list[Tensor]:
    """`collectives.all_to_all_v` of several tensors of one dtype; sizes are given for each of them."""
    calls = list(zip(ts, split_sizes, cat_sizes, strict=True))
    n, me = comm.group_size(group), comm.group_rank(group)
    if len(ts) == 1 or n == 1 or is_tracing():
        return [comm.all_to_all_v(t, split_dim, s, cat_dim, c, group) for t, s, c in calls]
    assert len({t.dtype for t in ts}) == 1, "one message has one dtype"
    parts = [t.split(s, split_dim) for t, s, _ in calls]
    shapes = [with_size(t.shape, split_dim, s[me]) for t, s, _ in calls]
    rows = [math.prod(shape[:cat_dim]) * math.prod(shape[cat_dim + 1 :]) for shape in shapes]
    lengths = [[row * c[r] if r != me else 0 for row, (_, _, c) in zip(rows, calls, strict=True)] for r in range(n)]
    sends = [[p[r] for p in parts] if r != me else [] for r in range(n)]
    received = comm.start_transport(sends, [sum(each) for each in lengths], ts[0], group, wait=True).wait()
    arrived = [flat.split(each) for flat, each in zip(received, lengths, strict=True)]
    out = []
    for i, (_, _, sizes) in enumerate(calls):
        pieces = [
            parts[i][me] if r == me else arrived[r][i].view(with_size(shapes[i], cat_dim, sizes[r])) for r in range(n)
        ]
        out.append(torch.cat(pieces, cat_dim))
    return out
