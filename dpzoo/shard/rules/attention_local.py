"""Attention that needs nothing of other ranks (batch or heads are cut, or a mesh axis has one rank), as one node.

Only calls of one kernel: self-attention on a CPU in float32 or wider, without mask and dropout. The planned rule serves
the others, with three nodes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad
from dpzoo.shard.kernels import attention_fused as fused
from dpzoo.shard.rules.attention_fold import as_kernels_leave_it
from dpzoo.shard.rules.attention_layout import Call
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing


class LocalAttention:
    """The plan of such a call; queries, keys and values (b, h, n, d) have one shape."""

    def __init__(self, specs: tuple[ShardTensorSpec, ...], call: Call, otherwise: Any) -> None:
        self.like_tokens = specs[0].stride[1] < specs[0].stride[2]
        self.specs = tuple(spec.like(stride=_stride(spec.shape, self.like_tokens)) for spec in specs)
        self._local_strides = tuple(_stride(spec.local_shape, self.like_tokens) for spec in specs)
        self.call, self.otherwise = call, otherwise

    def __call__(self, q: Any, k: Any, v: Any, mask: Any) -> Tensor:
        """Attend, by the planned rule where there is no kernel or a graph is made."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            kernel = None if is_tracing() else fused.find(q._local_tensor, k._local_tensor, v._local_tensor, None)
            if kernel is not None:
                return _AttendLocally.apply(q, k, v, self, kernel)
        elif not is_tracing():
            call = self.call
            out = F.scaled_dot_product_attention(
                q._local_tensor, k._local_tensor, v._local_tensor, None, 0.0, call.causal, scale=call.scale
            )
            return self.wrapped(out, 0)
        return self.otherwise(q, k, v, mask)  # type: ignore[no-any-return]

    def wrapped(self, local: Tensor, operand: int) -> ShardTensor:
        """A shard in the layout of an operand, in the same memory order on all ranks."""
        if local.stride() != self._local_strides[operand]:
            local = as_kernels_leave_it(local, self.like_tokens)
        return wrap(local, self.specs[operand])


def _stride(shape: Sequence[int], like_tokens: bool) -> tuple[int, ...]:
    _, h, n, d = shape
    return (n * h * d, d, h * d, 1) if like_tokens else (h * n * d, n * d, d, 1)


class _AttendLocally(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, plan: LocalAttention, kernel: fused.Kernel) -> ShardTensor:
        call = plan.call
        found, lse = kernel.forward(q._local_tensor, k._local_tensor, v._local_tensor, None, call.causal, call.scale)
        out = plan.wrapped(found, 0)
        ctx.save_for_backward(q, k, v, out._local_tensor, lse)
        ctx.plan, ctx.kernel = plan, kernel
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        plan: LocalAttention = ctx.plan
        if torch.is_grad_enabled():
            return *gradients.again(ctx, lambda *t: _written_out(plan.call, *t), (q, k, v), g), None, None
        local, call = shard_of_grad(g, plan.specs[0]), plan.call
        found = ctx.kernel.backward(
            local, q._local_tensor, k._local_tensor, v._local_tensor, out, lse, None, call.causal, call.scale
        )
        grads = [
            plan.wrapped(d, i) if needed else None
            for i, (d, needed) in enumerate(zip(found, ctx.needs_input_grad, strict=False))
        ]
        return *grads, None, None


def _written_out(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from dpzoo.shard.rules.attention_plan import written_out

    return written_out(call, None, q, k, v, None)


def plan_local(q: Any, k: Any, v: Any, mask: Any, call: Call, otherwise: Any) -> LocalAttention | None:
    """The plan, if the call is of this kind; decided from what all ranks know.

    Args:
        otherwise: serves a call `(q, k, v, mask)` for which there is no kernel.
    """
    if mask is not None or call.dropout > 0.0 or call.grouped or not all(isinstance(t, ShardTensor) for t in (q, k, v)):
        return None
    specs = (q._spec, k._spec, v._spec)
    first = specs[0]
    if first.layout.device_type != "cpu" or first.dtype not in (torch.float32, torch.float64) or first.ndim != 4:
        return None
    for spec in specs:
        if (spec.layout, spec.dtype, spec.shape) != (first.layout, first.dtype, first.shape) or spec.is_partial:
            return None
        for axis, ranks in enumerate(spec.layout.shape):
            if ranks > 1 and (
                (spec.cuts[axis], spec.sizes[axis]) != (first.cuts[axis], first.sizes[axis])
                or spec.cuts[axis] in (2, 3)
            ):
                return None
        if any(0 in sizes for sizes in spec.sizes) or not spec.shape.numel():
            return None
    return LocalAttention(specs, call, otherwise)
