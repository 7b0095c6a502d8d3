"""scaled_dot_product_attention on sharded sequences: every operand and mask may be cut on every dim.

Keys that are cut along the sequence are met by `attention_plan.py` (ring, gather, ulysses or split keys); every other
layout is an ordinary planned rule, in which batch, heads and queries may be cut and keys and values are whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dpzoo.shard import random
from dpzoo.shard.kernels.attention_block import wide
from dpzoo.shard.kernels.attention_dropout import Dropout
from dpzoo.shard.plan import Dims, Labels, probe
from dpzoo.shard.registry import RULE_OF, rule
from dpzoo.shard.rules.attention_choice import Choice, attention_mode, current_mode
from dpzoo.shard.rules.attention_layout import Call, labels_of
from dpzoo.shard.rules.attention_local import plan_local
from dpzoo.shard.rules.attention_plan import SequencePlan, plan_sequence, written_out_arguments
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor
from dpzoo.shard.tracing import is_tracing, numbers

__all__ = ["attention_choices", "attention_mode"]

_MAX_PLANS = 4096
_PLANS: dict[Any, Callable[..., Any]] = {}


def attention_choices() -> list[tuple[str, Choice]]:
    """Layouts of attention met so far with keys that are cut, and the way each goes, with the reason."""
    return [
        (", ".join(spec.describe() for spec in plan.specs), plan.choice)
        for plan in _PLANS.values()
        if isinstance(plan, SequencePlan)
    ]


def sdpa(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`F.scaled_dot_product_attention` with any operands sharded."""
    if is_tracing():
        args, kwargs = numbers((args, kwargs))
    return _sdpa(*args, **kwargs)


def _sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if torch._C._is_any_autocast_enabled():
        return _autocast(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    mode = current_mode()
    key_of = (_id(query), _id(key), _id(value), _id(attn_mask), dropout_p, is_causal, scale, enable_gqa, mode)
    plan = _PLANS.get(key_of)
    if plan is not None:
        return plan(query, key, value, attn_mask)
    q, k, v, mask = (
        ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else t for t in (query, key, value, attn_mask)
    )
    _refuse_what_torch_refuses(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    call = Call(1.0 / math.sqrt(max(1, q.shape[-1])) if scale is None else scale, is_causal, dropout_p, False, mode)
    heads = (k.shape[-3], v.shape[-3]) if enable_gqa and q.ndim > 2 else ()
    if heads and heads != (q.shape[-3],) * 2:
        q, k, v, mask, call = _grouped(q, k, v, mask, call)
        return _attention(q, k, v, mask, call, None).flatten(-4, -3)
    return _attention(q, k, v, mask, call, key_of)


def _not_nested(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Asked by `nn.TransformerEncoder` before it packs padded samples: a cut sequence takes the ordinary way."""
    return False


FUNCTIONS[F.scaled_dot_product_attention] = sdpa
FUNCTIONS[torch._nested_tensor_from_mask_left_aligned] = _not_nested


def _id(t: Any) -> Any:
    """What a plan depends on."""
    if t is None or t.__class__ is ShardTensor:
        return None if t is None else t._spec
    return t._spec if isinstance(t, ShardTensor) else (t.__class__, t.shape, t.dtype)


def _attention(q: Any, k: Any, v: Any, mask: Any, call: Call, key_of: Any) -> Any:
    """Operands as torch takes them, or grouped: find the plan, or leave the call to the planned rule."""
    if key_of is None:
        key_of = (_id(q), _id(k), _id(v), _id(mask), call)
        plan = _PLANS.get(key_of)
        if plan is not None:
            return plan(q, k, v, mask)
    spread = _spread(q, k, v, call.grouped)
    sequence = plan_sequence(*spread, mask, call)
    planned = partial(_planned, call)
    plan = sequence or plan_local(q, k, v, mask, call, planned) or planned
    if sequence is None or all(a is b for a, b in zip(spread, (q, k, v), strict=True)):
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key_of] = plan
    if sequence is None:
        return plan(q, k, v, mask)
    out = plan(*spread, mask)
    return out if q.ndim > 2 else out.squeeze(0)


def _planned(call: Call, q: Any, k: Any, v: Any, mask: Any) -> Any:
    if call.dropout > 0.0:
        sharded = next(t for t in (q, k, v, mask) if isinstance(t, ShardTensor))
        dropout = (random.next_key(sharded._spec), call.dropout)
        return RULE_OF["sdpa"](
            F.scaled_dot_product_attention, (), written_out_arguments(q, k, v, mask, call, dropout), {}
        )
    rows = torch.arange(q.shape[-2], device=q.device) if call.causal else None
    return RULE_OF["sdpa"](F.scaled_dot_product_attention, (), (q, k, v, mask, rows, None, None, call, False), {})


# ---------------------------------------------------------------------- before planning
def _autocast(q: Any, k: Any, v: Any, mask: Any, p: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    """Cast as autocast would, then run without it: what is inside has dtypes of its own."""
    kind = next(t for t in (q, k, v, mask) if isinstance(t, ShardTensor)).device.type
    if torch.is_autocast_enabled(kind):
        to = torch.get_autocast_dtype(kind)
        q, k, v, mask = (
            t.to(to) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t
            for t in (q, k, v, mask)
        )
    with torch.amp.autocast("cpu", enabled=False), torch.amp.autocast("cuda", enabled=False):
        return _sdpa(q, k, v, mask, p, causal, scale, gqa)


def _refuse_what_torch_refuses(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, gqa: bool
) -> None:
    if mask is not None and causal:
        raise RuntimeError("scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True")
    probe(F.scaled_dot_product_attention, q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa)


def _grouped(q: Any, k: Any, v: Any, mask: Any, call: Call) -> tuple[Any, Any, Any, Any, Call]:
    """Grouped queries as one more dim, along which keys and values are broadcast."""
    heads = q.shape[-3]
    if k.shape[-3] != v.shape[-3]:
        k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
    groups = (k.shape[-3], heads // k.shape[-3])
    if mask is not None and mask.ndim > 2:
        mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, groups)
    call = call._replace(grouped=True)
    return q.unflatten(-3, groups), k.unsqueeze(-3), v.unsqueeze(-3), mask, call


def _spread(q: Any, k: Any, v: Any, grouped: bool) -> tuple[Any, Any, Any]:
    """Lead dims of one size, and at least one of them."""
    if q.ndim == k.ndim == v.ndim == 2:
        return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    own = 1 if grouped else 0  # the last lead dim of grouped queries is theirs alone
    leads = [t.shape[: t.ndim - 2 - own] for t in (q, k, v)]
    if leads[0] == leads[1] == leads[2]:
        return q, k, v
    lead = torch.broadcast_shapes(*leads)
    return tuple(t.expand(*lead, *t.shape[t.ndim - 2 - own :]) for t in (q, k, v))  # type: ignore[return-value]


# ---------------------------------------------------------------------- keys and values whole on every rank
@rule(name="sdpa")
def _sdpa_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    rows: Tensor | None,
    lead: Tensor | None,
    key_of_dropout: Tensor | None,
    call: Call,
    written_out: bool,
) -> Dims | None:
    """Batch, heads and queries may be cut. `rows` and `lead` number the queries and the lead dims globally."""
    if any(t.ndim < 2 for t in (query, key, value)):
        return None
    operands = labels_of(query, key, value, attn_mask, call.grouped)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    has_mask, has_rows = attn_mask is not None, rows is not None
    if has_rows:
        operands.append(("n",))
    if lead is not None:
        operands += [tuple(range(len(batch))), ()]
    shape = (query.shape[-2], key.shape[-2])

    def local(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        left = iter(rest)
        mask = next(left) if has_mask else None
        at = next(left) if has_rows else None
        if written_out:
            return _written_out(q, k, v, mask, at, list(left), call, shape)
        causal = call.causal and q.shape[-2] == shape[0]
        if call.causal and not causal and at is not None:
            mask = at.unsqueeze(-1) >= torch.arange(shape[1], device=q.device)
        return _local_attention(q, k, v, mask, causal, call)

    whole: frozenset[Any] = frozenset(["d", "m"])
    out: Labels = (*range(len(batch)), "n", "e")
    return Dims(operands, [out], local, whole=whole)


def _local_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, call: Call) -> Tensor:
    filled = q.numel() and v.numel()
    if filled and not call.grouped:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.scale)
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if not filled:  # torch asks for a query, and of no output forgets the mask: keep graph and shape
        used = [t.sum() * 0 for t in (q, k, v, mask) if t is not None and t.is_floating_point()]
        return sum(used) + v.new_zeros((*lead, q.shape[-2], v.shape[-1]))
    q = q.expand(*lead, *q.shape[-2:]).flatten(-4, -3)
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*mask.shape[:-4], *lead[-2:], *mask.shape[-2:]).flatten(-4, -3)
    k, v = k.squeeze(-3), v.squeeze(-3)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.scale, enable_gqa=True)
    return out.unflatten(-3, lead[-2:])


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rows: Tensor | None,
    dropping: list[Tensor],
    call: Call,
    shape: tuple[int, int],
) -> Tensor:
    """Attention of ops that can be differentiated any number of times."""
    dtype = q.dtype
    q, k, v = wide(q), wide(k), wide(v)
    scores = q @ k.transpose(-2, -1) * call.scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
    if call.causal:
        assert rows is not None
        scores = scores.masked_fill(rows.unsqueeze(-1) < torch.arange(shape[1], device=q.device), float("-inf"))
    hidden = scores == float("-inf")
    blind = hidden.all(-1, keepdim=True)  # a query that sees no key gets zeros, and gives no gradient
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    if dropping:
        assert rows is not None
        lead, key = dropping
        drop = Dropout(int(key), call.dropout, lead, *shape)
        weights = weights * drop.factors_at(rows, torch.arange(shape[1], device=q.device), weights)
    return (weights @ v).to(dtype)
