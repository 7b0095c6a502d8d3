"""Tensors that many tests of rules start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import dpzoo
from dpzoo.shard import ShardTensor
from dpzoo.testing import domain_mesh


def cut(full: Tensor, dim: int = 0, sizes: Any = None, **options: Any) -> ShardTensor:
    """`full` cut along `dim` over all ranks of the task."""
    return dpzoo.scatter(full, domain_mesh(), dim=dim, sizes=sizes, **options)


def numbers(*shape: int) -> Tensor:
    """1, 2, 3, ... in float64."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
