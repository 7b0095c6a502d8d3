"""Activations that are not elementwise in every argument."""

from __future__ import annotations

import torch
from torch import Tensor

from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import rule, spellings


@rule(*spellings("prelu"))
def prelu(input: Tensor, weight: Tensor) -> Dims | None:
    """A slope for all elements, or one per channel (dim 1)."""
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in (1, channels):
        return None  # torch says what is wrong
    labels: Labels = tuple(range(input.ndim))
    shared: Labels = (None,) * weight.ndim
    return Dims([labels, shared if weight.numel() == 1 else (1,)], [labels], torch.prelu)
