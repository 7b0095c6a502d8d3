"""Table look-ups: the indices may be cut, each rank needs the rows of the table whole (its columns may be cut)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.plan import Dims, probe
from dpzoo.shard.registry import rule
from dpzoo.shard.rules.parts import check_index


def _lookup(indices: Tensor, rows: int, local: Any, table_first: bool) -> Dims:
    def check(*operands: Tensor) -> None:
        index = operands[1 if table_first else 0]
        check_index(index, 0, rows, lambda i: torch.embedding(torch.zeros(rows, 1), i))

    labels = tuple(range(indices.ndim))
    operands = [("row", "e"), labels] if table_first else [labels, ("row", "e")]
    return Dims(operands, [(*labels, "e")], local, whole=frozenset(["row"]), check=check)


@rule(F.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Dims | None:
    """One row of the table per index. What depends on all indices at once is gathered: a table that is renormed in
    place, gradients divided by how often an index occurs, sparse gradients."""
    if max_norm is not None or scale_grad_by_freq or sparse or weight.ndim != 2:
        return None
    probe(F.embedding, input, weight, padding_idx)

    def local(i: Tensor, w: Tensor) -> Tensor:
        if not i.numel():  # torch cannot differentiate the gradient of this; the table stays in the graph
            return w[:0].reshape(*i.shape, w.shape[1])
        return F.embedding(i, w, padding_idx)

    return _lookup(input, weight.shape[0], local, table_first=False)


@rule(torch.embedding)
def torch_embedding(
    weight: Tensor, input: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Dims | None:
    """`torch.embedding`, which takes the table first and -1 for no padding."""
    if scale_grad_by_freq or sparse or weight.ndim != 2:
        return None
    probe(torch.embedding, weight, input)
    return _lookup(input, weight.shape[0], lambda w, i: torch.embedding(w, i, padding_idx), table_first=True)


@rule(F.one_hot, torch._C._nn.one_hot)
def one_hot(input: Tensor, num_classes: int = -1) -> Dims | None:
    """A new last dim; without a class count it is gathered, since the count depends on all indices."""
    if num_classes < 0 or input.dtype is not torch.int64:
        return None
    labels = tuple(range(input.ndim))
    return Dims(
        [labels],
        [(*labels, "class")],
        lambda i: F.one_hot(i, num_classes),
        whole=frozenset(["class"]),
        check=lambda i: check_index(i, 0, num_classes, lambda i: F.one_hot(i, num_classes)),
    )
