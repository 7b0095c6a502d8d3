"""Clipping by a joint norm: the norm and the gradients of one process, whatever the gradients are cut over."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from dpzoo.parallel import clip_grad_norm_
from dpzoo.testing import distributed, domain_mesh, expect_error, grid_mesh
from tests.parallel.mixed import KINDS, collected, laid_out, whole

NORMS = (2.0, 1.0, 3.5, math.inf, -math.inf, 0.0, -1.0)


def assert_clipped_alike(ours, theirs, p, foreach=None, largest=0.5):
    expected = nn.utils.clip_grad_norm_(theirs, largest, p, foreach=False)
    found = clip_grad_norm_(ours, largest, p, foreach=foreach)
    assert type(found) is torch.Tensor
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for mine, reference in zip(ours, theirs, strict=True):
        assert type(mine.grad) is not torch.Tensor or type(mine) is nn.Parameter
        torch.testing.assert_close(collected(mine.grad), reference.grad, rtol=1e-12, atol=0)


@distributed(ranks=4)
def test_every_norm_on_every_mix():
    mesh = grid_mesh()
    for p in NORMS:
        for foreach in (None, False):
            theirs = whole()
            theirs[0].grad *= 100 if p < 0 else 1  # so that the least number is not in what is whole
            assert_clipped_alike(laid_out(theirs, mesh), theirs, p, foreach)
    for kind in KINDS[:5]:  # one mesh, and a largest norm that is not reached
        theirs = whole()
        kinds = [kind if p.ndim == 2 else "plain" for p in theirs]
        assert_clipped_alike(laid_out(theirs, mesh, kinds), theirs, 2.0, largest=1e6)


@distributed(ranks=[1, 3])
def test_other_world_sizes_and_parts_of_a_sum(ranks):
    mesh = domain_mesh()
    theirs = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    theirs.grad = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = nn.Parameter(DTensor.from_local(torch.zeros(4, 2, dtype=torch.float64), mesh, run_check=False))
    mine = theirs.grad if mesh.get_local_rank() == 0 else torch.full((4, 2), 2.0, dtype=torch.float64)
    rest = torch.full((4, 2), 2.0 * (ranks - 1), dtype=torch.float64)
    ours.grad = DTensor.from_local(mine.clone(), mesh, [Partial()], run_check=False)
    theirs.grad += rest
    for p in (2.0, math.inf):
        assert_clipped_alike([ours], [theirs], p, largest=1e-2 / (1 + p))


@distributed(ranks=4)
def test_what_is_not_finite_is_seen_by_every_rank():
    mesh = grid_mesh()
    for bad in (math.inf, math.nan):
        for p in (2.0, math.inf, -math.inf):
            ours = laid_out(whole(), mesh)
            if mesh.get_coordinate()[1] == 1:
                ours[2].grad._local_tensor[0, 0] = bad  # in one shard of each domain group
            if math.isnan(bad) or p > 0:
                expect_error(lambda: clip_grad_norm_(ours, 1.0, p, True), RuntimeError, "cannot be clipped")  # noqa: B023
            norm = clip_grad_norm_(ours, 1.0, p)
            assert math.isnan(norm) if math.isnan(bad) else math.isfinite(norm) == (p < 0)


@distributed(ranks=4)
def test_half_precision_and_models():
    mesh = grid_mesh()
    exact, low = whole(), whole(torch.bfloat16)
    for p, reference in zip(exact, low, strict=True):
        p.grad = reference.grad.double()
    expected = nn.utils.clip_grad_norm_(exact, 0.5)
    found = clip_grad_norm_(laid_out(low, mesh), 0.5)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)  # not rounded shard by shard
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    assert clip_grad_norm_(model, 1.0) == 0
    for p in (*model.parameters(), *reference.parameters()):
        p.grad = torch.full_like(p, 3.0)
    assert clip_grad_norm_(model, 1.0) == nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert torch.equal(model.bias.grad, reference.bias.grad)


@distributed(ranks=4)
def test_torchs_own_refuses_a_mix_on_every_rank_or_is_right():
    mesh = grid_mesh()
    for p in NORMS[:3]:  # of an empty shard torch finds no inf norm: one rank raises, the others wait
        ours, theirs = laid_out(whole(), mesh, ["plain"] + ["domain"] * 4 + ["sharded"]), whole()
        expected = nn.utils.clip_grad_norm_(theirs, 0.5, p)
        torch.testing.assert_close(collected(nn.utils.clip_grad_norm_(ours, 0.5, p)), expected)
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(collected(mine.grad), reference.grad)
    for kinds in (["plain", *["domain"] * 5], ["ddp", *["domain"] * 5]):
        ours = laid_out(whole(), mesh, kinds)
        expect_error(lambda ours=ours: nn.utils.clip_grad_norm_(ours, 1.0), RuntimeError, "mixed|same mesh")


@pytest.mark.parametrize("foreach", [None, False])
def test_on_one_process(foreach):
    ours, theirs = whole(), whole()
    assert_clipped_alike(ours, theirs, 2.0, foreach)
