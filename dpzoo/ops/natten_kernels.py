"""NATTEN's fused kernels, where they can serve: on CUDA, with its compiled library, without a bias table.

They want a head dim that they know, so narrower ones are padded with zeros and the scale is said explicitly; and as
many queries as keys, so where the queries are a part of the domain they are padded to the region of the keys and the
extra rows dropped. Windows in that region are those of the domain if it starts and ends either at the domain's border
or so far away that no window is shifted; `serve` checks this.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.ops.masked_attention import wide_dtype
from dpzoo.ops.neighborhood_blocks import Geometry

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (32, 64, 128, 256)


def serve(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, at: Geometry) -> bool:
    """Can NATTEN compute this, and is it installed with its kernels?"""
    return (
        may_serve(q.device)
        and bias is None
        and q.dtype in DTYPES
        and max(q.shape[-1], v.shape[-1]) <= HEAD_DIMS[-1]
        and q.numel() > 0
        and _region_is_exact(q, k, at)
    )


def may_serve(device: torch.device) -> bool:
    """Whether NATTEN computes what it can on such a device."""
    return device.type in DEVICES and _has_kernels()


def attend(q: Tensor, k: Tensor, v: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """Attention (B, *queries, H, E) and its log-sum-exp (B, *queries, H)."""
    out, lse = _call(q, k, v, at)
    # A result of an op may neither be its input nor a part of something larger.
    return out.contiguous().clone(), lse.to(wide_dtype(q.dtype)).contiguous().clone()


def attend_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, at: Geometry) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: forward again, then NATTEN's own backward."""
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_(True) for t in (q, k, v))
        out, _ = _call(q, k, v, at)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _call(q: Tensor, k: Tensor, v: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    from natten.functional import neighborhood_attention_generic

    width = next(n for n in HEAD_DIMS if n >= max(q.shape[-1], v.shape[-1]))
    before = [a - b for a, b in zip(at.q_start, at.k_start, strict=True)]
    sizes = q.shape[1 : 1 + at.ndim]
    pads = [0, width - q.shape[-1], 0, 0]
    for n, first, size in reversed(list(zip(k.shape[1 : 1 + at.ndim], before, sizes, strict=True))):
        pads += [first, n - first - size]
    out, lse = neighborhood_attention_generic(
        F.pad(q, pads),
        F.pad(k, (0, width - k.shape[-1])),
        F.pad(v, (0, width - v.shape[-1])),
        kernel_size=tuple(a.kernel for a in at.axes),
        stride=tuple(a.stride for a in at.axes),
        dilation=tuple(a.dilation for a in at.axes),
        is_causal=tuple(a.causal for a in at.axes),
        scale=at.scale,
        return_lse=True,
    )
    own = (slice(None), *(slice(f, f + s) for f, s in zip(before, sizes, strict=True)))
    return out[own][..., : v.shape[-1]], lse[own]


def _region_is_exact(q: Tensor, k: Tensor, at: Geometry) -> bool:
    """Do the windows of the region of the keys, taken as a domain of its own, agree with those of the domain?"""
    for d, axis in enumerate(at.axes):
        size, first = k.shape[1 + d], at.k_start[d]
        if size == axis.n:
            continue
        if axis.stride != 1 or size < axis.kernel * axis.dilation:
            return False
        if not _windows_agree(axis, at.q_start[d], q.shape[1 + d], first, size):
            return False
    return True


@lru_cache(maxsize=1024)
def _windows_agree(axis: Any, q_start: int, q_size: int, k_start: int, k_size: int) -> bool:
    """Compare the two windows of every query along one dim."""
    region = type(axis)(k_size, axis.kernel, axis.stride, axis.dilation, axis.causal)
    d = axis.dilation
    for i in range(q_start, q_start + q_size):
        whole = axis.window(i // d, axis.group_size(i % d))
        at = i - k_start
        part = region.window(at // d, region.group_size(at % d))
        if (part[0] * d + at % d + k_start, part[1] - part[0]) != (whole[0] * d + i % d, whole[1] - whole[0]):
            return False
    return True


@lru_cache(maxsize=1)
def _has_kernels() -> bool:
    if importlib.util.find_spec("natten") is None:
        return False
    import natten

    return bool(getattr(natten, "HAS_LIBNATTEN", False))
