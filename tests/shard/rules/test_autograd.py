"""backward, grad, hooks, checkpoints and user Functions behave as on plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from dpzoo.shard import ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.rules.inputs import FEW


def _cut(full: Tensor, dim: int = 0, layout: str = "uneven") -> ShardTensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, layout)).requires_grad_(True)


def _seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _same(sharded, plain) -> None:
    torch.testing.assert_close(sharded.full_tensor() if isinstance(sharded, ShardTensor) else sharded, plain)


class _Block(nn.Module):
    """Weights, a norm, attention-like mixing over the cut dim; optionally under a checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        mixed = torch.softmax(x @ x.mT, -1) @ self.norm(x)
        return x + self.down(torch.tanh(self.up(mixed)))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class _Cube(torch.autograd.Function):
    """A user's Function: its tensors are ShardTensors in forward and backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 3 * x**2 * w * g, x**3 * g


def _grad(x, w):
    y = (x @ w).tanh()
    return torch.autograd.grad(y.square().mean(), (x, w), create_graph=True)


def _nested(x, w):
    """A gradient penalty: a backward inside the forward."""
    y = (x @ w).sin().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return y, g.square().sum()


def _third(x):
    y = x.cumsum(0).sin().mean()
    for _ in range(2):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.square().sum()
    return y


CASES = [
    OpCase("autograd.grad", fn=_grad, shape=(9, 4), shard=0, plain=[(4, 3)], mesh2d=(0, 1), covers=("autograd.grad",)),
    OpCase("autograd.grad, weight cut along", fn=_grad, shape=(3, 9), shard=1, plain=[(9, 4)], **FEW),
    OpCase(
        "gradient penalty",
        fn=_nested,
        shape=(9, 4),
        shard=0,
        plain=[(4, 3)],
        covers=("autograd.backward", "Tensor.backward"),
    ),
    OpCase("third order", fn=_third, shape=(9, 2), shard=0, **FEW),
    OpCase("block", lambda: _Block(None), (9, 4), 0, **FEW),
    OpCase("checkpoint", lambda: _Block(False), (9, 4), 0, **FEW),
    OpCase("checkpoint, reentrant", lambda: _Block(True), (9, 4), 0, **FEW),
    OpCase(
        "user Function", fn=_Cube.apply, shape=[(9, 4), (9, 4)], shard=0, layouts=("even", "uneven", "empty"), **FEW
    ),
]

test_gradients = op_test(CASES)


@distributed(ranks=[1, 3])
def test_backward_of_a_tensor_takes_a_gradient_in_any_form(ranks):
    x, g = _seeded(9, 4), _seeded(9, 4) + 1
    want = 2 * x * g
    for gradient in (g, _cut(g).detach(), _cut(g, 1).detach()):
        s = _cut(x)
        (s * s).backward(gradient)
        _same(s.grad, want)
        assert s.grad._spec.cuts == s._spec.cuts and s.grad._spec.sizes == s._spec.sizes
        s = _cut(x)
        torch.autograd.backward([s * s], [gradient])
        _same(s.grad, want)
    (found,) = torch.autograd.grad(outputs=s * s, inputs=s, grad_outputs=g)
    _same(found, want)


@distributed(ranks=3)
def test_gradients_accumulate_and_graphs_are_kept_when_asked():
    x = _seeded(9, 4)
    s, w = _cut(x), nn.Parameter(torch.ones(4, dtype=torch.float64))
    y = (s * w).square().sum()
    y.backward(retain_graph=True)
    y.backward()
    _same(s.grad, 4 * x)
    _same(w.grad, 4 * x.square().sum(0))
    expect_error(lambda: y.backward(), RuntimeError, "second time")


@distributed(ranks=3)
def test_inputs_limit_what_backward_fills():
    s, w, u = _cut(_seeded(9, 4)), nn.Parameter(torch.ones(4).double()), nn.Parameter(torch.ones(4).double())
    middle = s * w
    (middle * u).sum().backward(inputs=[w], retain_graph=True)
    assert s.grad is None and u.grad is None
    _same(w.grad, _seeded(9, 4).sum(0))
    (middle * u).sum().backward(inputs=middle)
    _same(middle.grad, torch.ones(9, 4, dtype=torch.float64))


@distributed(ranks=3)
def test_gradient_edges_stand_for_tensors():
    s = _cut(_seeded(9, 4))
    y = s * 3
    edge = get_gradient_edge(y)
    (g,) = torch.autograd.grad((y * y).sum(), edge)
    _same(g, 6 * _seeded(9, 4))
    (g,) = torch.autograd.grad(get_gradient_edge(y), s, grad_outputs=torch.ones_like(y))
    _same(g, torch.full((9, 4), 3.0, dtype=torch.float64))


@distributed(ranks=3)
def test_unused_inputs():
    s, other = _cut(_seeded(9, 4)), _cut(_seeded(9, 4))
    y = (s * s).sum()
    expect_error(
        lambda: torch.autograd.grad(y, other, retain_graph=True), RuntimeError, "allow_unused|unused|not have been used"
    )
    assert torch.autograd.grad(y, other, allow_unused=True, retain_graph=True) == (None,)
    (g,) = torch.autograd.grad(y, other, materialize_grads=True)
    _same(g, torch.zeros(9, 4, dtype=torch.float64))


@distributed(ranks=3)
def test_batched_gradients():
    x = _seeded(9, 4)
    s, v = _cut(x), torch.eye(3, dtype=torch.float64)
    (g,) = torch.autograd.grad(s.sin()[:3, 0], s, v, is_grads_batched=True)
    p = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(p.sin()[:3, 0], p, v, is_grads_batched=True)
    _same(g, want)


@distributed(ranks=3)
def test_hooks_see_and_change_gradients():
    x, seen = _seeded(9, 4), []
    s, w = _cut(x), nn.Parameter(torch.ones(4, dtype=torch.float64))
    s.register_hook(lambda g: seen.append(("input", g.shape)) or g * 2)
    middle = s * w
    middle.retain_grad()
    middle.register_hook(lambda g: g * 3)
    w.register_hook(lambda g: seen.append(("weight", g.clone())))
    w.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.clone())))
    middle.sum().backward()
    _same(middle.grad, torch.full((9, 4), 3.0, dtype=torch.float64))
    _same(s.grad, torch.full((9, 4), 6.0, dtype=torch.float64))
    by_name = dict(seen)
    assert by_name["input"] == (9, 4)
    _same(by_name["weight"], 3 * x.sum(0))
    _same(by_name["after"], 3 * x.sum(0))


@distributed(ranks=3)
def test_mistakes_raise_as_in_torch_on_every_rank():
    s = _cut(_seeded(9, 4))
    expect_error(lambda: (s * s).backward(), RuntimeError, "scalar")
    expect_error(lambda: (s * s).backward(torch.ones(9, 3)), RuntimeError, "shape")
    expect_error(lambda: s.detach().sum().backward(), RuntimeError)
    expect_error(lambda: torch.autograd.grad(s.sum(), s.detach()), RuntimeError)


@distributed(ranks=3)
def test_no_grad_and_inference_mode_record_nothing():
    s, w = _cut(_seeded(9, 4)), nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = torch.softmax(nn.functional.linear(s, w), 0) + nn.functional.layer_norm(s, (4,))
        assert not y.requires_grad and y.grad_fn is None
        _same(y.detach().clone() if mode is torch.no_grad else y, torch.softmax(_seeded(9, 4) @ w.detach().T, 0)
              + nn.functional.layer_norm(_seeded(9, 4), (4,)))  # fmt: skip
