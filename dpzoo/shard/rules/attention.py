"""scaled_dot_product_attention on sharded sequences.

Queries stay where they are. Keys and values that are cut too are gathered while that is cheap (64 MiB), and travel
around a ring beyond (`kernels/ring_attention.py`), so that no rank holds them whole. `attention_mode` decides otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import refuse
from dpzoo.shard.kernels.ring_attention import ring_attention
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, rule
from dpzoo.shard.rules.parts import global_of, whole_values
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor

GATHER_BYTES = 64 * 2**20
_mode = "auto"


@contextmanager
def attention_mode(mode: str) -> Iterator[None]:
    """How cut keys and values reach the queries inside the block: "auto" (by size), "gather" or "ring"."""
    global _mode
    if mode not in ("auto", "gather", "ring"):
        raise ValueError(f"attention_mode takes 'auto', 'gather' or 'ring', got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def _ring_pays(k: Tensor, v: Tensor) -> bool:
    return _mode == "ring" or (_mode == "auto" and (k.numel() + v.numel()) * k.dtype.itemsize > GATHER_BYTES)


def sdpa(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`F.scaled_dot_product_attention` with any operands sharded."""
    return _sdpa(func, *args, **kwargs)


def _sdpa(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p > 0.0:
        return refuse(func, (), (query, key, value), {"dropout_p": dropout_p})
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    axis = _ring_axis(query, key, value) if attn_mask is None and not enable_gqa and _ring_pays(key, value) else None
    if axis is not None:
        return _ring(query, key, value, axis, is_causal, scale)
    if is_causal:
        n, m = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril()
    return RULE_OF["sdpa"](func, (ShardTensor,), (query, key, value, attn_mask, scale, enable_gqa), {})


FUNCTIONS[F.scaled_dot_product_attention] = sdpa


def _ring_axis(q: Tensor, k: Tensor, v: Tensor) -> int | None:
    """The one mesh axis that cuts the sequence of all three alike in dims, when every other cut is the same too."""
    if not all(isinstance(t, ShardTensor) and t.ndim == q.ndim and t.ndim >= 3 for t in (q, k, v)):
        return None
    specs = [whole_values(t._spec) for t in (q, k, v)]  # type: ignore[attr-defined]
    axis = specs[0].axis_of(q.ndim - 2)
    if (
        axis is None
        or specs[0].layout.shape[axis] == 1
        or q.shape[:-2] != k.shape[:-2]
        or k.shape[-2] != v.shape[-2]
        or q.shape[-1] != k.shape[-1]
    ):
        return None
    if (
        any(s.cuts != specs[0].cuts for s in specs)
        or q.ndim - 1 in specs[0].cuts
        or specs[1].sizes[axis] != specs[2].sizes[axis]
    ):
        return None
    others = [[z for a, z in enumerate(s.sizes) if a != axis] for s in specs]
    same = others[0] == others[1] == others[2] and specs[0].layout is specs[1].layout is specs[2].layout
    return axis if same and q.dtype is k.dtype is v.dtype and q.numel() and k.numel() else None


def _ring(q: Any, k: Any, v: Any, axis: int, causal: bool, scale: float | None) -> Any:
    spec = whole_values(q._spec)
    locals_ = [to_shard(t, whole_values(t._spec)) for t in (q, k, v)]
    out = ring_attention(
        *locals_,
        q_sizes=spec.sizes[axis],
        kv_sizes=k._spec.sizes[axis],
        group=spec.layout.groups[axis],
        causal=causal,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
    )
    return global_of(out, spec, spec.cuts, spec.sizes)


@rule(name="sdpa")
def _sdpa_rule(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> Dims | None:
    """Batch, heads and queries may be cut; keys and values are brought to each rank whole."""
    ts = [query, key, value, *([attn_mask] if attn_mask is not None else [])]
    n = max(t.ndim for t in ts[:3])
    if n < 2 or any(t.ndim < 2 for t in ts):
        return None
    batch = (
        list(torch.broadcast_shapes(*[tuple(t.shape[:-2]) for t in ts[:3]]))
        if not enable_gqa
        else list(query.shape[:-2])
    )

    def lead(t: Tensor) -> Labels:
        k = t.ndim - 2
        return tuple(
            None if size != batch[len(batch) - k + i] or size == 1 else len(batch) - k + i
            for i, size in enumerate(t.shape[:-2])
        )

    operands: list[Labels] = [(*lead(query), "n", "d"), (*lead(key), "m", "d"), (*lead(value), "m", "e")]
    whole = {"d", "m"}
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        whole.add(len(batch) - 1)  # type: ignore[arg-type]
    if attn_mask is not None:
        rows, columns = attn_mask.shape[-2:]
        operands.append(
            (*lead(attn_mask), "n" if rows == query.shape[-2] and rows != 1 else None, "m" if columns != 1 else None)
        )

    def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if q.numel() == 0:  # torch asks for at least one query: keep the graph and the shape
            used = [t.sum() * 0 for t in (q, k, v, mask) if t is not None and t.is_floating_point()]
            return sum(used) + v.new_zeros(
                (*torch.broadcast_shapes(q.shape[:-2], v.shape[:-2]), q.shape[-2], v.shape[-1])
            )
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)

    return Dims(operands, [(*range(len(batch)), "n", "e")], local, whole=frozenset(whole))
