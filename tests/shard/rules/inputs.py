"""Tensors that many tests of rules start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import dpzoo
from dpzoo.shard import ShardTensor
from dpzoo.testing import domain_mesh, expect_error, layout_sizes

FEW: dict[str, Any] = {"ranks": (2, 3), "subgroups": False}
"""Options of an `OpCase` whose code path other rows walk on one and four ranks and on later sub-groups."""


def cut(full: Tensor, dim: int = 0, sizes: Any = None, **options: Any) -> ShardTensor:
    """`full` cut along `dim` over all ranks of the task."""
    return dpzoo.scatter(full, domain_mesh(), dim=dim, sizes=sizes, **options)


def numbers(*shape: int) -> Tensor:
    """1, 2, 3, ... in float64."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def raises_like_torch(fn: Callable[[Tensor], Any], full: Tensor, dim: int = 1) -> None:
    """Check that `fn` of `full`, cut unevenly along `dim` or with an empty shard, raises torch's class of error."""
    with pytest.raises(Exception) as of_torch:
        fn(full)
    ranks = domain_mesh().size()
    for layout in ("uneven", "empty"):
        x = cut(full, dim, layout_sizes(full.shape[dim], ranks, layout))
        expect_error(lambda x=x: fn(x), of_torch.type)
