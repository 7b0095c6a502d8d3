"""`F.pad` in every mode on any side: only the edge shards grow, the rows they need come from wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.partition import Interval, cut_at, overlap, own_intervals
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import global_of, on_shards, whole_values
from dpzoo.shard.tensor import ShardTensor

_FUNCS = [F.pad, torch._C._nn.pad, torch.constant_pad_nd]


@handler(*_FUNCS, name="pad")
def pad(func: Any, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad (or crop, where negative) the last dims."""
    if func is torch.constant_pad_nd:
        mode, value = "constant", (mode if not isinstance(mode, str) else value)
    if not isinstance(input, ShardTensor):
        return gather_call(F.pad, (), (input, tuple(pad), mode, value), {})
    output_shape(F.pad, input, tuple(pad), mode, value)  # torch's own checks, before anything moves
    amounts = {input.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    spec = whole_values(input._spec)
    cut = {d: a for d, a in amounts.items() if d in spec.cut_dims and a != (0, 0)}
    if any(_reads_what_is_cropped(input.shape[d], *a, mode) for d, a in cut.items()):
        return gather_call(F.pad, (), (input, tuple(pad), mode, value), {})
    rest = [0 if input.ndim - 1 - i // 2 in cut else n for i, n in enumerate(pad)]
    out: Any = input
    if any(rest):
        out = on_shards(out, lambda t: _pad_local(t, rest, mode, value), spec.cuts, spec.sizes)
    for d, (before, after) in cut.items():
        out = _pad_dim(out, d, before, after, mode, 0.0 if value is None else value)
    return out if out is not input else input.clone()


def _pad_local(t: Tensor, amounts: list[int], mode: str, value: float | None) -> Tensor:
    """Uncut dims; torch's reflect and friends refuse empty shards, which need no values."""
    if t.numel() or mode == "constant":
        return F.pad(t, amounts, mode, value)
    return F.pad(t, amounts)


def _reads_what_is_cropped(n: int, before: int, after: int, mode: str) -> bool:
    """Cropping beyond the other end, or a circle longer than what is left of it: torch decides what that means."""
    left = n + min(0, before) + min(0, after)
    return left < 0 or (mode == "circular" and left < max(before, after))


def _pad_dim(x: ShardTensor, dim: int, before: int, after: int, mode: str, value: float) -> ShardTensor:
    """Rows before go to the first shard, rows after to the last one; the borders between stay where they are."""
    spec = whole_values(x._spec)
    axis = spec.cut_dims[dim]
    sizes, me = spec.sizes[axis], spec.layout.coords[axis]
    last, body = len(sizes) - 1, (max(0, -before), x.shape[dim] - max(0, -after))
    before, after = max(0, before), max(0, after)
    wanted = [[overlap(o, body) or (0, 0)] for o in own_intervals(sizes)]
    if mode != "constant":
        head, tail = _SOURCES[mode](x.shape[dim], body, before, after)
        wanted[0] = [head, *wanted[0]]
        wanted[last] = [*wanted[last], tail]  # after the head: on one rank both are in the same list
    kept = tuple(tuple(w for w in row if w[0] < w[1]) for row in wanted)
    grown = (before if me == 0 else 0, after if me == last else 0)
    constant = grown if mode == "constant" else (0, 0)
    local = fetch(to_shard(x, spec), dim, sizes, kept, spec.layout.groups[axis], constant, value)
    if mode in ("reflect", "replicate") and any(grown):
        local = _finish(local, dim, mode, grown)
    out = list(cut_at(sizes, *body))
    out[0] += before
    out[last] += after
    new_sizes = list(spec.sizes)
    new_sizes[axis] = tuple(out)
    return global_of(local, spec, spec.cuts, new_sizes)


# Where padding rows come from, in rows of the uncropped dim (torch reflects and replicates at its ends).
def _reflect_rows(n: int, body: Interval, before: int, after: int) -> tuple[Interval, Interval]:
    return (1, 1 + before), (n - 1 - after, n - 1)


def _replicate_rows(n: int, body: Interval, before: int, after: int) -> tuple[Interval, Interval]:
    return (0, 1 if before else 0), (n - 1 if after else n, n)


def _circular_rows(n: int, body: Interval, before: int, after: int) -> tuple[Interval, Interval]:
    return (body[1] - before, body[1]), (body[0], body[0] + after)


_SOURCES: dict[str, Callable[[int, Interval, int, int], tuple[Interval, Interval]]] = {
    "reflect": _reflect_rows,
    "replicate": _replicate_rows,
    "circular": _circular_rows,
}


def _finish(local: Tensor, dim: int, mode: str, grown: tuple[int, int]) -> Tensor:
    """Turn the fetched edge rows into padding: reversed for reflect, repeated for replicate."""
    before, after = grown
    taken = (min(before, 1), min(after, 1)) if mode == "replicate" else grown
    head, body, tail = local.split([taken[0], local.shape[dim] - sum(taken), taken[1]], dim)
    if mode == "replicate":
        head, tail = head.repeat_interleave(before, dim), tail.repeat_interleave(after, dim)
    else:
        head, tail = head.flip(dim), tail.flip(dim)
    return torch.cat([t for t, n in ((head, before), (body, 1), (tail, after)) if n], dim)
