"""scaled_dot_product_attention on sharded sequences.

Queries stay where they are. Keys and values that are cut too are gathered while that is cheap (64 MiB), and travel
around a ring beyond (`kernels/ring_attention.py`), so that no rank holds them whole. `attention_mode` decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import from_shard, partial_over, relayout, to_shard
from dpzoo.shard.dispatch_door import spec_in
from dpzoo.shard.kernels.ring_attention import ring_attention
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, rule
from dpzoo.shard.rules.parts import global_of
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor, wrap

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


def sdpa(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`F.scaled_dot_product_attention` with any operands sharded."""
    return _sdpa(*args, **kwargs)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if attn_mask is not None and is_causal:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    if dropout_p > 0.0:
        if is_causal:
            attn_mask = _causal_mask(query, key)
        return _with_dropout(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    shared = _shared_sequence(query, key, value) if attn_mask is None else None
    if shared is not None and _ring_pays(key, value):
        return _ring(query, key, value, shared, is_causal, scale, enable_gqa)
    if is_causal:
        attn_mask = _causal_mask(query, key)
    elif shared is not None and shared.same_heads and not torch._C._is_any_autocast_enabled():
        return _gathered(query, key, value, shared, scale)
    return RULE_OF["sdpa"](F.scaled_dot_product_attention, (), (query, key, value, attn_mask, scale, enable_gqa), {})


FUNCTIONS[F.scaled_dot_product_attention] = sdpa


def _ring_pays(k: Tensor, v: Tensor) -> bool:
    return _mode == "ring" or (_mode == "auto" and (k.numel() + v.numel()) * k.dtype.itemsize > GATHER_BYTES)


def _causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """Query i sees keys j <= i, by global index."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


# ---------------------------------------------------------------------- one sequence, cut alike for all three
class _Shared(NamedTuple):
    """Queries, keys and values cut along the sequence by one axis, every other cut the same."""

    axis: int
    group: str
    q_sizes: tuple[int, ...]
    kv_sizes: tuple[int, ...]
    same_heads: bool


_SHARED: dict[Any, _Shared | None] = {}


def _shared_sequence(q: Tensor, k: Tensor, v: Tensor) -> _Shared | None:
    if not (isinstance(q, ShardTensor) and isinstance(k, ShardTensor) and isinstance(v, ShardTensor)):
        return None
    specs = (q._spec, k._spec, v._spec)
    if specs not in _SHARED:
        if len(_SHARED) > 4096:
            _SHARED.clear()
        _SHARED[specs] = _find_shared(*specs)
    return _SHARED[specs]


def _find_shared(q: ShardTensorSpec, k: ShardTensorSpec, v: ShardTensorSpec) -> _Shared | None:
    n = q.ndim
    axis = q.axis_of(n - 2)
    if axis is None or q.layout.shape[axis] == 1 or n < 3 or not n == k.ndim == v.ndim:
        return None
    others = [tuple(z for a, z in enumerate(s.sizes) if a != axis) for s in (q, k, v)]
    alike = (
        q.layout is k.layout is v.layout
        and q.cuts == k.cuts == v.cuts
        and others[0] == others[1] == others[2]
        and k.sizes == v.sizes
        and q.dtype is k.dtype is v.dtype
        and k.shape[:-1] == v.shape[:-1]
        and q.shape[:-3] == k.shape[:-3]
        and q.shape[-1] == k.shape[-1]
    )
    whole_channels = n - 1 not in q.cuts and not q.is_partial
    if not (alike and whole_channels and q.shape.numel() and k.shape.numel() and v.shape.numel()):
        return None
    same_heads = q.shape[-3] == k.shape[-3]
    if not same_heads and (q.shape[-3] % k.shape[-3] or n - 3 in q.cuts):
        return None
    return _Shared(axis, q.layout.groups[axis], q.sizes[axis], k.sizes[axis], same_heads)


def _gathered(q: Any, k: Any, v: Any, shared: _Shared, scale: float | None) -> Tensor:
    """Keys and values in one gather, and their gradients in one reduce-scatter."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        whole_k, whole_v = _GatherPair.apply(k, v, shared)
    else:
        whole_k, whole_v = _gather_pair(k._local_tensor, v._local_tensor, shared)
    local = _local_attention(to_shard(q, q._spec), whole_k, whole_v, None, scale, False)
    return from_shard(local, spec_in(local, q._spec.layout, q._spec.cuts, q._spec.sizes))


def _gather_pair(k: Tensor, v: Tensor, shared: _Shared) -> tuple[Tensor, Tensor]:
    both = torch.cat((k, v), -1)
    whole = comm.all_gather_v(both, both.ndim - 2, shared.kv_sizes, shared.group)
    return whole.split((k.shape[-1], v.shape[-1]), -1)  # type: ignore[return-value]


class _GatherPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: ShardTensor, v: ShardTensor, shared: _Shared) -> tuple[Tensor, Tensor]:
        ctx.shared, ctx.specs = shared, (k._spec, v._spec)
        return _gather_pair(k._local_tensor, v._local_tensor, shared)

    @staticmethod
    def backward(ctx: Any, gk: Tensor, gv: Tensor) -> Any:
        shared, (k_spec, v_spec) = ctx.shared, ctx.specs
        if torch.is_grad_enabled():
            return *_pair_home(gk, gv, shared, k_spec, v_spec), None
        both = torch.cat((gk, gv), -1)
        mine = comm.reduce_scatter_v(both, both.ndim - 2, shared.kv_sizes, shared.group)
        gk, gv = mine.split((gk.shape[-1], gv.shape[-1]), -1)
        return wrap(gk, k_spec.for_local(gk)), wrap(gv, v_spec.for_local(gv)), None


def _pair_home(gk: Tensor, gv: Tensor, shared: _Shared, *specs: ShardTensorSpec) -> tuple[Tensor, Tensor]:
    """The gradients of a gathered pair as a differentiable call, for second derivatives."""
    home = []
    for g, spec in zip((gk, gv), specs, strict=True):
        cuts = [REPLICATED if a == shared.axis else c for a, c in enumerate(spec.cuts)]
        whole = spec.like(cuts=cuts, sizes=[() if a == shared.axis else z for a, z in enumerate(spec.sizes)])
        home.append(relayout(from_shard(g, partial_over(whole.for_local(g), (shared.axis,))), spec))
    return home[0], home[1]


def _ring(q: Any, k: Any, v: Any, shared: _Shared, causal: bool, scale: float | None, enable_gqa: bool) -> Any:
    if not shared.same_heads and not enable_gqa:
        probe(F.scaled_dot_product_attention, q, k, v)  # torch says what is wrong with the heads
    spec = q._spec
    locals_ = [to_shard(t, t._spec) for t in (q, k, v)]
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        locals_ = [t.to(torch.get_autocast_dtype(kind)) for t in locals_]
    if not shared.same_heads:  # every key head serves a group of query heads: broadcast, so that it travels once
        heads = k.shape[-3]
        locals_[0] = locals_[0].unflatten(-3, (heads, q.shape[-3] // heads))
        locals_[1:] = [t.unsqueeze(-3) for t in locals_[1:]]
    out = ring_attention(
        *locals_,
        q_sizes=shared.q_sizes,
        kv_sizes=shared.kv_sizes,
        group=shared.group,
        causal=causal,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else scale,
    )
    if not shared.same_heads:
        out = out.flatten(-4, -3)
    return global_of(out, spec, spec.cuts, spec.sizes)


# ---------------------------------------------------------------------- any other layout
def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Attention written out, since the dropped weights must not depend on how the scores are cut."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is None:
        weights = scores.softmax(-1)
    elif mask.dtype is torch.bool:  # a query that sees no key gets zeros
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).masked_fill(~mask, 0.0)
    else:
        weights = (scores + mask).softmax(-1)
    return F.dropout(weights, p).to(v.dtype) @ v


@rule(name="sdpa")
def _sdpa_rule(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> Dims | None:
    """Batch, heads and queries may be cut; keys and values are brought to each rank whole."""
    if any(t.ndim < 2 for t in (query, key, value) if t is not None):
        return None
    probe(F.scaled_dot_product_attention, query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa)
    batch = _batch(query, key, value, enable_gqa)

    def lead(t: Tensor) -> Labels:
        first = len(batch) - (t.ndim - 2)
        return tuple(None if n != batch[first + i] or n == 1 else first + i for i, n in enumerate(t.shape[:-2]))

    operands: list[Labels] = [(*lead(query), "n", "d"), (*lead(key), "m", "d"), (*lead(value), "m", "e")]
    whole = frozenset[Any](["d", "m"])
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        whole |= {len(batch) - 1}
    if attn_mask is not None:
        rows, columns = attn_mask.shape[-2:]
        operands.append((*lead(attn_mask), None if rows == 1 else "n", None if columns == 1 else "m"))

    def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return _local_attention(q, k, v, mask, scale, enable_gqa)

    return Dims(operands, [(*range(len(batch)), "n", "e")], local, whole=whole)


def _batch(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Leading dims of the result; with grouped queries the heads are those of the queries."""
    if not enable_gqa:
        return torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    return *torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]), q.shape[-3]


def _local_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> Tensor:
    if q.numel():
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    # torch asks for at least one query: keep the graph and the shape
    batch = _batch(q, k, v, enable_gqa)
    used = [t.sum() * 0 for t in (q, k, v, mask) if t is not None and t.is_floating_point()]
    return sum(used) + v.new_zeros((*batch, q.shape[-2], v.shape[-1]))
