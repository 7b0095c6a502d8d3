"""Attention calls in labels and numbers: names of the dims, the axis that cuts the keys, sizes for the cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpzoo.shard.partition import Sizes
from dpzoo.shard.plan import AxisChoice, Label, Labels
from dpzoo.shard.rules.attention_choice import Work
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor


class Call(NamedTuple):
    """The static part of a call: everything but the tensors.

    Attributes:
        grouped: dim -3 of the queries counts the query heads of one key head, and has size 1 in keys and values.
        mode: the attention mode in force.
    """

    scale: float
    causal: bool
    dropout: float
    grouped: bool
    mode: str


def labels_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> list[Labels]:
    """Names of the dims, lead dims being counted from the front of the result."""
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])

    def of(t: Tensor, *last: Label | None) -> Labels:
        first = len(lead) - (t.ndim - 2)
        names = [None if n == 1 and lead[first + i] != 1 else first + i for i, n in enumerate(t.shape[:-2])]
        return (*names, *last)

    labels = [of(q, "n", "d"), of(k, "m", "d"), of(v, "m", "e")]
    if mask is not None:
        rows, columns = mask.shape[-2:]
        labels.append(of(mask, None if rows == 1 else "n", None if columns == 1 else "m"))
    return labels


def sequence_axis(tensors: Sequence[Tensor]) -> int | None:
    """The mesh axis of more than one rank that cuts keys (or, if it does not, values) along the sequence."""
    for t in tensors[1:3]:
        if isinstance(t, ShardTensor):
            axis = t._spec.axis_of(t.ndim - 2)
            if axis is not None and t._spec.layout.shape[axis] > 1:
                return axis
    return None


def without_axis(spec: ShardTensorSpec, axis: int) -> ShardTensorSpec:
    """As if `axis` cut nothing: it is settled already."""
    return spec.like(
        cuts=[REPLICATED if a == axis else c for a, c in enumerate(spec.cuts)],
        sizes=[() if a == axis else s for a, s in enumerate(spec.sizes)],
    )


def with_axis(
    found: tuple[tuple[int, ...], tuple[Sizes, ...]], axis: int, labels: Labels, label: Label | None, sizes: Sizes
) -> tuple[tuple[int, ...], tuple[Sizes, ...]]:
    """A layout in which `axis` cuts the dim named `label`, if there is one."""
    cuts, all_sizes = list(found[0]), list(found[1])
    if label is not None and label in labels and sizes:
        cuts[axis], all_sizes[axis] = labels.index(label), sizes
    return tuple(cuts), tuple(all_sizes)


def folded_lead(q: Sequence[int], k: Sequence[int], grouped: bool) -> tuple[int, int, int]:
    """Batch, key heads and query heads of a key head, of shards of these shapes."""
    lead = k[:-3] if grouped else k[:-2]
    times = q[-3] if grouped else 1
    return math.prod(lead[:-1]), lead[-1] if lead else 1, times


def work_of(
    tensors: Sequence[Tensor], labels: Sequence[Labels], choices: Sequence[AxisChoice], q_sizes: Sizes, kv_sizes: Sizes,
    call: Call,
) -> Work:  # fmt: skip
    """The call for the cost model, with the largest shards along the other axes."""
    largest = []
    for t, names in zip(tensors, labels, strict=True):
        cuts: dict[Label | None, int] = {c.label: max(c.sizes) for c in choices if c.label is not None and c.sizes}
        largest.append([cuts.get(name, n) for name, n in zip(names, t.shape, strict=True)])
    batch, heads, times = folded_lead(largest[0], largest[1], call.grouped)
    mask_bytes = math.prod(largest[3]) * tensors[3].dtype.itemsize if len(tensors) > 3 else 0
    return Work(
        q_sizes, kv_sizes, batch, heads, times, largest[0][-1], largest[2][-1], tensors[0].dtype.itemsize, call.causal,
        mask_bytes,
    )  # fmt: skip
