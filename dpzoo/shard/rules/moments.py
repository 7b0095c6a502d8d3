"""Variances: ranks exchange mean and sum of squared deviations and merge them by count: a large mean costs no digits.

Merged as in Chan, Golub and LeVeque (1979), in float32 or better, in one gather; the backward pass sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.partition import Sizes
from dpzoo.shard.rules.reducing import Maths, Plan, Reduction, node, reduces, reduction_of
from dpzoo.shard.spec import ShardTensorSpec

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def _counts(r: Reduction) -> Sizes:
    """How many elements of one result each rank of the merged axes holds, in the order of `Reduction.stack`."""
    counts = [1]
    for axis in reversed(r.axes):
        counts = [c * n for c in counts for n in r.spec.sizes[axis]]
    whole = [r.spec.shape[d] for d in r.dims if r.spec.axis_of(d) not in r.axes]
    return tuple(c * math.prod(whole) for c in counts)


def merged_moments(r: Reduction, local: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squared deviations and mean over all shards, both with the reduced dims kept; no autograd."""
    local = local.float() if local.dtype in _HALF else local
    n = math.prod(local.shape[d] for d in r.dims)
    mean = local.sum(r.dims, True) / max(n, 1)
    deviation = (local - mean).square().sum(r.dims, True)
    if not r.axes:
        return deviation, mean if n else mean * math.nan
    means, deviations = r.stack_now(torch.stack((mean, deviation))).unbind(1)
    counts = torch.tensor(_counts(r), dtype=local.dtype, device=local.device).view(-1, *[1] * mean.ndim)
    shift = means[:1]  # an empty rank's 0 has weight 0
    merged = shift + (counts * (means - shift)).sum(0, keepdim=True) / r.count
    return (deviations + counts * (means - merged).square()).sum(0), merged[0]


class _Moments(Maths):
    """Variance or standard deviation, and mean."""

    def __init__(self, correction: float, root: bool, full: bool) -> None:
        self.correction, self.root, self.full = correction, root, full

    def values(self, r: Reduction, local: Tensor) -> tuple[Tensor, ...]:
        """Deviation over the corrected count; NaN or inf, as in torch, where that is not positive."""
        if not r.axes and r.count > self.correction:  # nothing to merge
            op = torch.std_mean if self.root else torch.var_mean
            return op(local, r.dims, correction=self.correction, keepdim=r.keepdim)
        deviation, mean = merged_moments(r, local)
        var = deviation / self._freedom(r)
        out = var.sqrt() if self.root else var
        return r.drop(out).to(local.dtype), r.drop(mean).to(local.dtype)

    def _freedom(self, r: Reduction) -> float:
        return max(0.0, r.count - self.correction)

    def gradient(self, r: Reduction, x: Any, outs: Sequence[Any], grads: Sequence[Any], add: Any) -> Any:
        """Each element's deviation from the mean, scaled."""
        g, g_mean = grads
        total = None
        if g is not None:
            if self.root:
                g = (g / (outs[0] * 2)).masked_fill(outs[0] == 0, 0)
            total = g * self._slope(r, x, outs[1])
        if g_mean is not None:
            share = g_mean / r.count
            total = share if total is None else total + share
        return total

    def _slope(self, r: Reduction, x: Any, mean: Any) -> Any:
        """Derivative of the variance; with too few values it is what torch makes of it."""
        free = r.count - self.correction
        if free <= 0 and self.full:
            return torch.where(x == mean, math.nan, math.inf)
        return (x - mean) * (2 / free if free else math.inf)


def _plan(spec: ShardTensorSpec, args: tuple[Any, ...], options: dict[str, Any], root: bool) -> Plan | None:
    """A `var`-like call in any of torch's spellings; None for what only the whole tensor can answer."""
    if spec.dtype.is_complex or not spec.ndim:
        return None
    names = ["unbiased"] if args and isinstance(args[0], bool) else ["dim", "unbiased", "keepdim"]
    options = {**options, **dict(zip(names, args, strict=False))}
    correction = options.get("correction")
    if correction is None:
        correction = 0 if options.get("unbiased") is False else 1
    r = reduction_of(spec, options.get("dim"), bool(options.get("keepdim", False)))
    return node(_Moments(float(correction), root, options.get("dim") is None), r)


def _moment_op(name: str, root: bool, both: bool, ops: tuple[Any, ...]) -> None:
    def plan(spec: ShardTensorSpec, *args: Any, **options: Any) -> Plan | None:
        pair = _plan(spec, args, options, root)
        return pair if both or pair is None else lambda x: pair(x)[0]

    reduces(name, aten=ops)(plan)


_moment_op("var", False, False, (aten.var.correction,))
_moment_op("std", True, False, (aten.std.correction,))
_moment_op("var_mean", False, True, (aten.var_mean.correction,))
_moment_op("std_mean", True, True, (aten.std_mean.correction,))
