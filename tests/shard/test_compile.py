"""torch.compile(fullgraph=True): the graph computes what eager computes, for each layout its own graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from dpzoo.models import ViT
from dpzoo.shard import Shard, scatter_tensor
from dpzoo.testing import distributed, domain_mesh, grid_mesh


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.place = nn.Parameter(torch.randn(1, 12, 8))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x + self.place))))


class Mixer(nn.Module):
    """What moves data: a normalization over the cut dim, attention, a mean, a product over tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(8, 24), nn.Parameter(torch.randn(12, 8))

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = F.layer_norm(x, (12, 8), self.scale) * x.softmax(1)
        return torch.cat([x[:, 5:], x[:, :5]], 1) - x.mean(1, keepdim=True)


class Convs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 2, stride=2)

    def forward(self, x):
        return self.b(self.a(x).relu())


def vit():
    return ViT((12, 8), 4, 3, 5, embed_dim=16, depth=1, num_heads=2).eval()


MODELS = {
    "mlp": (Mlp, (2, 12, 8), 1),
    "mixer": (Mixer, (2, 12, 8), 1),
    "convs": (Convs, (1, 3, 12, 6), 2),
    "vit": (vit, (1, 3, 12, 8), 2),
}


def results(model, run, x):
    """Output and all gradients, as plain tensors."""
    model.zero_grad()
    x = x.detach().requires_grad_(True)
    y = run(x)
    (y * y.detach().sin()).sum().backward()
    found = {"output": y, "input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    assert all(t is not None for t in found.values())
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}


def same(found, wanted):
    for name, want in wanted.items():
        torch.testing.assert_close(
            found[name].detach(), want.detach(), rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", list(MODELS))
@distributed(ranks=2, timeout=110)
def test_one_graph(name):
    build, shape, dim = MODELS[name]
    torch.manual_seed(0)
    model, full = build().double(), torch.randn(shape, dtype=torch.float64)
    wanted = results(model, model, full)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    for sizes in ((8, 4), (8, 4), (0, 12)):  # again, then a layout that needs a graph of its own
        x = scatter_tensor(full, 0, domain_mesh(), [Shard(dim)], sizes={0: sizes})
        same(results(model, compiled, x), wanted)
    assert counter.frame_count == 2


@distributed(ranks=4, timeout=110)
def test_two_axes():
    torch.manual_seed(0)
    model, full = Mlp().double(), torch.randn(3, 12, 8, dtype=torch.float64)
    wanted = results(model, model, full)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    same(results(model, compiled, scatter_tensor(full, 0, grid_mesh(), [Shard(0), Shard(1)])), wanted)


@distributed(ranks=2, timeout=110)
def test_a_loss_inside_the_graph_and_no_grad():
    torch.manual_seed(0)
    model, full = Mlp().double(), torch.randn(2, 12, 8, dtype=torch.float64)

    def loss(x):
        return F.mse_loss(model(x), x.detach() * 2) + model.up.weight.pow(2).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=False, backend="aot_eager")
    x = scatter_tensor(full, 0, domain_mesh(), [Shard(1)], sizes={0: (11, 1)})
    same(results(model, compiled, x), results(model, loss, full))
    with torch.no_grad():
        assert not compiled(x).requires_grad
        torch.testing.assert_close(compiled(x).item(), loss(full).item())
