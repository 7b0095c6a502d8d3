"""Neighborhood attention on a grid cut along any of its spatial dims, along batch or heads.

Queries stay where they are; only keys and values are lent, by every rank that holds some of those which a rank's
queries see: both in one exchange per cut dim. The local op is told where its queries and keys lie in the domain, so
windows at the borders, dilation groups and strides are those of the whole grid, whatever the shard sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dpzoo.ops  # noqa: F401  # defines the op
from dpzoo.ops import natten_kernels
from dpzoo.ops.neighborhood_blocks import Geometry
from dpzoo.ops.neighborhood_window import Axis
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.local_bridges import fetch_each
from dpzoo.shard.plan import Dims, Labels, Operand, choose
from dpzoo.shard.registry import rule
from dpzoo.shard.rules.neighborhood_halo import Halo, attend, halo_of
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing

_OP = torch.ops.dpzoo.neighborhood_attention


@rule(_OP, _OP.default, name="neighborhood_attention")
def neighborhood_attention(
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
) -> Dims | None:
    """Batch, spatial dims and heads may be cut; only spatial cuts need an exchange."""
    if any(q_start) or any(k_start) or tuple(q.shape[1:-2]) != tuple(domain):
        return None  # a part of a domain, itself sharded: gathered
    grid: Labels = tuple(range(1, 1 + len(kernel)))
    operands: list[Labels] = [("batch", *grid, "head", c) for c in ("qk", "qk", "v")]
    outputs: list[Labels] = [("batch", *grid, "head", "v"), ("batch", *grid, "head")]
    tensors = [q, k, v]
    if bias is not None:
        operands.append(("head", *(None for _ in kernel)))
        tensors.append(bias)
    whole = frozenset[Any](["qk", "v"])
    layout = same_mesh(_OP, tensors)
    seen = [Operand(tuple(t.shape), t.dtype.itemsize, t._spec if isinstance(t, ShardTensor) else None) for t in tensors]
    choices = choose(layout, seen, Dims(operands, outputs, lambda *_: None, whole=whole))
    axes = tuple(Axis(*each) for each in zip(domain, kernel, stride, dilation, causal, strict=True))
    cuts = [
        (label, c.sizes, g, m)
        for c, g, m in zip(choices, layout.groups, layout.coords, strict=True)
        if isinstance(label := c.label, int)
    ]

    def local(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        grid = tuple(q.shape[1:-2])
        halos = [halo_of(dim, sizes, group, me, axes, grid) for dim, sizes, group, me in cuts]
        if halos and not is_tracing() and not natten_kernels.may_serve(q.device):
            k, v = _lend(k, v, halos[:-1])
            at = Geometry(axes, *_starts(halos, len(axes), lent=len(halos) - 1), scale)
            return attend(q, k, v, bias, at, halos[-1])
        if halos:  # the queries are mostly a view of one projection with keys and values, which would be kept with them
            q = q.contiguous()
        k, v = _lend(k, v, halos)
        first_q, first_k = _starts(halos, len(axes), lent=len(halos))
        options = (list(kernel), list(stride), list(dilation), list(causal), scale)
        return _OP(q, k, v, bias, *options, list(first_q), list(first_k), list(domain))

    return Dims(operands, outputs, local, whole=whole)


def _starts(halos: Sequence[Halo], ndim: int, lent: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where queries and keys lie once those of the first `lent` halos have arrived."""
    queries, keys = [0] * ndim, [0] * ndim
    for i, halo in enumerate(halos):
        queries[halo.dim - 1] = halo.own[0]
        keys[halo.dim - 1] = (halo.sees if i < lent else halo.own)[0]
    return tuple(queries), tuple(keys)


def _lend(k: Tensor, v: Tensor, halos: Sequence[Halo]) -> tuple[Tensor, Tensor]:
    """Keys and values that this rank's queries see, one exchange per cut dim."""
    for halo in halos:
        k, v = fetch_each((k, v), halo.dim, halo.sizes, halo.wanted, halo.group)
    return k, v
