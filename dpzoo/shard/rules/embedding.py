"""Table look-ups: the indices may be cut, the table is whole on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.errors import MissingShardPatch
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import rule


@rule(F.embedding, torch.embedding)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Dims:
    """One row of the table per index."""
    if input.dtype.is_floating_point:  # torch.embedding(weight, indices) has the operands the other way round
        labels: tuple[int, ...] = tuple(range(weight.ndim))
        return Dims([("row", "e"), labels], [(*labels, "e")], torch.embedding, whole=frozenset(["row"]))
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise MissingShardPatch(
            "embedding with max_norm, scale_grad_by_freq or sparse depends on all indices at once: not available on a "
            "ShardTensor; leave these options off"
        )
    labels = tuple(range(input.ndim))
    return Dims(
        [labels, ("row", "e")], [(*labels, "e")], lambda i, w: F.embedding(i, w, padding_idx), whole=frozenset(["row"])
    )


@rule(F.one_hot, torch._C._nn.one_hot)
def one_hot(input: Tensor, num_classes: int = -1) -> Dims | None:
    """A new last dim; without a class count it is gathered, since the count depends on all indices."""
    if num_classes < 0:
        return None
    labels = tuple(range(input.ndim))
    return Dims([labels], [(*labels, "class")], lambda i: F.one_hot(i, num_classes), whole=frozenset(["class"]))
