"""Embeddings: the indices or the columns of the table cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.testing import OpCase, op_test
from tests.shard.rules.inputs import FEW


def _indices(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 6, shape)


def _table(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


BOTH = [_indices, _table]

CASES = [
    OpCase("embedding", lambda: nn.Embedding(6, 4), (2, 9), 1, fill=_indices, mesh2d=(0, 1), covers=("embedding",)),
    OpCase("embedding padding", lambda: nn.Embedding(6, 4, padding_idx=-2), (9,), 0, fill=_indices, **FEW),
    OpCase("embedding columns cut", fn=F.embedding, shape=[(7,), (6, 9)], shard=[None, 1], fill=BOTH, **FEW),
    OpCase("embedding rows cut", fn=F.embedding, shape=[(9,), (6, 4)], shard=[0, 0], fill=BOTH, gathers=True, **FEW),
    OpCase(
        "embedding index 0-d",
        fn=lambda i, w: F.embedding(i[2], w),
        shape=[(9,), (6, 4)],
        shard=[0, 1],
        fill=BOTH,
        **FEW,
    ),
    OpCase("embedding max_norm", lambda: nn.Embedding(6, 4, max_norm=0.5), (9,), 0, fill=_indices, gathers=True, **FEW),
    OpCase(
        "embedding by frequency",
        lambda: nn.Embedding(6, 4, scale_grad_by_freq=True),
        (9,),
        0,
        fill=_indices,
        gathers=True,
        **FEW,
    ),
    OpCase(
        "torch.embedding",
        fn=lambda i, w: torch.embedding(w, i, padding_idx=3),
        shape=[(2, 9)],
        shard=1,
        plain=[(6, 4)],
        fill=BOTH,
        covers=("torch_embedding",),
        **FEW,
    ),
    OpCase(
        "embedding twice",
        fn=lambda i, w: torch.autograd.grad(F.embedding(i, w).square().sum(), w, create_graph=True)[0],
        shape=(9,),
        shard=0,
        plain=[(6, 4)],
        fill=BOTH,
        **FEW,
    ),
    OpCase("EmbeddingBag", lambda: nn.EmbeddingBag(6, 4, mode="mean"), (9, 3), 0, fill=_indices, gathers=True, **FEW),
    OpCase(
        "EmbeddingBag weighted",
        fn=lambda i, s, w: F.embedding_bag(i, w, per_sample_weights=s, mode="sum"),
        shape=[(9, 3), (9, 3)],
        shard=0,
        plain=[(6, 4)],
        fill=[_indices, _table, _table],
        gathers=True,
        **FEW,
    ),
    OpCase("one_hot", fn=lambda i: F.one_hot(i, 6), shape=(2, 9), shard=1, fill=_indices, covers=("one_hot",)),
    OpCase("one_hot count unknown", fn=F.one_hot, shape=(9,), shard=0, fill=_indices, gathers=True, **FEW),
]

test_embeddings = op_test(CASES)
