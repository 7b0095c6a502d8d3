"""Neighborhood attention: every token of a grid attends to the tokens in a window around it.

`na1d`, `na2d`, `na3d` have the layout and the arguments of NATTEN >= 0.20, and its rule at the border (the window is
shifted, not padded; see `neighborhood_window.py`). They run on any device, in every floating dtype and head dim,
forward and backward, in plain torch; on CUDA NATTEN's kernels serve where they are installed and can.

Each call is one `torch.library` op, so that torch.compile sees one node, and a tensor subclass can answer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.ops import natten_kernels, neighborhood_blocks
from dpzoo.ops.masked_attention import wide_dtype
from dpzoo.ops.neighborhood_arguments import (
    autocast,
    causal_per_dim,
    check_bias,
    check_fits,
    check_tensors,
    per_dim,
)
from dpzoo.ops.neighborhood_blocks import Geometry
from dpzoo.ops.neighborhood_window import Axis

PerDim = int | Sequence[int]
CausalPerDim = bool | Sequence[bool]


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerDim,
    stride: PerDim = 1,
    dilation: PerDim = 1,
    is_causal: CausalPerDim = False,
    scale: float | None = None,
    rel_pos_bias: Tensor | None = None,
) -> Tensor:
    """1-D neighborhood attention; see :func:`neighborhood_attention`. Shape: ``(B, L, heads, head_dim)``."""
    return neighborhood_attention(1, query, key, value, kernel_size, stride, dilation, is_causal, scale, rel_pos_bias)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerDim,
    stride: PerDim = 1,
    dilation: PerDim = 1,
    is_causal: CausalPerDim = False,
    scale: float | None = None,
    rel_pos_bias: Tensor | None = None,
) -> Tensor:
    """2-D neighborhood attention; see :func:`neighborhood_attention`. Shape: ``(B, H, W, heads, head_dim)``."""
    return neighborhood_attention(2, query, key, value, kernel_size, stride, dilation, is_causal, scale, rel_pos_bias)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerDim,
    stride: PerDim = 1,
    dilation: PerDim = 1,
    is_causal: CausalPerDim = False,
    scale: float | None = None,
    rel_pos_bias: Tensor | None = None,
) -> Tensor:
    """3-D neighborhood attention; see :func:`neighborhood_attention`. Shape: ``(B, D, H, W, heads, head_dim)``."""
    return neighborhood_attention(3, query, key, value, kernel_size, stride, dilation, is_causal, scale, rel_pos_bias)


def neighborhood_attention(
    ndim: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerDim,
    stride: PerDim = 1,
    dilation: PerDim = 1,
    is_causal: CausalPerDim = False,
    scale: float | None = None,
    rel_pos_bias: Tensor | None = None,
) -> Tensor:
    """Attention of each query to the `kernel_size` keys around it.

    Args:
        ndim: spatial dims, 1 to 3.
        query: ``(B, *spatial, heads, head_dim)``.
        key, value: ``(B, *spatial, heads_kv, head_dim)`` and ``(..., heads_kv, head_dim_v)``; ``heads`` is a
            multiple of ``heads_kv``, consecutive query heads share a key head.
        kernel_size: keys along each dim, at least 2, odd or even; an even window has one more key before the query.
        stride: queries along each dim that share one window, at most the kernel size.
        dilation: distance of neighbouring keys of a window; ``kernel_size * dilation`` fits into the grid.
        is_causal: let the window end at the query.
        scale: factor of the scores; ``head_dim ** -0.5`` by default.
        rel_pos_bias: ``(heads, 2 * kernel_size - 1, ...)``, added to the scores: entry ``kernel_size - 1 + t`` along a
            dim belongs to the key ``t`` steps (of the dilation) behind the query. As in NAT and DiNAT.

    Returns:
        ``(B, *spatial, heads, head_dim_v)``.

    Raises:
        ValueError: arguments that do not fit each other or the grid, as NATTEN raises.

    Papers: Hassani et al. 2023 (arXiv:2204.07143), Hassani & Shi 2022 (arXiv:2209.15001).
    """
    return neighborhood_attention_with_lse(
        ndim, query, key, value, kernel_size, stride, dilation, is_causal, scale, rel_pos_bias
    )[0]


def neighborhood_attention_with_lse(
    ndim: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerDim,
    stride: PerDim = 1,
    dilation: PerDim = 1,
    is_causal: CausalPerDim = False,
    scale: float | None = None,
    rel_pos_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`neighborhood_attention`, and the scores' log-sum-exp ``(B, *spatial, heads)``, without gradient."""
    kernel = per_dim("kernel_size", kernel_size, ndim, least=2)
    strides, dilations = per_dim("stride", stride, ndim), per_dim("dilation", dilation, ndim)
    causal = causal_per_dim(is_causal, ndim)
    query, key, value = autocast(query, key, value)
    check_tensors(ndim, query, key, value)
    grid = list(query.shape[1 : 1 + ndim])
    check_fits(ndim, grid, kernel, strides, dilations)
    check_bias(rel_pos_bias, query, kernel)
    if key.shape[-2] != query.shape[-2]:
        groups = query.shape[-2] // key.shape[-2]
        key, value = key.repeat_interleave(groups, -2), value.repeat_interleave(groups, -2)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    zeros = [0] * ndim
    return torch.ops.dpzoo.neighborhood_attention(
        query, key, value, rel_pos_bias, kernel, strides, dilations, causal, scale, zeros, zeros, grid
    )


# ---------------------------------------------------------------------- the op
@torch.library.custom_op("dpzoo::neighborhood_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    scale: float,
    q_start: Sequence[int],
    k_start: Sequence[int],
    domain: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp of queries at `q_start` of the domain, among keys that lie at `k_start`."""
    at = _geometry(kernel, stride, dilation, causal, scale, q_start, k_start, domain)
    if natten_kernels.serve(q, k, v, bias, at):
        return natten_kernels.attend(q, k, v, at)
    return neighborhood_blocks.forward(q, k, v, bias, at)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide_dtype(q.dtype))


@torch.library.custom_op("dpzoo::neighborhood_attention_backward", mutates_args=())
def _attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    scale: float,
    q_start: Sequence[int],
    k_start: Sequence[int],
    domain: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and, `with_bias`, of the bias (else empty)."""
    at = _geometry(kernel, stride, dilation, causal, scale, q_start, k_start, domain)
    if natten_kernels.serve(q, k, v, bias, at):
        return *natten_kernels.attend_backward(g, q, k, v, at), q.new_empty(0)
    into = neighborhood_blocks.Gradients.of(q, k, v, bias if with_bias else None)
    neighborhood_blocks.backward_into(into, g, q, k, v, bias, out, lse, at)
    *grads, dbias = into.in_dtype_of(k, v, bias)
    return *grads, q.new_empty(0) if dbias is None else dbias  # type: ignore[return-value]


@_attention_backward.register_fake
def _(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    with_bias: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dbias = bias.new_empty(bias.shape) if with_bias and bias is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, *geometry = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, bias, out, lse)
    ctx.geometry = geometry


def _gradients(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    q, k, v, bias, out, lse = ctx.saved_tensors
    rest = (None,) * len(ctx.geometry)
    needed = ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():  # create_graph: through every block, so that the result can be differentiated
        return *gradients_differentiably(g, (q, k, v, bias), needed, _geometry(*ctx.geometry)), *rest
    *grads, dbias = torch.ops.dpzoo.neighborhood_attention_backward(
        g, q, k, v, bias, out, lse, needed[3], *ctx.geometry
    )
    return *grads, dbias if needed[3] else None, *rest


_attention.register_autograd(_gradients, setup_context=_save)


def gradients_differentiably(
    g: Tensor, tensors: tuple[Tensor | None, ...], needed: Sequence[bool], at: Geometry
) -> tuple[Tensor | None, ...]:
    """Gradients of queries, keys, values and bias, where needed, through every block: to be differentiated again."""
    # Aliases: one input may be made of another (or be the same tensor), whose gradient would then hold both.
    alias = [None if t is None else t.view_as(t) for t in tensors]
    q, k, v, bias = alias
    assert q is not None
    assert k is not None
    assert v is not None
    out = neighborhood_blocks.differentiable(q, k, v, bias, at)
    used = [t for t, wanted in zip(alias, needed, strict=True) if wanted and t is not None]
    if out.requires_grad:
        grads = torch.autograd.grad(out, used, g, create_graph=True, materialize_grads=True)
    else:  # no queries here: zeros that depend on all inputs nevertheless, as where there are some
        link = torch.stack([t.flatten()[:0].sum().to(g.dtype) for t in (g, *alias) if t is not None]).sum()
        grads = tuple(torch.zeros_like(t) + link for t in used)
    found = iter(grads)
    return tuple(next(found) if wanted and t is not None else None for t, wanted in zip(alias, needed, strict=True))


def _geometry(
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    causal: Sequence[bool],
    scale: float,
    q_start: Sequence[int],
    k_start: Sequence[int],
    domain: Sequence[int],
) -> Geometry:
    axes = tuple(Axis(*each) for each in zip(domain, kernel, stride, dilation, causal, strict=True))
    return Geometry(axes, tuple(q_start), tuple(k_start), scale)
