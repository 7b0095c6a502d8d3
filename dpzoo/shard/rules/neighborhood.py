"""Neighborhood attention on a grid cut along any of its spatial dims, along batch or heads.

Queries stay where they are; only keys and values are lent, by every rank that holds some of those which a rank's
queries see: both in one exchange per cut dim. The local op is told where its queries and keys lie in the domain, so
windows at the borders, dilation groups and strides are those of the whole grid, whatever the shard sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dpzoo.ops  # noqa: F401  # defines the op
from dpzoo.ops.neighborhood_window import Axis
from dpzoo.shard.exchange import Wanted
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.local_bridges import fetch_each
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, own_intervals
from dpzoo.shard.plan import AxisChoice, Dims, Labels, Operand, choose
from dpzoo.shard.registry import rule
from dpzoo.shard.tensor import ShardTensor

_OP = torch.ops.dpzoo.neighborhood_attention


@dataclass(frozen=True)
class Halo:
    """What travels along one cut dim: per rank the interval of keys and values that its queries see."""

    dim: int
    sizes: Sizes
    wanted: Wanted
    group: str
    q_start: int
    k_start: int


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
    axes = [Axis(*each) for each in zip(domain, kernel, stride, dilation, causal, strict=True)]
    halos = _halos(layout, choices, axes)

    def local(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Any:
        first_q, first_k = [0] * len(axes), [0] * len(axes)
        for halo in halos:
            first_q[halo.dim - 1], first_k[halo.dim - 1] = halo.q_start, halo.k_start
        if halos:  # the queries are mostly a view of one projection with keys and values, which would be kept with them
            q = q.contiguous()
        k, v = _lend(k, v, halos)
        options = (list(kernel), list(stride), list(dilation), list(causal), scale)
        return _OP(q, k, v, bias, *options, first_q, first_k, list(domain))

    return Dims(operands, outputs, local, whole=whole)


def _halos(layout: MeshLayout, choices: Sequence[AxisChoice], axes: Sequence[Axis]) -> list[Halo]:
    found = []
    for mesh_axis, choice in enumerate(choices):
        if not isinstance(choice.label, int):
            continue
        own = own_intervals(choice.sizes)
        reach = [axes[choice.label - 1].reach(*interval) for interval in own]
        wanted = tuple((r,) if r[0] < r[1] else () for r in reach)
        me = layout.coords[mesh_axis]
        group = layout.groups[mesh_axis]
        found.append(Halo(choice.label, choice.sizes, wanted, group, own[me][0], reach[me][0]))
    return found


def _lend(k: Tensor, v: Tensor, halos: Sequence[Halo]) -> tuple[Tensor, Tensor]:
    """Keys and values that this rank's queries see, one exchange per cut dim."""
    for halo in halos:
        k, v = fetch_each((k, v), halo.dim, halo.sizes, halo.wanted, halo.group)
    return k, v
