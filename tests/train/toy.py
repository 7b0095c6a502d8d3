"""A small model, a loader of made-up clouds, and a run on the mesh of the ranks that call it."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.shard import scatter
from dpzoo.testing import session_pool
from dpzoo.train import Team, TrainConfig, fit

CONFIG = TrainConfig(epochs=2, warmup_steps=2, clip=0.5, progress_bar=False)


class Net(nn.Module):
    """Points see their mean, so that the cut matters."""

    def __init__(self, dropout=0.0, width=8):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Dropout(dropout))
        self.outer = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inner(x)
        return self.outer(h * h.mean(1, keepdim=True))


class Clouds:
    """`samples` clouds an epoch, (x, y) as functions of the epoch and the place; 23 points do not divide evenly."""

    def __init__(self, mesh=None, samples=5, dtype=torch.float64):
        self.mesh, self.team, self.samples, self.dtype = mesh, Team(mesh), samples, dtype
        self.domain = mesh["domain"] if mesh is not None and mesh.ndim > 1 else mesh

    def __len__(self):
        return self.samples // self.team.replicas

    def epoch(self, number, start=0):
        for place in range(start, len(self)):
            index = place * self.team.replicas + self.team.replica
            x = torch.randn(1, 23, 3, dtype=self.dtype, generator=torch.Generator().manual_seed(100 * number + index))
            y = x.prod(-1, keepdim=True)
            yield (x, y) if self.domain is None else tuple(scatter(t, self.domain, dim=1) for t in (x, y))


def objective(model, sample):
    x, y = sample
    error = model(x) - y
    return {"loss": error.square().mean(), "absolute": error.detach().abs().mean()}


def build(seed=0, dropout=0.0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = Net(dropout).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(folder, shape=None, config=CONFIG, dropout=0.0, samples=5, dtype=torch.float64, **options):
    """Train on a mesh of all ranks; the outcome and the weights. `shape` is (ddp, domain), None for no mesh."""
    mesh = None
    if shape is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "domain"))
    team = Team(mesh)
    # Weights differ at first: fit must make them equal.
    model, optimizer = build(seed=0 if team.is_first else 1, dropout=dropout, dtype=dtype)
    loader = Clouds(mesh, samples, dtype)
    make = (lambda weights: torch.optim.AdamW(weights, lr=0.05)) if config.parallel == "fsdp" else optimizer
    outcome = fit(model, make, loader, objective, config, folder, mesh=mesh, **options)
    return outcome, {name: whole(weight.detach()) for name, weight in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def configured(**changes):
    return replace(CONFIG, **changes)


def train_on(shape, folder, config=CONFIG, **options):
    """`train` on shape[0] x shape[1] ranks of the pool; what each rank returned."""
    return session_pool().run(train, folder, shape, config, ranks=shape[0] * shape[1], kwargs=options)
