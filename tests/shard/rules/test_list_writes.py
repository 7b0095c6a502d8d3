"""Fused optimisers and torch's own GradScaler on sharded leaves: what they write in place reaches the shards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Shard

from dpzoo.parallel import on_shards
from dpzoo.shard import ShardError, ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, grid_mesh, op_test
from tests.shard.rules.inputs import cut as _cut

FEW = {"ranks": (1, 2, 3), "grads": False}
SGD = {"momentum": 0.9, "lr": 0.1, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True, "maximize": False}


def _sgd(a, b):
    params, grads, momenta = [a * 1, b * 1], [a.sin(), b.cos()], [a * 2, b * 3]
    torch._fused_sgd_(params, grads, momenta, is_first_step=False, **SGD)
    return params, momenta


def _unscaled(a, b):
    grads, found = [a * 1, b * 2], torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.full((1,), 0.125))
    return grads, found


CASES = [
    OpCase("sgd", fn=_sgd, shape=[(5, 9), (9,)], shard=[1, 0], covers=("fused optimizers",), **FEW),
    OpCase("unscale", fn=_unscaled, shape=[(5, 9), (9,)], shard=[1, 0], covers=("unscale",), **FEW),
    OpCase("unscale, one plain", fn=_unscaled, shape=[(5, 9)], shard=[1], plain=[(9,)], **FEW),
]
test_ops = op_test(CASES)

OPTIMIZERS = {
    "sgd": lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "adamw": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, amsgrad=True, fused=True),
    "adam": lambda leaves: torch.optim.Adam(leaves, lr=0.1, maximize=True, fused=True),
    "adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.1, fused=True),
}


def _trained(leaves, make, scaler, bad_at=None, early=False):
    optimizer = make(leaves)
    for step in range(4):
        optimizer.zero_grad()
        loss = (leaves[0] * leaves[1]).sin().sum() + (leaves[0] ** 2).mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
            continue
        if bad_at is not None and step == 2:
            bad_at(leaves)
        if early:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [getattr(t, "full_tensor", lambda t=t: t)().detach() for t in leaves]


def _leaves(full):
    return [_cut(full[0], sizes=(5, 0, 2), requires_grad=True), _cut(full[1], requires_grad=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(ranks=3)
def test_fused_optimizers_step_sharded_leaves_like_whole_ones(name):
    torch.manual_seed(0)
    full = [torch.randn(7, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)]
    ours = _trained(_leaves(full), OPTIMIZERS[name], None)
    theirs = _trained([t.clone().requires_grad_() for t in full], OPTIMIZERS[name], None)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    mixed = [_cut(full[0], sizes=(5, 0, 2), requires_grad=True), full[1].clone().requires_grad_()]
    torch.testing.assert_close(_trained(mixed, OPTIMIZERS[name], None), theirs, rtol=1e-12, atol=1e-12)


@distributed(ranks=3)
def test_a_gradient_of_another_layout_is_refused():
    p = _cut(torch.ones(6, 2), sizes=(4, 0, 2))
    for g in (_cut(torch.ones(6, 2)), torch.ones(6, 2)):
        before = p.full_tensor().clone()
        call = lambda g=g: torch._fused_sgd_([p], [g], [], is_first_step=True, **{**SGD, "momentum": 0.0})  # noqa: E731
        expect_error(call, ShardError, "redistribute it to that of the parameter")
        assert torch.equal(p.full_tensor(), before)


# ---------------------------------------------------------------------- torch.amp.GradScaler
SCALE = {"init_scale": 8.0, "growth_interval": 2}
STEPS = {
    "loop": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, foreach=False),
    "foreach": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, foreach=True),
    "fused": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, fused=True),
    "on shards": lambda leaves: on_shards(torch.optim.AdamW(leaves, lr=0.1, foreach=True)),
    "on shards, fused": lambda leaves: on_shards(torch.optim.AdamW(leaves, lr=0.1, fused=True)),
}


def _put(value, rank):
    """Write `value` into the gradient that one rank holds (rank 1 of 3 has none of the first leaf)."""

    def put(leaves):
        local = leaves[0].grad._local_tensor if isinstance(leaves[0], ShardTensor) else leaves[0].grad
        if not isinstance(leaves[0], ShardTensor) or dist.get_rank() == rank:
            local.view(-1)[0] = value

    return put


@pytest.mark.parametrize("early", [False, True], ids=["", "unscaled first"])
@pytest.mark.parametrize("how", STEPS)
@distributed(ranks=3)
def test_torchs_own_scaler_skips_on_all_ranks_or_none(how, early):
    torch.manual_seed(0)
    full = [torch.randn(7, 3), torch.randn(3)]
    for plain in (False, True):
        for value, rank in ((None, 0), (math.inf, 0), (math.nan, 2)):
            bad = None if value is None else _put(value, rank)
            theirs = [t.clone().requires_grad_() for t in full]
            ours = _leaves(full) if not plain else [_leaves(full)[0], full[1].clone().requires_grad_()]
            scalers = [torch.amp.GradScaler("cpu", **SCALE) for _ in range(2)]
            found = _trained(ours, STEPS[how], scalers[0], bad, early)
            torch.testing.assert_close(found, _trained(theirs, STEPS[how], scalers[1], bad, early))
            assert scalers[0].get_scale() == scalers[1].get_scale()


@distributed(ranks=4)
def test_the_finding_goes_to_all_ranks_of_every_mesh_of_the_list():
    mesh = grid_mesh()
    for bad in range(4):
        both = ShardTensor.from_local(torch.ones(2, 1), mesh, [Shard(0), Shard(1)], run_check=False)
        found = torch.zeros(1)
        if dist.get_rank() == bad:
            both._local_tensor.view(-1)[0] = math.inf
        torch._amp_foreach_non_finite_check_and_unscale_([both], found, torch.ones(1))
        assert found.item() == 1.0


@distributed(ranks=2)
def test_a_gradient_that_is_a_sum_of_parts_is_refused_with_a_hint():
    part = ShardTensor.from_local(torch.full((2,), 3e38), domain_mesh(), [Partial()], run_check=False)
    found = torch.zeros(1)
    call = lambda: torch._amp_foreach_non_finite_check_and_unscale_([part], found, torch.ones(1))  # noqa: E731
    expect_error(call, ShardError, r"use dpzoo.parallel.GradScaler")
    assert found.item() == 0.0
    assert torch.equal(part.to_local(), torch.full((2,), 3e38))
