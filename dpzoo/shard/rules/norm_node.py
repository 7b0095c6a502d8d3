"""Normalisation over the whole domain as one node: a few numbers per channel travel, the shard is read in fused passes.

Every (sample, channel) pair of a shard is a line; lines that share a mean and a deviation form a row: all samples of a
channel (batch_norm), the channels of a group (group_norm), or a line alone (instance_norm). Moments of lines are merged
into those of rows, over all shards, by count in float64 (Chan, Golub and LeVeque 1979). On a line the rest is torch's
own kernel for a batch_norm with given statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.bridges import shard_of_grad
from dpzoo.shard.local_bridges import stack_over
from dpzoo.shard.rules.parts import cut_axes
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap

aten = torch.ops.aten


@dataclass(frozen=True)
class Rows:
    """Which lines of a tensor (N, C, ...) share their statistics.

    Attributes:
        groups: number of groups the channels form.
        over_batch: samples share statistics, too (then every channel is a group).
    """

    spec: ShardTensorSpec
    groups: int
    over_batch: bool
    eps: float

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes that cut what a row consists of."""
        spatial = range(2, self.spec.ndim)
        return cut_axes(self.spec, (0, *spatial) if self.over_batch else spatial)

    @property
    def count(self) -> int:
        """Global number of elements of a row."""
        n, c, *rest = self.spec.shape
        return math.prod(rest) * (n if self.over_batch else c // self.groups)

    def join(self, lines: Tensor) -> Tensor:
        """(samples * channels,) as (rows, lines of a row), on this rank."""
        n, c = self.spec.local_shape[:2]
        return lines.view(n, c).t() if self.over_batch else lines.view(n * self.groups, c // self.groups)

    def spread(self, rows: Tensor) -> Tensor:
        """One number per row as one per line, dense: torch's kernels read them without looking at strides."""
        n, c = self.spec.local_shape[:2]
        if self.over_batch:
            return rows.repeat(n)
        return rows.repeat_interleave(c // self.groups)


def merged_moments(lines: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each row, float64; the same on all ranks that share it.

    And memory of the size of `lines` that the caller may write to: to touch new pages costs more than a pass.
    """
    k, length = lines.shape[1:]
    scratch = lines
    if lines.numel():
        # Groups of one channel: one pass of a kernel that adds up by Welford's method (1 / inf where nothing varies).
        scratch, mean, rstd = aten.native_group_norm(lines, None, None, 1, k, length, k, 0.0)
        mean, m2 = mean.flatten().double(), rstd.flatten().double().pow(-2) * length
    else:
        mean = m2 = lines.new_zeros(k, dtype=torch.float64)
    mean, m2 = rows.join(mean), rows.join(m2)
    merged = mean.mean(1, keepdim=True) if mean.shape[1] else mean.sum(1, keepdim=True)
    spread = m2.sum(1) + (mean - merged).square().sum(1) * length
    count = torch.full_like(spread, mean.shape[1] * length)
    if not rows.axes:
        return merged.flatten(), spread / rows.count, scratch
    parts = stack_over(torch.stack((merged.flatten(), spread, count)), rows.spec, rows.axes)
    means, spreads, counts = parts.unbind(1)
    total = (means * counts).sum(0) / rows.count
    return total, (spreads + counts * (means - total).square()).sum(0) / rows.count, scratch


class NormNode(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps) * weight + bias`, and the mean and variance of each row."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardTensor, w: Tensor | None, b: Tensor | None, rows: Rows, composed: Any
    ) -> tuple[ShardTensor, Tensor, Tensor]:
        lines = _lines(x._local_tensor)
        mean, var, scratch = merged_moments(lines, rows)
        per_line = rows.spread(mean).to(lines.dtype), rows.spread(var).to(lines.dtype)
        out = _transform(lines, _tiled(w, rows, lines, 1.0), _tiled(b, rows, lines, 0.0), *per_line, rows.eps, scratch)
        ctx.save_for_backward(x, w, b, *per_line)
        ctx.rows, ctx.composed, ctx.defer = rows, composed, gradients.may_defer()
        local = _as_shard(out, x._local_tensor)
        ctx.out = x._spec.for_local(local)
        ctx.mark_non_differentiable(mean, var)
        return wrap(local, ctx.out), mean, var

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        x, w, b, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *gradients.again(ctx, ctx.composed, (x, w, b), g), None, None
        rows: Rows = ctx.rows
        lines, g_lines = _lines(x._local_tensor), _lines(shard_of_grad(g, ctx.out))
        weight = _tiled(w, rows, lines, 1.0)
        sum_g, sum_gx = _line_sums(g_lines, lines, mean, var, rows.eps)
        found: list[Any] = [None] * 5
        if ctx.needs_input_grad[0]:
            sums = torch.stack((rows.join(sum_g * weight).sum(1), rows.join(sum_gx * weight).sum(1))).double()
            sums = gradients.sum_over(sums, rows.spec.layout.groups_over(rows.axes)) / max(rows.count, 1)
            mean_g, mean_gx = (rows.spread(s).to(lines.dtype) for s in sums)
            rstd = (var + rows.eps).rsqrt()
            gx = _transform(lines, -rstd * mean_gx, -rstd * mean_g, mean, var, rows.eps)
            gx = _as_shard(gx.addcmul_(g_lines, (rstd * weight).view(1, -1, 1)), x._local_tensor)
            found[0] = wrap(gx, x._spec.for_local(gx))
        over = rows.spec.layout.groups_over(cut_axes(rows.spec, range(rows.spec.ndim)))
        for i, (t, sums) in enumerate(((w, sum_gx), (b, sum_g)), 1):
            if t is not None and ctx.needs_input_grad[i]:
                per_channel = sums.view(rows.spec.local_shape[:2]).sum(0).to(t.dtype)
                position = i if w is not None else 1  # among the inputs that are tensors
                found[i] = gradients.weight_grad(ctx, position, per_channel, over)
        return tuple(found)


def _lines(t: Tensor) -> Tensor:
    """(N, C, ...) as (1, N * C, elements), in float32 or better."""
    wide = t.float() if t.dtype.itemsize == 2 else t
    return wide.reshape(1, t.shape[0] * t.shape[1], math.prod(t.shape[2:]))


def _as_shard(lines: Tensor, like: Tensor) -> Tensor:
    """Back to shape, dtype and memory order of the shard."""
    out = lines.view(like.shape)
    if like.is_contiguous() and out.dtype is like.dtype:
        return out
    return torch.empty_like(like).copy_(out)


def _tiled(p: Tensor | None, rows: Rows, like: Tensor, default: float) -> Tensor:
    """A parameter with one number per channel as one per line."""
    n, c = rows.spec.local_shape[:2]
    return like.new_full((n * c,), default) if p is None else p.detach().to(like.dtype).repeat(n)


def _transform(
    lines: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """torch's batch_norm with given statistics; into `out` where there is one."""
    if not lines.numel():
        return torch.empty_like(lines)
    if out is not None:
        saved = {"save_mean": lines.new_empty(0), "save_invstd": lines.new_empty(0)}
        return aten.native_batch_norm.out(lines, weight, bias, mean, var, False, 0.0, eps, out=out, **saved)[0]
    return aten.native_batch_norm(lines, weight, bias, mean, var, False, 0.0, eps)[0]


def _line_sums(g: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sum of g and of g times the normalised x, per line."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    ones = torch.ones_like(mean)
    _, gx, total = aten.native_batch_norm_backward(g, x, ones, mean, var, None, None, False, eps, [False, True, True])
    return total, gx
