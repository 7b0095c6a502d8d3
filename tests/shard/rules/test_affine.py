"""Scale and shift by tensors that every rank holds whole: one node, whole gradients, second derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpzoo.shard import Replicate, Shard, ShardTensor, grad_sync, scatter
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test, with_derivatives

ALL = ("even", "uneven", "empty", "empty_last")
SHAPE = (2, 17, 4, 6)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return shift + x * (1 + scale)


def general(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The same by functions that have no node of their own."""
    return torch.sub(torch.div(x, 1 / (1 + scale)), shift, alpha=-1)


def _case(name: str, *plain: tuple[int, ...], **options) -> OpCase:
    options = {"shard": 1, "mesh2d": (1, 2), "layouts": ALL, **options}
    return OpCase(name, fn=with_derivatives(modulate), shape=SHAPE, plain=list(plain), **options)


CASES = [
    _case("of the last dim", (6,), (6,)),
    _case("of a sample", (2, 1, 1, 6), (2, 1, 1, 6)),
    _case("of an uncut dim", (4, 1), (1, 4, 6), mesh2d=(0, 1)),
    _case("numbers", (), (1,)),
    _case("of the cut dim: in the general way", (17, 1, 1), (2, 17, 1, 1)),
    _case("with more dims: in the general way", (3, 1, 1, 1, 1), (6,)),
]
test_ops = op_test(CASES)


def replicated(t: Tensor) -> ShardTensor:
    return ShardTensor.from_local(t, domain_mesh(), [Replicate()])


def run(function, x: Tensor, condition: Tensor, weight: nn.Parameter, whole: bool) -> dict[str, Tensor]:
    """Values and gradients where scale and shift are computed from a condition and a weight."""
    weight.grad = None
    condition = condition.clone().requires_grad_(True)
    scale, shift = ((replicated(condition) if whole else condition) @ weight).view(2, 1, 1, 12).chunk(2, -1)
    out = function(x, scale, shift)
    out.square().sum().backward()
    found = {"out": out, "x": x.grad, "condition": condition.grad, "weight": weight.grad}
    return {k: t.full_tensor() if isinstance(t, ShardTensor) else t for k, t in found.items()}


@pytest.mark.parametrize("mode", ["bucket", "eager", "flat"])
@pytest.mark.parametrize("whole", [False, True])
@distributed(ranks=[2, 3])
def test_modulations(mode: str, whole: bool, ranks: int):
    torch.manual_seed(1)
    full, condition = torch.randn(SHAPE).double(), torch.randn(2, 3).double()
    weight = nn.Parameter(torch.randn(3, 12).double())
    want = run(general, full.clone().requires_grad_(True), condition, weight, whole=False)
    sizes = (17, *[0] * (ranks - 1)), (9, 8, *[0] * (ranks - 2))
    for each in sizes:
        with grad_sync(mode):
            x = scatter(full, domain_mesh(), dim=1, sizes=each).requires_grad_(True)
            found = run(modulate, x, condition, weight, whole)
        for name, value in want.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@distributed(ranks=2)
def test_one_node_that_keeps_no_summands():
    x = scatter(torch.randn(SHAPE), domain_mesh(), dim=1).requires_grad_(True)
    scale, kept = nn.Parameter(torch.randn(6)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        moved, scaled = x + scale, scale * x
    assert [type(t.grad_fn).__name__ for t in (moved, scaled)] == ["_AffineBackward", "_AffineBackward"]
    assert [t.shape for t in kept] == [x.shape, scale.shape]
    assert [f[0] is None for f in moved.grad_fn.next_functions[:2]] == [False, False]
    with count_traffic() as traffic:
        (moved + scaled).sum().backward()
    assert traffic.calls == 2  # the loss, and one sum for the weight
    assert moved.placements == scaled.placements == (Shard(1),)


@distributed(ranks=2)
def test_other_dtypes_go_the_general_way():
    x = scatter(torch.randn(SHAPE), domain_mesh(), dim=1).requires_grad_(True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    out = x * weight
    assert out.dtype is torch.float64 and type(out.grad_fn).__name__ != "_AffineBackward"
    with torch.autocast("cpu", torch.bfloat16):
        assert (x * weight.detach().bfloat16()).dtype is torch.float32
