"""Attention over a cut sequence, planned once per layout: who holds what during the call, and how keys reach queries.

One mesh axis cuts the keys. If it cuts the queries too, ring, gather or ulysses brings them together; if every rank
holds the queries, each rank sees its own keys and the parts are joined. The other mesh axes cut what the solver says
(batch, heads, channels of the values). Everything is one autograd node from ShardTensors to a ShardTensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard import gradients, random
from dpzoo.shard.bridges import relayout, shard_of_grad
from dpzoo.shard.dispatch_door import spec_in
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.fallback import replicate
from dpzoo.shard.kernels.attention_block import wide
from dpzoo.shard.kernels.attention_dropout import Dropout
from dpzoo.shard.kernels.attention_method import Method, as_dtype
from dpzoo.shard.kernels.attention_parts import Rules
from dpzoo.shard.kernels.gather_attention import GatherAttention
from dpzoo.shard.kernels.ring_attention import RingAttention
from dpzoo.shard.kernels.split_keys import SplitKeys
from dpzoo.shard.kernels.ulysses import UlyssesAttention
from dpzoo.shard.partition import Sizes
from dpzoo.shard.plan import AxisChoice, Dims, Label, Labels, Operand, choose, layout_of
from dpzoo.shard.registry import RULE_OF
from dpzoo.shard.rules.attention_choice import LINKS, Choice, choose_mode
from dpzoo.shard.rules.attention_fold import as_kernels_leave_it, folded, folded_mask, in_token_order, unfolded_mask
from dpzoo.shard.rules.attention_layout import (
    Call,
    folded_lead,
    labels_of,
    sequence_axis,
    with_axis,
    without_axis,
    work_of,
)
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing

_OUT = -1  # the place of the result, among those of the operands
Operands = tuple[Any, Any, Any, Any]  # query, key, value, mask or None


def plan_sequence(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> SequencePlan | None:
    """The plan of a call whose operands have equal lead dims; None for what the planned rule serves better."""
    tensors = [t for t in (q, k, v, mask) if t is not None]
    layout, axis = same_mesh(F.scaled_dot_product_attention, tensors), sequence_axis(tensors)
    if axis is None or not all(t.numel() for t in tensors):
        return None
    q_cut: Any = q._spec.cuts[axis] if isinstance(q, ShardTensor) else REPLICATED
    split = isinstance(q_cut, str) or q_cut == REPLICATED
    if not split and q_cut != q.ndim - 2:
        return None
    labels = labels_of(q, k, v, mask, call.grouped)
    specs = [t._spec if isinstance(t, ShardTensor) else None for t in tensors]
    operands = [
        Operand(tuple(t.shape), t.dtype.itemsize, None if s is None else without_axis(s, axis))
        for t, s in zip(tensors, specs, strict=True)
    ]
    out_labels: Labels = (*range(q.ndim - 2), "n", "e")
    whole: set[Label] = {"m", "d"} if split else {"n", "m", "d"}
    choices = choose(layout, operands, Dims(labels, [out_labels], lambda *_: None, whole=frozenset(whole)))
    kv_sizes = next(
        t._spec.sizes[axis] for t in (k, v) if isinstance(t, ShardTensor) and t._spec.cuts[axis] == k.ndim - 2
    )
    q_sizes = () if split or specs[0] is None else specs[0].sizes[axis]
    return SequencePlan(tensors, labels, out_labels, choices, axis, q_sizes, kv_sizes, call)


class SequencePlan:
    """What every rank does in one kind of call."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        labels: Sequence[Labels],
        out_labels: Labels,
        choices: Sequence[AxisChoice],
        axis: int,
        q_sizes: Sizes,
        kv_sizes: Sizes,
        call: Call,
    ) -> None:
        layout = same_mesh(F.scaled_dot_product_attention, tensors)
        self.call, self.layout, self.axis, self.group = call, layout, axis, layout.groups[axis]
        self.queries, self.keys = tensors[0].shape[-2], tensors[1].shape[-2]
        self._work = work_of(tensors, labels, choices, q_sizes, kv_sizes, call) if q_sizes else None
        self.choice = (
            Choice("split keys", "every rank holds the queries: each sees its own keys, the parts are joined")
            if self._work is None
            else choose_mode(self._work, call.mode, LINKS.get(layout.device_type, LINKS["cuda"]))
        )
        kept = {"ring": "n", "gather": "n", "split keys": "m"}.get(self.choice.mode)  # what is cut in the mask
        self.specs, self.sum_groups = [], []
        for i, (t, names) in enumerate(zip(tensors, labels, strict=True)):
            cut = [("n", q_sizes), ("m", kv_sizes), ("m", kv_sizes), (kept, q_sizes if kept == "n" else kv_sizes)][i]
            cuts, sizes = with_axis(layout_of(names, choices), axis, names, *cut)
            self.specs.append(ShardTensorSpec.make(layout, cuts, sizes, t.shape, t.dtype))
            used = (a for a, c in enumerate(choices) if a == axis or c.label is not None)
            self.sum_groups.append(layout.groups_over(a for a in used if cuts[a] == REPLICATED))
        self.out_cuts, self.out_sizes = with_axis(layout_of(out_labels, choices), axis, out_labels, "n", q_sizes)
        self.method = self._make_method(q_sizes, kv_sizes)
        self._lead: Tensor | None = None
        self._found_specs: dict[Any, ShardTensorSpec] = {}  # of results and gradients, by their strides and dtype
        self._placed_already = all(
            isinstance(t, ShardTensor) and (t._spec.cuts, t._spec.sizes) == (s.cuts, s.sizes)
            for t, s in zip(tensors, self.specs, strict=True)
        )
        self._four = tensors[0].ndim == 4 and not call.grouped
        # torch's kernel for the CPU leaves its result in the order of the queries, where it serves (one head dim).
        order = tensors[0]._spec.stride if isinstance(tensors[0], ShardTensor) else tensors[0].stride()
        self._like_tokens = self._four and order[1] < order[2] and tensors[0].shape[-1] == tensors[2].shape[-1]
        self._plain_rules = Rules(call.scale, call.causal)

    def _make_method(self, q_sizes: Sizes, kv_sizes: Sizes) -> Method:
        choice, group = self.choice, self.group
        if choice.mode == "ring":
            return RingAttention(q_sizes, kv_sizes, group, choice.balanced)
        if choice.mode == "gather":
            return GatherAttention(q_sizes, kv_sizes, group, choice.balanced)
        q, k = self.specs[0], self.specs[1]
        if choice.mode == "ulysses":
            assert choice.cut_dim is not None
            batch, heads, times = folded_lead(q.local_shape, k.local_shape, self.call.grouped)
            return UlyssesAttention(
                q_sizes, kv_sizes, group, choice.cut_dim, heads if choice.cut_dim == 1 else batch, times
            )
        at = q.offsets()[-2]
        return SplitKeys((at, at + q.local_shape[-2]), kv_sizes, group)

    # ------------------------------------------------------------------ running
    def __call__(self, q: Any, k: Any, v: Any, mask: Any) -> Tensor:
        """Bring the operands to their places, attend, wrap."""
        if not self._placed_already:
            like = next(t for t in (q, k, v, mask) if isinstance(t, ShardTensor))
            q, k, v = (self._placed(t, spec, like) for t, spec in zip((q, k, v), self.specs, strict=False))
            if mask is not None:
                mask = self._placed(mask, self.specs[3], like)
        dropout = (random.next_key(q._spec), self.call.dropout) if self.call.dropout > 0.0 else None
        if torch.is_grad_enabled():
            return _Attend.apply(q, k, v, mask, self, dropout)
        mask_shard = None if mask is None else mask._local_tensor
        out, _ = self.forward(q._local_tensor, k._local_tensor, v._local_tensor, mask_shard, self.rules(dropout, q))
        return wrap(out, self.out_spec(out))

    def _placed(self, t: Tensor, spec: ShardTensorSpec, like: ShardTensor) -> ShardTensor:
        if not isinstance(t, ShardTensor):
            t = replicate(t, like)
        return relayout(t, spec)

    def out_spec(self, out: Tensor) -> ShardTensorSpec:
        """Layout of the result, given its shard."""
        return self._spec_of(_OUT, out, self.out_cuts, self.out_sizes)

    def grad_spec(self, i: int, d: Tensor) -> ShardTensorSpec:
        """Layout of the gradient of operand `i`, given its shard."""
        return self._spec_of(i, d, self.specs[i].cuts, self.specs[i].sizes)

    def _spec_of(self, place: int, local: Tensor, cuts: Sequence[Cut], sizes: Sequence[Sizes]) -> ShardTensorSpec:
        key = (place, local.stride(), local.dtype)
        found = self._found_specs.get(key)
        if found is None:
            if len(self._found_specs) > 64:
                self._found_specs.clear()
            found = self._found_specs[key] = spec_in(local, self.layout, tuple(cuts), tuple(sizes))
        return found

    def rules(self, dropout: tuple[random.Key, float] | None, like: ShardTensor) -> Rules:
        """What holds for all scores of this rank."""
        if dropout is None:
            return self._plain_rules
        lead = self._lead
        if lead is None or is_tracing():
            lead = self._lead_index(like.device)
            self._lead = None if is_tracing() else lead  # a tensor of a graph is of no use outside it
        key, p = dropout
        return Rules(self.call.scale, self.call.causal, Dropout(key, p, lead, self.queries, self.keys))

    def _lead_index(self, device: torch.device) -> Tensor:
        spec = self.specs[0]
        index = torch.arange(math.prod(spec.shape[:-2]), device=device).view(spec.shape[:-2])
        for dim, at in enumerate(spec.offsets()[:-2]):
            index = index.narrow(dim, at, spec.local_shape[dim])
        return folded(index[..., None, None], self.call.grouped, query=True)[..., 0, 0]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rules: Rules
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The shard of the result from shards, and what backward needs."""
        grouped = self.call.grouped
        if self._four and mask is None:
            out, kept = self.method.forward(q, k, v, None, rules)
            return as_kernels_leave_it(out, self._like_tokens), kept
        out, kept = self.method.forward(
            folded(q, grouped, query=True),
            folded(k, grouped),
            folded(v, grouped),
            None if mask is None else folded_mask(mask, q.shape, grouped),
            rules,
        )
        return as_kernels_leave_it(out, self._like_tokens).reshape(*q.shape[:-1], v.shape[-1]), kept

    def backward(
        self, g: Tensor, locals_: Operands, kept: tuple[Tensor, ...], rules: Rules, mask_grad: bool
    ) -> list[Tensor | None]:
        """Gradients of the shards; sums over ranks are not yet made."""
        q, k, v, mask = locals_
        grouped = self.call.grouped
        if self._four and mask is None:
            dq, dk, dv, _ = self.method.backward(g, q, k, v, None, kept, rules, False)
            return [in_token_order(dq), dk, dv, None]
        dq, dk, dv, dmask = self.method.backward(
            folded(g, grouped, query=True),
            folded(q, grouped, query=True),
            folded(k, grouped),
            folded(v, grouped),
            None if mask is None else folded_mask(mask, q.shape, grouped),
            kept,
            rules,
            mask_grad,
        )
        home = [in_token_order(dq).reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)]
        return [*home, None if dmask is None else unfolded_mask(dmask, mask.shape, q.shape, grouped)]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, plan: SequencePlan, dropout: Any) -> ShardTensor:
        rules = plan.rules(dropout, q)
        mask_shard = None if mask is None else mask._local_tensor
        out, kept = plan.forward(q._local_tensor, k._local_tensor, v._local_tensor, mask_shard, rules)
        ctx.save_for_backward(q, k, v, mask, *kept)
        ctx.plan, ctx.rules, ctx.dropout = plan, rules, dropout
        made = wrap(out, plan.out_spec(out))
        ctx.out_spec = made._spec
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        operands, kept = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        plan, needed = ctx.plan, ctx.needs_input_grad
        if torch.is_grad_enabled():
            return (
                *gradients.again(ctx, lambda *t: written_out(plan.call, ctx.dropout, *t), operands, g),
                None,
                None,
            )
        local = shard_of_grad(g, ctx.out_spec)
        shards: Any = tuple(None if t is None else t._local_tensor for t in operands)
        if torch._C._is_any_autocast_enabled():
            with torch.amp.autocast("cpu", enabled=False), torch.amp.autocast("cuda", enabled=False):
                found = plan.backward(local, shards, kept, ctx.rules, needed[3])
        else:
            found = plan.backward(local, shards, kept, ctx.rules, needed[3])
        grads: list[Any] = [None] * 6
        for i, (t, d) in enumerate(zip(operands, found, strict=True)):
            if d is None or not needed[i]:
                continue
            for group in plan.sum_groups[i]:
                d = comm.all_reduce(wide(d), group)
            d = as_dtype(d, t.dtype)
            grads[i] = wrap(d, plan.grad_spec(i, d))
        return tuple(grads)


def written_out(call: Call, dropout: Any, q: Any, k: Any, v: Any, mask: Any) -> Tensor:
    """The same result from ops that can be differentiated again."""
    arguments = written_out_arguments(q, k, v, mask, call, dropout)
    return RULE_OF["sdpa"](F.scaled_dot_product_attention, (), arguments, {})


def written_out_arguments(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Call, dropout: Any
) -> tuple[Any, ...]:
    """Arguments of the planned rule for scores that are written out, with the global numbers of rows and heads."""
    rows = torch.arange(q.shape[-2], device=q.device) if call.causal or dropout else None
    if dropout is None:
        return q, k, v, mask, rows, None, None, call, True
    lead_shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    lead = torch.arange(math.prod(lead_shape), device=q.device).view(lead_shape)
    key = dropout[0] - (1 << 64) if dropout[0] >= 1 << 63 else dropout[0]
    return q, k, v, mask, rows, lead, torch.tensor(key), call, True  # a tensor: the plan is cached for every key
