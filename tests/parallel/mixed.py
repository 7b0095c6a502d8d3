"""A list of parameters of every kind on a (2, 2) mesh, and the same parameters whole."""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dpzoo.shard import scatter

SHAPES = ((5, 3), (4,), (7, 2), (3, 5), (1, 6), (6, 4))
KINDS = ("plain", "ddp", "domain", "grid", "few rows", "sharded")


def whole(dtype=torch.float64, seed=0):
    """The parameters of one process, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in SHAPES:
        p = nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))
        p.grad = torch.randn(shape, dtype=dtype, generator=generator)
        found.append(p)
    return found


def cut(full, kind, mesh):
    """One parameter as `kind` says: plain, a DTensor over one axis or both, or a ShardTensor, all of uneven shards."""
    if kind == "plain":
        return nn.Parameter(full.detach().clone())
    if kind == "sharded":
        return scatter(full.detach().clone(), mesh["domain"], dim=0, sizes=(4, 2)).requires_grad_()
    placements = {"grid": [Replicate(), Shard(1)]}.get(kind, [Shard(0)])
    axes = {"grid": mesh, "few rows": mesh["domain"]}.get(kind) or mesh[kind]
    return nn.Parameter(distribute_tensor(full.detach().clone(), axes, placements))


def laid_out(full, mesh, kinds=KINDS):
    """The parameters in the layouts `kinds`; their gradients are cut alike."""
    found = []
    for p, kind in zip(full, kinds, strict=True):
        mine = cut(p, kind, mesh)
        mine.grad = cut(p.grad, kind, mesh).detach()
        found.append(mine)
    return found


def collected(tensor):
    """The global value."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
