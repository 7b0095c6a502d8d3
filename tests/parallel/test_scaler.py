"""Loss scaling: all ranks skip a step, or none, wherever an inf turns up; the steps taken are those of one process."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from dpzoo.parallel import GradScaler, clip_grad_norm_, on_shards
from dpzoo.shard import ShardTensor, scatter
from dpzoo.testing import distributed, expect_error, grid_mesh
from tests.parallel.mixed import collected, laid_out, whole

SCALE = {"init_scale": 8.0, "growth_interval": 2}


def scaled_step(scaler, optimizer, params, clip):
    """One step from the gradients that the parameters have, as if they had come from a scaled loss."""
    scaler.scale(torch.ones(()))
    if clip:
        scaler.unscale_(optimizer)
        clip_grad_norm_(params, 0.5)
    scaler.step(optimizer)
    scaler.update()


def cut_like(full, parameter):
    """A gradient for the parameter, in its layout."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(full.clone(), parameter.device_mesh, parameter.placements)
    if isinstance(parameter, ShardTensor):
        return scatter(full.clone(), parameter.device_mesh, dim=0, sizes=(4, 2))
    return full.clone()


def assert_skips_alike(mesh, bad, place, index, clip, fused):
    """Three steps, of which the second finds `bad` on the rank `place` in parameter `index`; and on one process."""
    ours, theirs = laid_out(whole(torch.float32), mesh), whole(torch.float32)
    optimizer = on_shards(torch.optim.AdamW(ours, lr=0.1, fused=fused))
    reference = torch.optim.AdamW(theirs, lr=0.1, fused=fused)
    scaler, single = GradScaler("cpu", **SCALE), torch.amp.GradScaler("cpu", **SCALE)
    for step in range(3):
        if bad is not None and step == 1:
            theirs[index].grad.view(-1)[0] = bad
            if torch.distributed.get_rank() == place:
                getattr(ours[index].grad, "_local_tensor", ours[index].grad).view(-1)[0] = bad
        scaled_step(scaler, optimizer, ours, clip)
        scaled_step(single, reference, theirs, clip)
        assert scaler.get_scale() == single.get_scale()
        for new, mine, other in zip(whole(torch.float32, seed=step + 1), ours, theirs, strict=True):
            mine.grad, other.grad = cut_like(new.grad, mine), new.grad.clone()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(collected(mine.detach()), other.detach())


@pytest.mark.parametrize("fused", [False, True])
@distributed(ranks=4)
def test_every_rank_skips_or_none(fused):
    mesh = grid_mesh()
    assert_skips_alike(mesh, None, 0, 0, True, fused)
    for bad, clip in ((math.inf, False), (math.nan, True)):
        for place, index in ((0, 0), (1, 2), (3, 3), (2, 5)):  # a rank, and the kind of parameter it finds the inf in
            assert_skips_alike(mesh, bad, place, index, clip, fused)


@distributed(ranks=4)
def test_only_the_ranks_of_the_mesh_decide_together():
    rows = grid_mesh()["domain"]
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    first = torch.distributed.get_rank() < 2
    for mesh, steps in ((rows, not first), (grid_mesh(), False), (None, False)):
        torch.nn.init.ones_(weight)
        weight.grad = torch.full((2,), math.inf if torch.distributed.get_rank() == 0 else 8.0)
        scaled_step(GradScaler("cpu", mesh=mesh, **SCALE), optimizer, [weight], False)
        assert weight[0].item() == (0.0 if steps else 1.0)


@distributed(ranks=4)
def test_a_scaled_loss_and_parts_of_a_sum():
    mesh = grid_mesh()["domain"]
    scaler, weight = GradScaler("cpu", **SCALE), torch.nn.Parameter(torch.ones(3))
    x = scatter(torch.arange(12.0).view(4, 3), mesh, dim=0, sizes=(3, 1))
    scaler.scale((x * weight).sum()).backward()
    assert torch.equal(weight.grad, 8 * torch.arange(12.0).view(4, 3).sum(0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, torch.arange(12.0).view(4, 3).sum(0))
    parts = torch.nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, run_check=False))
    parts.grad = DTensor.from_local(torch.full((2,), 3e38), mesh, [Partial()], run_check=False)
    again = GradScaler("cpu", init_scale=1.0)
    scaled_step(again, on_shards(torch.optim.SGD([parts], lr=1.0)), [parts], False)
    assert again.get_scale() == 0.5  # no part is inf, their sum is


@distributed(ranks=2)
def test_gradients_that_torch_does_not_unscale():
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    half = torch.nn.Parameter(DTensor.from_local(torch.zeros(2).half(), mesh, [Shard(0)], run_check=False))
    half.grad = half.detach().clone()
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    expect_error(lambda: scaler.unscale_(torch.optim.SGD([half], lr=1.0)), ValueError, "a gradient is float16")
    sparse = torch.nn.Embedding(3, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(sparse.parameters(), lr=1.0)
    expect_error(lambda: scaler.unscale_(optimizer), RuntimeError, "sparse=False")


def test_on_one_process_and_switched_off():
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 8.0)
    scaled_step(GradScaler("cpu", **SCALE), torch.optim.SGD([weight], lr=1.0), [weight], False)
    assert weight[0].item() == 0.0
    off = GradScaler("cpu", enabled=False)
    assert off.scale(torch.ones(())) == 1
    off.step(torch.optim.SGD([weight], lr=1.0))
