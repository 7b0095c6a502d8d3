"""A small model with everything that makes gradients hard, and one process as the truth about its training."""

import copy
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dpzoo.shard import Shard, scatter_tensor
from dpzoo.testing import domain_mesh, grid_mesh

ROWS, WIDTH = 7, 4
SIZES = {1: (7,), 2: (6, 1), 3: (2, 0, 5), 4: (3, 0, 2, 2)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc, self.out = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.out(nn.functional.gelu(self.fc(self.norm(x))))


class Net(nn.Module):
    """A strided stem, a position embedding, blocks (one frozen in part), a shared and an unused weight."""

    def __init__(self, recompute=None, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.pos_embed = nn.Parameter(torch.randn(1, ROWS * WIDTH, 4))
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head, self.unused, self.recompute = nn.Linear(4, 4), nn.Linear(3, 2), recompute
        self.head.weight = self.blocks[0].fc.weight
        self.blocks[1].norm.requires_grad_(False)
        self.blocks[1].out.bias.requires_grad_(False)
        self.double()

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2) + self.pos_embed
        x = self.blocks[1](self.blocks[0](x))
        last = self.blocks[2]
        x = last(x) if self.recompute is None else checkpoint(last, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def sample(seed, shape=(1, 3, ROWS, WIDTH)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(out):
    return (out**2).mean()


def meshes():
    """Replicas and shards; replicas or shards alone, as axes of one rank or as no axes."""
    return {
        "2x2": grid_mesh(),
        "1x4": grid_mesh((1, 4)),
        "4x1": grid_mesh((4, 1)),
        "domain": domain_mesh(),
        "ddp": init_device_mesh("cpu", (4,), mesh_dim_names=("ddp",)),
    }


def place(mesh):
    """Number of replicas, this rank's replica, and the mesh over which its sample is cut (None: it is not)."""
    names = mesh.mesh_dim_names
    replicas = mesh["ddp"].size() if "ddp" in names else 1
    replica = mesh.get_local_rank("ddp") if "ddp" in names else 0
    return replicas, replica, mesh["domain"] if "domain" in names else None


def cut(full, domain):
    full = full.clone()
    if domain is None:
        return full.requires_grad_(True)
    source = int(domain.mesh.flatten()[0])
    return scatter_tensor(full, source, domain, [Shard(2)], sizes={0: SIZES[domain.size()]}, requires_grad=True)


def trained_alone(net, replicas, passes, steps=1):
    """One process on the global batch: the loss is the mean over the replicas' samples, added up over the passes."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            for replica in range(replicas):
                x = sample(100 * step + 10 * number + replica).requires_grad_(True)
                (loss_of(net(x)) / replicas).backward()
        optimizer.step()
    return net


def trained_together(wrapped, mesh, passes, held=None, steps=1):
    """This rank's part of it. `held(wrapped)`: a context for all passes of a step but the last."""
    _, replica, domain = place(mesh)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5, foreach=False)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            x = cut(sample(100 * step + 10 * number + replica), domain)
            with held(wrapped) if held is not None and number < passes - 1 else nullcontext():
                loss_of(wrapped(x)).backward()
        optimizer.step()
    return wrapped


def whole(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def same_weights(found, wanted, note):
    found = {name.removeprefix("module."): whole(p) for name, p in found.named_parameters()}
    wanted = dict(wanted.named_parameters())
    assert found.keys() == wanted.keys()
    start = dict(Net().named_parameters())
    for name, want in wanted.items():
        torch.testing.assert_close(
            found[name], want.detach(), rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{note} {n}: {m}"
        )
        moves = not name.startswith("unused") and want.requires_grad
        assert torch.equal(want, start[name]) != moves, f"{name}: the test sees nothing"
