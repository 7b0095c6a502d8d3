"""One file per family of ops. Importing this package registers every rule."""

from dpzoo.shard.rules import (
    attention,
    autograd,
    convolution,
    embedding,
    factories,
    indexing,
    joining,
    losses,
    matmul,
    normalize,
    random_ops,
    reductions,
    reshape,
    shuffle,
    views,
)

__all__ = [
    "attention",
    "autograd",
    "convolution",
    "embedding",
    "factories",
    "indexing",
    "joining",
    "losses",
    "matmul",
    "normalize",
    "random_ops",
    "reductions",
    "reshape",
    "shuffle",
    "views",
]
