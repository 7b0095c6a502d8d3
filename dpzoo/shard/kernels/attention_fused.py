"""The fused attention kernels of torch that also give the log-sum-exp, one class for each device.

Their schemas are torch's own business, and what they call log-sum-exp has differed between releases. So a kernel is
believed only after it reproduced a small case, forward and backward, on this device and in this dtype; otherwise the
scores are written out. They also obey `torch.nn.attention.sdpa_kernel`. None of this changes what is communicated.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.tracing import is_tracing

aten = torch.ops.aten
_CPU_FORWARD = torch._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Forward and backward of one block; see `attention_block.py` for shapes."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output and natural log-sum-exp."""
        ...

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Gradients of q, k and v, given the output and log-sum-exp over all keys."""
        ...


def find(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Kernel | None:
    """A kernel that takes these operands, or None."""
    kernel = _candidate(q.device.type, q.dtype, mask is not None)
    if kernel is None:
        return None
    key = (q.device.type, q.dtype, q.shape[-1], v.shape[-1], mask is not None, q.shape[1] != k.shape[1])
    trusted = _TRUSTED.get(key)
    if trusted is None:
        if is_tracing():
            return kernel
        if len(_TRUSTED) > 1024:
            _TRUSTED.clear()
        trusted = _TRUSTED[key] = _reproduces(kernel, q, v.shape[-1], mask is not None, q.shape[1] != k.shape[1])
    return kernel if trusted else None


_TRUSTED: dict[Any, bool] = {}
_CPU_TYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))


def _candidate(device: str, dtype: torch.dtype, masked: bool) -> Kernel | None:
    if device == "cpu":
        return _CPU if dtype in _CPU_TYPES and torch._C._get_flash_sdp_enabled() else None
    half = dtype in (torch.float16, torch.bfloat16)
    if device != "cuda" or masked:
        return None
    if half and torch.backends.cuda.flash_sdp_enabled():
        return _FLASH
    if (half or dtype is torch.float32) and torch.backends.cuda.mem_efficient_sdp_enabled():
        return _EFFICIENT
    return None


# ---------------------------------------------------------------------- CPU
class _Cpu:
    """Takes any mask and grouped heads; wants one head dim for keys and values."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        e = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        out, lse = _CPU_FORWARD(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return _narrow(out, e), lse

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Gradients:
        d, e = q.shape[-1], v.shape[-1]
        q, k, v = _same_width(q, k, v)
        dq, dk, dv = _CPU_BACKWARD(
            _padded(g, q.shape[-1]), q, k, v, _padded(out, q.shape[-1]), lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return _narrow(dq, d), _narrow(dk, d), _narrow(dv, e)


# ---------------------------------------------------------------------- CUDA
class _Flash:
    """Half precision; head dims are filled up to a multiple of 8."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        e = v.shape[-1]
        q, k, v = _same_width(q, *_each_head(q, k, v), multiple=8)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return _narrow(out, e), lse[..., : q.shape[-2]]

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Gradients:
        d, e, heads = q.shape[-1], v.shape[-1], k.shape[1]
        q, k, v = _same_width(q, *_each_head(q, k, v), multiple=8)
        width, n, m = q.shape[-1], q.shape[-2], k.shape[-2]
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # state of a dropout that is not asked for
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            _padded(g, width).contiguous(), q, k, v, _padded(out, width), lse.contiguous(),
            None, None, n, m, 0.0, causal, unused, unused, scale=scale,
        )  # fmt: skip
        return _narrow(dq, d), _group_sum(_narrow(dk, d), heads), _group_sum(_narrow(dv, e), heads)


class _Efficient:
    """Any floating dtype but float64; rows of the log-sum-exp are filled up to a multiple of 32."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        e = v.shape[-1]
        q, k, v = _same_width(q, *_each_head(q, k, v), multiple=8)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return _narrow(out, e), lse[..., : q.shape[-2]]

    def backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        bias: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Gradients:
        d, e, heads = q.shape[-1], v.shape[-1], k.shape[1]
        q, k, v = _same_width(q, *_each_head(q, k, v), multiple=8)
        width, rows = q.shape[-1], -(-q.shape[-2] // 32) * 32
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            _padded(g, width).contiguous(), q, k, v, None, _padded(out, width),
            F.pad(lse, (0, rows - lse.shape[-1]), value=float("inf")),
            unused, unused, 0.0, [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return _narrow(dq, d), _group_sum(_narrow(dk, d), heads), _group_sum(_narrow(dv, e), heads)


_CPU, _FLASH, _EFFICIENT = _Cpu(), _Flash(), _Efficient()


# ---------------------------------------------------------------------- fitting operands
def _same_width(q: Tensor, k: Tensor, v: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Head dims of one size: zeros add nothing to a product, and their columns of the output are dropped."""
    width = -(-max(q.shape[-1], v.shape[-1]) // multiple) * multiple
    return _padded(q, width), _padded(k, width), _padded(v, width)


def _padded(t: Tensor, width: int) -> Tensor:
    if t.shape[-1] != width:
        t = F.pad(t, (0, width - t.shape[-1]))
    return t if t.stride(-1) == 1 else t.contiguous()  # the kernels believe that a head lies in one piece


def _narrow(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else t[..., :width]


def _each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def _group_sum(g: Tensor, heads: int) -> Tensor:
    return g if g.shape[1] == heads else g.unflatten(1, (heads, -1)).sum(2)


# ---------------------------------------------------------------------- trust
def _reproduces(kernel: Kernel, like: Tensor, value_width: int, masked: bool, grouped: bool) -> bool:
    """Does the kernel agree with attention written out, as one block of two?"""
    generator = torch.Generator().manual_seed(0)
    heads, half = 2, like.dtype in (torch.float16, torch.bfloat16)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    q, g = draw(1, heads, 5, like.shape[-1]), draw(1, heads, 5, value_width)
    k, v = (draw(1, 1 if grouped else heads, 5, w) for w in (like.shape[-1], value_width))
    bias = draw(1, 1, 5, 5) if masked else None
    exact = [t.double() for t in (q, k, v)]
    other = [draw(*t.shape).double() for t in (k, v)]
    try:
        return all(
            _agrees(kernel, (q, k, v), g, bias, causal, exact, other, 3e-2 if half else 1e-4)
            for causal in ([False] if masked else [False, True])
        )
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return False


def _agrees(
    kernel: Kernel,
    given: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    bias: Tensor | None,
    causal: bool,
    exact: list[Tensor],
    other: list[Tensor],
    tolerance: float,
) -> bool:
    scale, n = exact[0].shape[-1] ** -0.5, exact[0].shape[-2]
    times = exact[0].shape[1] // exact[1].shape[1]
    own = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # a user's hooks see nothing of the trial
    with torch.inference_mode(False), torch.enable_grad(), own:
        q, k, v = (t.clone().requires_grad_() for t in exact)
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device)
        s = (q @ k.repeat_interleave(times, 1).mT * scale).masked_fill(~(seen.tril() if causal else seen), -torch.inf)
        s = s if bias is None else s + bias.double()
        lse = s.logsumexp(-1)
        # As one block of two: backward must take an output and a log-sum-exp that cover other keys as well.
        every = torch.cat([s, q.detach() @ other[0].repeat_interleave(times, 1).mT * scale], -1)
        values = torch.cat([v, other[1]], -2).repeat_interleave(times, 1)
        whole = every.softmax(-1) @ values
        wanted = torch.autograd.grad(whole, (q, k, v), g.double())
    out, found_lse = kernel.forward(*given, bias, causal, scale)
    found = kernel.backward(
        g, *given, whole.detach().to(g.dtype), every.detach().logsumexp(-1).to(found_lse.dtype), bias, causal, scale
    )
    pairs = [
        (out.double(), (s.softmax(-1) @ v.repeat_interleave(times, 1)).detach()),
        (found_lse.double(), lse.detach()),
        *((a.double(), b) for a, b in zip(found, wanted, strict=True)),
    ]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)
