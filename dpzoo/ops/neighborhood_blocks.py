"""Neighborhood attention in plain torch: blocks of queries, each attending to the union of its windows under a mask.

Blocks with the same mask (all in the interior) are stacked and computed by one call, as many at a time as keep the
copies of their keys and values in the cache. Nothing of the size of all scores is ever held. The queries may be a part
of the domain, with keys and values around them: positions are global, so a part gives exactly what the whole would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dpzoo.ops.masked_attention import attend, attend_backward, attend_differentiably, wide_dtype
from dpzoo.ops.neighborhood_patches import Job, Patch, View, alike_patches
from dpzoo.ops.neighborhood_window import Axis

# Elements of the keys of one call, and of its scores, by device type: the size of a cache, and what fills a GPU.
STACKED_KEYS = {"cpu": 2**18}
STACKED_SCORES = {"cpu": 2**22}
KEPT_MASK = 2**18  # elements of a mask that is worth keeping for the next call


@dataclass(frozen=True)
class Geometry:
    """The domain, and where the local tensors lie in it; one number per spatial dim."""

    axes: tuple[Axis, ...]
    q_start: tuple[int, ...]
    k_start: tuple[int, ...]
    scale: float

    @property
    def ndim(self) -> int:
        """Spatial dims."""
        return len(self.axes)


def forward(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, at: Geometry) -> tuple[Tensor, Tensor]:
    """Attention (B, *queries, H, E) and its log-sum-exp (B, *queries, H)."""
    out, lse = empty_results(q, v)
    forward_into(out, lse, q, k, v, table, at)
    return out, lse


def empty_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what `forward` finds."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype))


def forward_into(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, at: Geometry) -> None:
    """`forward`, written into tensors that are given: parts of larger ones, maybe."""
    for patch, bias in _calls(q, k, table, at):
        o, sums = attend(*_inputs(q, k, v, patch), bias, at.scale)
        _write(out, o, patch)
        _write(lse, sums, patch)


@dataclass(frozen=True)
class Gradients:
    """Memory for gradients: `q` is written, the others are added to.

    A key belongs to many blocks: half precision would lose what each of them adds, so `k`, `v` and `table` are wide.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> Gradients:
        """For the gradients of these tensors."""
        zeros = [None if t is None else t.new_zeros(t.shape, dtype=wide_dtype(t.dtype)) for t in (k, v, table)]
        assert zeros[0] is not None
        assert zeros[1] is not None
        return cls(torch.empty_like(q, memory_format=torch.contiguous_format), zeros[0], zeros[1], zeros[2])

    def in_dtype_of(self, k: Tensor, v: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All of them, as gradients of these tensors."""
        of_table = None if self.table is None or table is None else self.table.to(table.dtype)
        return self.q, self.k.to(k.dtype), self.v.to(v.dtype), of_table


def backward_into(
    into: Gradients,
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    out: Tensor,
    lse: Tensor,
    at: Geometry,
) -> None:
    """Gradients of `forward`, into tensors that are given."""
    lse = lse.unsqueeze(-1)
    for patch, bias in _calls(q, k, table, at):
        gq, oq, logs = (_stack(t, patch, "queries") for t in (g, out, lse))
        pq, pk, pv, dscores = attend_backward(
            gq, *_inputs(q, k, v, patch), bias, oq, logs.squeeze(-1), at.scale, into.table is not None
        )
        _write(into.q, pq, patch)
        _add(into.k, pk, patch)
        _add(into.v, pv, patch)
        if into.table is not None and dscores is not None:
            _add_to_table(into.table, dscores, patch.first, at)


def differentiable(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, at: Geometry) -> Tensor:
    """The attention alone, with the graph of every block: for second derivatives, which need memory for all scores."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for patch, bias in _calls(q, k, table, at):
        _write(out, attend_differentiably(*_inputs(q, k, v, patch), bias, at.scale), patch)
    return out


# ---------------------------------------------------------------------- which blocks, in which calls
def _calls(q: Tensor, k: Tensor, table: Tensor | None, at: Geometry) -> Iterator[tuple[Patch, Tensor | None]]:
    """The blocks of each call, and the bias that they share."""
    if q.numel() == 0 or k.numel() == 0:
        return
    batch, heads, width = q.shape[0], q.shape[-2], q.shape[-1]
    most_keys = STACKED_KEYS.get(q.device.type, 2**26) // (batch * heads * width)
    most_scores = STACKED_SCORES.get(q.device.type, 2**28) // (batch * heads)
    sizes = tuple(q.shape[1 : 1 + at.ndim])
    for patches in alike_patches(at.axes, at.q_start, sizes, at.k_start, most_keys, most_scores):
        bias = _bias(patches[0].first, table, at, q)
        for patch in patches:
            yield patch, bias


def _bias(job: Job, table: Tensor | None, at: Geometry, like: Tensor) -> Tensor | None:
    """What a block adds to its scores: -inf for keys outside of a query's window, elsewhere the table's entry."""
    windows = tuple(block.windows for block in job)
    if all(window == (0, block.num_keys) for block in job for window in block.windows):
        unseen = None
    elif math.prod(b.num_queries * b.num_keys for b in job) > KEPT_MASK or is_in_torch_dispatch_mode():
        unseen = _mask.__wrapped__(windows, like.dtype, like.device, False)
    else:
        unseen = _mask(windows, like.dtype, like.device, torch.is_inference_mode_enabled())
    if table is None:
        return unseen
    index: tuple[slice | Tensor, ...] = (slice(None), *_table_index(job, at, table.device))
    entries = table[index].flatten(1 + at.ndim).flatten(1, at.ndim)
    entries = entries.to(like.dtype).unsqueeze(0)
    return entries if unseen is None else entries + unseen


@lru_cache(maxsize=64)
def _mask(
    windows: tuple[tuple[tuple[int, int], ...], ...], dtype: torch.dtype, device: torch.device, inference: bool
) -> Tensor:
    """(1, 1, queries, keys): 0 for a key in the query's window, else -inf; for reading.

    Args:
        windows: per dim and query its first key, and one past its last.
        inference: is it an inference tensor, which no graph may keep? Here for the sake of the cache.
    """
    seen: Tensor | None = None
    for along_dim in windows:
        start, end = torch.tensor(along_dim, device=device).unbind(1)
        at = torch.arange(max(end for _, end in along_dim), device=device)
        along = (at >= start[:, None]) & (at < end[:, None])
        if seen is None:
            seen = along
        else:
            seen = (seen[:, None, :, None] & along[None, :, None, :]).flatten(2).flatten(0, 1)
    assert seen is not None
    return torch.zeros((1, 1, *seen.shape), dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


def _table_index(job: Job, at: Geometry, device: torch.device) -> list[Tensor]:
    """Per dim the table's row of every (query, key) pair, shaped to broadcast to (*queries, *keys)."""
    found = []
    for d, (block, axis) in enumerate(zip(job, at.axes, strict=True)):
        queries = torch.arange(block.num_queries, device=device)[:, None]
        keys = torch.arange(block.num_keys, device=device)
        apart = (keys + block.shift - queries + axis.kernel - 1).clamp_(0, 2 * axis.kernel - 2)
        shape = [1] * (2 * at.ndim)
        shape[d], shape[at.ndim + d] = apart.shape
        found.append(apart.view(shape))
    return found


def _add_to_table(dtable: Tensor, dscores: Tensor, job: Job, at: Geometry) -> None:
    sizes = [b.num_queries for b in job] + [b.num_keys for b in job]
    per_pair = dscores.sum(0).unflatten(2, sizes[at.ndim :]).unflatten(1, sizes[: at.ndim])
    index = torch.broadcast_tensors(*_table_index(job, at, dtable.device))
    flat = torch.zeros_like(index[0])
    for rows, n in zip(index, dtable.shape[1:], strict=True):
        flat = flat * n + rows
    dtable.flatten(1).index_add_(1, flat.flatten(), per_pair.flatten(1).to(dtable.dtype))


# ---------------------------------------------------------------------- between the grid and the calls
def _blocks(t: Tensor, patch: Patch, which: str) -> Tensor:
    """A view of (B, *grid, ...) as (B, *patch.counts, *size of a block, ...): the blocks' "queries" or "keys".

    Those of keys overlap: for reading, or a part of the patch at a time.
    """
    return _viewed(t, patch.view_of(t.shape, t.stride(), which))


def _viewed(t: Tensor, view: View) -> Tensor:
    return t.as_strided(view.size, view.stride, t.storage_offset() + view.start)


def _stack(t: Tensor, patch: Patch, which: str) -> Tensor:
    """The blocks' "queries" or "keys" in (B, *grid, H, C) as (B * blocks, H, positions, C)."""
    view = patch.view_of(t.shape, t.stride(), which)
    stacked = _viewed(t, view).reshape(view.stacked).transpose(1, 2)
    # Where this is a view of t, its channels may be apart; torch's flash kernels take them for neighbours.
    return stacked if stacked.stride(-1) == 1 else stacked.contiguous()


def _inputs(q: Tensor, k: Tensor, v: Tensor, patch: Patch) -> tuple[Tensor, Tensor, Tensor]:
    return _stack(q, patch, "queries"), _stack(k, patch, "keys"), _stack(v, patch, "keys")


def _write(t: Tensor, stacked: Tensor, patch: Patch) -> None:
    """Put what was found for the queries of the blocks where they lie in (B, *grid, H, ...)."""
    places = _blocks(t, patch, "queries")
    places.copy_(stacked.transpose(1, 2).view(places.shape))


def _add(t: Tensor, stacked: Tensor, patch: Patch) -> None:
    """Add what was found for the keys of the blocks, which overlap, where they lie in (B, *grid, H, C)."""
    places = _blocks(t, patch, "keys")
    pieces = stacked.transpose(1, 2).view(places.shape)
    for part in patch.apart:
        places[:, *part].add_(pieces[:, *part])
