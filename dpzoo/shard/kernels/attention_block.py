"""Attention of some queries to some keys, with what is needed to join it with other keys: the log-sum-exp.

Forward gives the softmax-weighted values of one block and its natural log-sum-exp; backward takes the output and the
log-sum-exp over *all* keys and gives the block's exact share of every gradient. A fused kernel does both where one
fits (`attention_fused.py`); elsewhere the scores are written out for a chunk of queries at a time, in float32 or wider.

Shapes: q (b, h, n, d), k (b, h / g, m, d), v (b, h / g, m, e), mask broadcastable to (b, h, n, m), lse (b, h, n);
each key head serves g query heads. No size is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpzoo.shard.kernels import attention_fused as fused

CHUNK_BYTES = 16 * 2**20  # scores that are written out at once
NEVER = float("-inf")


@dataclass(frozen=True)
class Scoring:
    """What becomes of the products of queries and keys.

    Attributes:
        scale: factor of the products.
        mask: True where a query sees a key, or a number that is added to the score.
        causal: query i of the block sees its keys up to i; n == m.
        factors: of a slice of the block's queries, what dropout multiplies their weights by (0 or 1 / (1 - p)).
    """

    scale: float
    mask: Tensor | None = None
    causal: bool = False
    factors: Callable[[int, int], Tensor] | None = None


def block_forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Output (0 for a query that sees no key) and log-sum-exp (minus infinity there) of the block."""
    if scoring.factors is None:
        kernel = fused.find(q, k, v, scoring.mask)
        if kernel is not None:
            bias = None if scoring.mask is None else additive(scoring.mask, q.dtype)
            out, lse = kernel.forward(q, k, v, bias, scoring.causal, scoring.scale)
            if scoring.mask is not None:  # what a kernel reports for a row without keys differs
                lse = lse.masked_fill(~_sees(scoring.mask), NEVER)
            return out, lse
    k, v = _for_each_head(q, k), _for_each_head(q, v)
    outs, lses = [], []
    for lo, hi in _chunks(q, k):
        s = _scores(q, k, scoring, lo, hi)
        lse = s.logsumexp(-1)
        p = (s - _finite(lse).unsqueeze(-1)).exp_()
        if scoring.factors is not None:
            p = p * scoring.factors(lo, hi)
        outs.append(p @ wide(v))
        lses.append(lse)
    return _joined(outs), _joined(lses, -1)


def block_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring, mask_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """This block's share of the gradients of q, k, v and (with `mask_grad`) of an additive mask.

    Args:
        g, out, lse: gradient, output and log-sum-exp of the queries over all their keys.
    """
    if scoring.mask is not None:  # exp(score - inf) = 0: a query that sees no key has no share in anything
        lse = lse.masked_fill(lse == NEVER, float("inf"))
    if scoring.factors is None and not mask_grad:
        kernel = fused.find(q, k, v, scoring.mask)
        if kernel is not None:
            bias = None if scoring.mask is None else additive(scoring.mask, q.dtype)
            return *kernel.backward(g, q, k, v, out, lse, bias, scoring.causal, scoring.scale), None
    return _written_out_backward(g, q, k, v, out, lse, scoring, mask_grad)


def _written_out_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring, mask_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    key_shape, value_shape = k.shape, v.shape
    k, v = wide(_for_each_head(q, k)), wide(_for_each_head(q, v))
    g, delta = wide(g), (wide(g) * wide(out)).sum(-1, keepdim=True)
    dqs, dk, dv, dmasks = [], torch.zeros_like(k), torch.zeros_like(v), []
    for lo, hi in _chunks(q, k):
        p = (_scores(q, k, scoring, lo, hi) - lse[..., lo:hi].unsqueeze(-1)).exp_()
        rows = g[..., lo:hi, :]
        dp = rows @ v.transpose(-1, -2)
        if scoring.factors is None:
            dv += p.transpose(-1, -2) @ rows
        else:
            factors = scoring.factors(lo, hi)
            dv += (p * factors).transpose(-1, -2) @ rows
            dp = dp * factors
        ds = p * (dp - delta[..., lo:hi, :])
        if mask_grad:
            assert scoring.mask is not None
            dmasks.append(ds.sum_to_size(_row_part(scoring.mask, lo, hi).shape))
        ds = ds * scoring.scale
        dqs.append(ds @ k)
        dk += ds.transpose(-1, -2) @ wide(q[..., lo:hi, :])
    dmask = None
    if dmasks:
        assert scoring.mask is not None
        dmask = _joined(dmasks) if scoring.mask.shape[-2] > 1 else torch.stack(dmasks).sum(0)
    return _joined(dqs), _each_head_home(dk, key_shape), _each_head_home(dv, value_shape), dmask


def wide(t: Tensor) -> Tensor:
    """Half precision as float32, in which sums are made."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, NEVER)


def _sees(mask: Tensor) -> Tensor:
    """Which queries see some key."""
    return (mask if mask.dtype is torch.bool else mask != NEVER).any(-1)


def _scores(q: Tensor, k: Tensor, scoring: Scoring, lo: int, hi: int) -> Tensor:
    s = wide(q[..., lo:hi, :]) @ wide(k).transpose(-1, -2) * scoring.scale
    if scoring.mask is not None:
        part = _row_part(scoring.mask, lo, hi)
        s = s.masked_fill(~part, NEVER) if part.dtype is torch.bool else s + part
    if scoring.causal:
        rows = torch.arange(lo, hi, device=q.device).unsqueeze(-1)
        s = s.masked_fill(torch.arange(k.shape[-2], device=q.device) > rows, NEVER)
    return s


def _row_part(mask: Tensor, lo: int, hi: int) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., lo:hi, :]


def _chunks(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    n = q.shape[-2]
    row = q.shape[0] * q.shape[1] * k.shape[-2] * max(4, q.element_size())
    step = max(1, CHUNK_BYTES // row)
    for lo in range(0, n, step):
        yield lo, min(n, lo + step)


def _for_each_head(q: Tensor, t: Tensor) -> Tensor:
    """Keys or values once per query head."""
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], 1)


def _each_head_home(g: Tensor, shape: torch.Size) -> Tensor:
    return g if g.shape[1] == shape[1] else g.unflatten(1, (shape[1], -1)).sum(2)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == NEVER, 0.0)


def _joined(parts: list[Tensor], dim: int = -2) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
