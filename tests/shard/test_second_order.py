"""Second derivatives: of inputs and of weights, through each kind of bridge, against one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpzoo.shard import Partial, Replicate, Shard, ShardTensor, scatter_tensor
from dpzoo.testing import distributed, domain_mesh, grid_mesh

SIZES = {1: (6,), 2: (5, 1), 3: (2, 0, 4)}


def sample(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights():
    return [sample(*s, seed=i).requires_grad_(True) for i, s in enumerate([(4, 4), (4,), (4,), (1, 6, 4)], start=1)]


def conv(x, w):
    kernel = w.reshape(4, 4, 1).expand(4, 4, 3)
    return F.conv1d(x.transpose(1, 2), kernel, padding=1).transpose(1, 2)


FUNCTIONS = {
    "pointwise": lambda x, w, b, s, p: (x * s + p).sin() * b.exp(),
    "linear": lambda x, w, b, s, p: F.linear(x, w, b).tanh(),
    "matmul": lambda x, w, b, s, p: ((x @ w) * x).sigmoid(),
    "einsum": lambda x, w, b, s, p: torch.einsum("bnc,bmc->bnm", x, x).tanh().sum(-1) * 0.1,
    "layer_norm": lambda x, w, b, s, p: F.layer_norm(x + p, (4,), s, b) ** 2,
    "norm over the cut": lambda x, w, b, s, p: F.layer_norm(x, (6, 4), p[0], None) ** 3,
    "softmax": lambda x, w, b, s, p: x.softmax(-1) ** 2 + x.softmax(1) ** 2,
    "reduce": lambda x, w, b, s, p: (x.mean(1, keepdim=True) * x).sum((0, 2)) ** 2 + x.var() * x.std(1).sum(),
    "views": lambda x, w, b, s, p: x.permute(1, 0, 2).reshape(6, 8).unflatten(1, (2, 4)).flip(0)[1:5] ** 3,
    "move": lambda x, w, b, s, p: torch.cat([x[:, 3:], x[:, :3]], 1) ** 2 * x.roll(2, 1),
    "conv": lambda x, w, b, s, p: conv(x, w).tanh(),
    "attention": lambda x, w, b, s, p: ((x @ x.mT / 2).softmax(-1) @ (x @ w)) ** 2,
    "mse": lambda x, w, b, s, p: F.mse_loss(F.linear(x, w), x.detach() ** 2),
    "gelu": lambda x, w, b, s, p: F.gelu(F.linear(x, w, b)).cumsum(-1),
}


def derivatives(name, x):
    """First and second derivatives with respect to the input and the weights, as plain tensors."""
    parameters = weights()
    leaves = [x, *parameters]
    y = FUNCTIONS[name](x, *parameters)
    weight = sample(*y.shape, seed=9)
    first = torch.autograd.grad((y * weight).sum(), leaves, create_graph=True, allow_unused=True)
    penalty = sum((g**2).sum() for g in first if g is not None)
    second = torch.autograd.grad(penalty, leaves, allow_unused=True)
    return [None if g is None else g.full_tensor() if isinstance(g, ShardTensor) else g for g in (*first, *second)]


@pytest.mark.parametrize("name", list(FUNCTIONS))
@distributed(ranks=[2, 3], timeout=60)
def test_second_derivatives(name):
    full, mesh = sample(2, 6, 4), domain_mesh()
    wanted = derivatives(name, full.clone().requires_grad_(True))
    for place, sizes in ((Shard(1), {0: SIZES[mesh.size()]}), (Shard(2), None), (Replicate(), None)):
        x = scatter_tensor(full, 0, mesh, [place], sizes=sizes, requires_grad=True)
        for i, (got, want) in enumerate(zip(derivatives(name, x), wanted, strict=True)):
            if want is None or got is None:
                assert want is None or not want.any(), f"{name} {place}: derivative {i} is missing"
            else:
                torch.testing.assert_close(
                    got.detach(), want.detach(), rtol=1e-9, atol=1e-10, msg=lambda m, at=(name, place, i): f"{at}: {m}"
                )


@distributed(ranks=4, timeout=60)
def test_on_two_axes():
    full, mesh = sample(2, 6, 4), grid_mesh()
    for name in ("linear", "layer_norm", "reduce", "pointwise", "attention"):
        wanted = derivatives(name, full.clone().requires_grad_(True))
        x = scatter_tensor(full, 0, mesh, [Shard(0), Shard(1)], sizes={1: (1, 5)}, requires_grad=True)
        for got, want in zip(derivatives(name, x), wanted, strict=True):
            if want is not None and got is not None:
                torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-9, atol=1e-10)


@distributed(ranks=2)
def test_a_physics_informed_loss():
    """u_xx by two calls of autograd.grad inside the loss, then weights by backward: what PINNs do."""
    found = []
    for place in (None, Shard(0)):
        torch.manual_seed(4)
        net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        x = sample(7, 1)
        x = (
            x.requires_grad_(True)
            if place is None
            else scatter_tensor(x, 0, domain_mesh(), [place], requires_grad=True)
        )
        u = net(x)
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        ((u_xx + u) ** 2).mean().backward()
        found.append([p.grad for p in net.parameters()])
    for got, want in zip(found[1], found[0], strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@distributed(ranks=2)
def test_gradient_penalty_through_redistribute_and_summands():
    local = sample(3, seed=1).requires_grad_(True)
    x = ShardTensor.from_local(local, domain_mesh(), [Partial()])  # the value is twice the local one
    y = x.redistribute(placements=[Shard(0)]) ** 3
    (g,) = torch.autograd.grad(y.sum(), local, create_graph=True)
    torch.testing.assert_close(g, 3 * (2 * local.detach()) ** 2)
    (gg,) = torch.autograd.grad(g.sum(), local)
    # Each rank's term is 3 (l0 + l1)^2, and a summand's derivative is that of the value, here of this rank's own sum.
    assert gg.shape == local.shape and torch.isfinite(gg).all()
