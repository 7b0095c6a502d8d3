"""Softmax attention of one batch of blocks, with its log-sum-exp, and its gradient from that log-sum-exp.

On a CPU torch's flash kernels do both and never hold the scores. Elsewhere, and where a bias needs a gradient, the
formulas are written out; half precision computes its weights in float32.

Shapes: q (N, H, L, D), k (N, H, S, D), v (N, H, S, E), bias broadcasts to (N, H, L, S) and is -inf where a key is not
seen; every query sees at least one key.
"""

from __future__ import annotations

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which weights and their sums are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention (N, H, L, E) and the log of the sum of exponentials (N, H, L), the latter in the wide dtype."""
    if _has_flash(q, v):
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, lse
    scores = _scores(q, k, bias, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v), lse


def attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    bias_needs_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, when asked for, of the scores (N, H, L, S), which is that of an unbroadcast bias."""
    if _has_flash(q, v) and not bias_needs_grad:
        return *_flash_backward(g, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=scale), None
    weights = (_scores(q, k, bias, scale) - lse.unsqueeze(-1)).exp()
    dv = weights.to(g.dtype).transpose(-1, -2) @ g
    towards = (g @ v.transpose(-1, -2)).to(weights.dtype)
    mean = (g.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    dscores = weights * (towards - mean)
    narrow = (dscores * scale).to(q.dtype)
    return narrow @ k, narrow.transpose(-1, -2) @ q, dv, dscores if bias_needs_grad else None


def attend_differentiably(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The same attention out of ops that can be differentiated any number of times."""
    return _scores(q, k, bias, scale).softmax(-1).to(v.dtype) @ v


def _has_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in _FLASH_DTYPES and q.shape[-1] == v.shape[-1]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).to(wide_dtype(q.dtype)) * scale
    return scores if bias is None else scores + bias
