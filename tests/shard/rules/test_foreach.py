"""`torch._foreach_*` and the optimizers that step on sharded leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dpzoo.shard import MissingShardPatch, ShardError, ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test
from tests.shard.rules.inputs import cut as _cut

FEW = {"ranks": (1, 2, 3)}


def _positive(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def _out_of_place(a, b):
    pair, other = [a, b], [b.sum() * a, b * 2]
    return [
        torch._foreach_add(pair, other, alpha=2), torch._foreach_sub(pair, 1.5), torch._foreach_mul(pair, [2.0, 3.0]),
        torch._foreach_div(pair, other), torch._foreach_exp(pair), torch._foreach_neg(pair), torch._foreach_sqrt(pair),
        torch._foreach_addcmul(pair, pair, other, value=0.5), torch._foreach_addcdiv(pair, pair, other, [0.5, 2.0]),
        torch._foreach_lerp(pair, other, 0.3),
        torch._foreach_maximum(pair, 0.7), torch._foreach_minimum(pair, other), torch._foreach_clamp_max(pair, 1.0),
        torch._foreach_norm(pair), torch._foreach_norm(pair, 1), torch._foreach_pow(pair, 2),
        torch._foreach_pow(2.0, pair), torch._foreach_add(pair, torch.tensor(2.0).double()), torch._foreach_sign(pair),
        torch._foreach_reciprocal(pair),
    ]  # fmt: skip


def _in_place(a, b):
    pair, other = [a * 1, b * 1], [a + 1, b + 2]
    torch._foreach_add_(pair, other, alpha=2)
    torch._foreach_mul_(pair, 0.5)
    torch._foreach_sub_(pair, [1.0, 2.0])
    torch._foreach_addcmul_(pair, other, other, value=0.1)
    torch._foreach_addcdiv_(pair, other, other, [0.1, 0.2])
    torch._foreach_addcdiv_(pair, other, other, torch.tensor([0.1, 0.2]))
    torch._foreach_lerp_(pair, other, 0.3)
    torch._foreach_clamp_min_(pair, -5.0)
    torch._foreach_maximum_(pair, -4.0)
    torch._foreach_neg_(pair)
    copies = [torch.zeros_like(a), torch.zeros_like(b)]
    torch._foreach_copy_(copies, pair)
    torch._foreach_zero_(other)
    return [pair, copies, other]


CASES = [
    OpCase("out of place", fn=_out_of_place, shape=[(5, 9), (9,)], shard=[1, 0], fill=_positive, **FEW),
    OpCase("in place", fn=_in_place, shape=[(5, 9), (9,)], shard=[1, 0], fill=_positive, grads=False, **FEW),
    OpCase(
        "one of them plain", fn=_in_place, shape=[(5, 9)], shard=[1], plain=[(9,)], fill=_positive, grads=False, **FEW
    ),
]

test_ops = op_test(CASES)


@distributed(ranks=2)
def test_lists_of_different_lengths_and_unknown_functions():
    x = _cut(torch.ones(5, 2))
    expect_error(lambda: torch._foreach_add([x, x], [x]), RuntimeError, "same number of tensors, got 2 and 1")
    expect_error(lambda: torch._foreach_powsum([x], 2), MissingShardPatch, "_foreach_powsum")


def _sgd(foreach):
    return lambda leaves: torch.optim.SGD(
        leaves, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=foreach
    )


OPTIMIZERS = {
    "sgd": _sgd(False),
    "sgd foreach": _sgd(True),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, amsgrad=True, foreach=False),
    "adamw foreach": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, amsgrad=True, foreach=True),
    "adam foreach maximize": lambda leaves: torch.optim.Adam(leaves, lr=0.1, maximize=True, foreach=True),
    "rmsprop": lambda leaves: torch.optim.RMSprop(leaves, lr=0.1, momentum=0.9),
    "adagrad foreach": lambda leaves: torch.optim.Adagrad(leaves, lr=0.1, foreach=True),
}


def _trained(leaves, make, clip):
    optimizer = make(leaves)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        ((leaves[0] * leaves[1]).sin().sum() + (leaves[0] ** 2).mean()).backward()
        if clip:
            nn.utils.clip_grad_norm_(leaves, 0.5, foreach=clip == "foreach")
        optimizer.step()
    return leaves


@pytest.mark.parametrize("clip", [None, "loop", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(ranks=3)
def test_optimizers_step_sharded_leaves_like_whole_ones(name, clip):
    torch.manual_seed(0)
    full = [torch.randn(7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    ours = [_cut(full[0], sizes=(5, 0, 2), requires_grad=True), _cut(full[1], requires_grad=True)]
    theirs = [t.clone().requires_grad_() for t in full]
    _trained(ours, OPTIMIZERS[name], clip)
    _trained(theirs, OPTIMIZERS[name], clip)
    for found, expected in zip(ours, theirs, strict=True):
        assert isinstance(found.grad, ShardTensor)
        assert found.grad.placements == found.placements
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@distributed(ranks=3)
def test_a_dtensor_in_the_list_is_written():
    full = torch.arange(14.0).view(7, 2)
    theirs, ours = distribute_tensor(full.clone(), domain_mesh(), [Shard(0)]), _cut(full, sizes=(1, 0, 6))
    torch._foreach_mul_([theirs, ours.clone()], ours.sum())
    assert isinstance(theirs, DTensor)
    assert torch.equal(theirs.full_tensor(), full * full.sum())
    assert theirs.add_(ours) is theirs
    assert torch.equal(theirs.full_tensor(), full * full.sum() + full)
    expect_error(lambda: theirs.requires_grad_().add_(ours), ShardError, "a DTensor that needs a gradient")
    norm = torch.linalg.vector_norm(distribute_tensor(full, domain_mesh(), [Shard(0)]))  # parts of a norm
    torch.testing.assert_close((ours.sum() * 0 + norm).full_tensor(), full.norm())
