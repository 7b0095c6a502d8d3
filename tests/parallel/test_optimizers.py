"""torch's optimisers on parameters of all kinds step as on one process, by their list kernels too."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dpzoo.parallel import on_shards, split_param_groups
from dpzoo.shard import ShardTensor
from dpzoo.testing import distributed, expect_error, grid_mesh
from tests.parallel.mixed import KINDS, collected, laid_out, whole

FOREACH = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
MAKERS = {
    "adamw": lambda given, **how: torch.optim.AdamW(given, lr=0.1, amsgrad=True, **how),
    "adam": lambda given, **how: torch.optim.Adam(given, lr=0.1, weight_decay=0.1, **how),
    "sgd": lambda given, **how: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
}
OTHERS = {
    "adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, foreach=True),
    "rprop": lambda given: torch.optim.Rprop(given, lr=0.1, foreach=True),
    "asgd": lambda given: torch.optim.ASGD(given, lr=0.1, foreach=True),
    "radam": lambda given: torch.optim.RAdam(given, lr=0.1, foreach=True),
    "tensor rate": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.1), fused=True),
}
LAYOUTS = {
    "a mix": KINDS,
    "one mesh": ("domain",) * 6,
    "two meshes": ("ddp", "ddp", "domain", "domain", "ddp", "domain"),
    "plain and one mesh": ("plain", "plain", "domain", "domain", "plain", "domain"),
}


def steps(optimizer, params, count=3):
    for number in range(count):
        for p in params:
            if p.grad is not None:
                p.grad.mul_(-0.7)
        if number == 1:
            params[3].grad = None  # unused from here on
        optimizer.step()


def assert_same(ours, theirs, optimizer=None, reference=None):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(collected(mine.detach()), other.detach(), rtol=1e-12, atol=1e-12)
        if optimizer is None:
            continue
        assert optimizer.state[mine].keys() == reference.state[other].keys()
        for name, value in reference.state[other].items():
            found = optimizer.state[mine][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(collected(found), value, rtol=1e-12, atol=1e-12)
                assert value.ndim == 0 or type(found) is type(mine.data)


def trained(make, kinds, mesh, wrap=True):
    ours, theirs = laid_out(whole(), mesh, kinds), whole()
    optimizer, reference = make(ours if wrap else split_param_groups(ours)), make(theirs)
    if wrap:
        on_shards(optimizer)
    steps(optimizer, ours)
    steps(reference, theirs)
    return ours, theirs, optimizer, reference


@pytest.mark.parametrize("how", FOREACH)
@distributed(ranks=4)
def test_steps_on_shards_are_those_of_one_process(how):
    mesh = grid_mesh()
    for make in MAKERS.values():
        for kinds in LAYOUTS.values():
            assert_same(*trained(lambda given, make=make: make(given, **FOREACH[how]), kinds, mesh))
    if how == "foreach":
        for make in OTHERS.values():
            assert_same(*trained(make, KINDS, mesh))


@pytest.mark.parametrize("how", FOREACH)
@distributed(ranks=4)
def test_groups_of_one_kind_suit_torchs_own_step(how):
    mesh = grid_mesh()
    for name, make in MAKERS.items():
        for kinds in list(LAYOUTS.values())[1:]:
            if (name, how) == ("sgd", "fused"):  # torch has no fused SGD for DTensors, and says so
                expect_error(
                    lambda kinds=kinds: trained(
                        lambda given: MAKERS["sgd"](given, fused=True), kinds, mesh, wrap=False
                    ),
                    NotImplementedError,
                    "fused_sgd",
                )
                continue
            assert_same(*trained(lambda given, make=make: make(given, **FOREACH[how]), kinds, mesh, wrap=False)[:2])


@distributed(ranks=4)
def test_groups_keep_their_options_and_the_order():
    mesh = grid_mesh()
    params = laid_out(whole(), mesh)
    params[1] = nn.Parameter(torch.zeros(2))
    groups = split_param_groups([{"params": params[:4], "lr": 0.3}, {"params": params[4:], "weight_decay": 0.0}])
    assert [len(g["params"]) for g in groups] == [1, 1, 1, 1, 1, 1]
    assert [g.get("lr") for g in groups] == [0.3] * 4 + [None] * 2
    assert groups[4]["weight_decay"] == 0.0
    named = split_param_groups([("a", params[2]), ("b", params[4]), ("c", params[1])])
    assert [[name for name, _ in g["params"]] for g in named] == [["a", "b"], ["c"]]
    assert split_param_groups([]) == []


@distributed(ranks=4)
def test_schedules_closures_checkpoints_and_what_is_saved():
    mesh = grid_mesh()
    ours, theirs = laid_out(whole(), mesh), whole()
    optimizer, reference = (torch.optim.AdamW(given, lr=0.1, foreach=True) for given in (ours, theirs))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (on_shards(optimizer), reference)]
    seen = []
    assert optimizer.step(lambda: seen.append(type(optimizer.param_groups[0]["params"][2].data)) or 3.0) == 3.0
    assert seen == [DTensor]  # a closure meets the parameters that the model has
    reference.step()
    for schedule in schedules:
        schedule.step()
    saved = optimizer.state_dict()
    assert isinstance(saved["state"][2]["exp_avg"], DTensor)
    assert isinstance(saved["state"][5]["exp_avg"], ShardTensor)
    assert saved["state"][2]["exp_avg"].placements == ours[2].placements
    again = on_shards(torch.optim.AdamW(ours, lr=0.1, foreach=True))
    again.load_state_dict(saved)
    again.step()
    reference.step()
    assert_same(ours, theirs, again, reference)


@distributed(ranks=4)
def test_a_graph_notices_that_its_weight_was_stepped():
    mesh = grid_mesh()
    weight = laid_out(whole(), mesh)[2]
    optimizer = on_shards(torch.optim.SGD([weight], lr=0.1))
    product = (weight * weight).sum()
    optimizer.step()
    expect_error(product.backward, RuntimeError, "modified by an inplace operation")


@distributed(ranks=4)
def test_what_does_not_fit_is_refused_on_every_rank():
    mesh = grid_mesh()
    params = laid_out(whole(), mesh)
    for make in (torch.optim.Adafactor, torch.optim.LBFGS):
        expect_error(lambda make=make: on_shards(make(params[2:3])), ValueError, "is not known to be elementwise")
    optimizer = on_shards(torch.optim.SGD(params, lr=0.1))
    params[2].grad = params[2].grad.redistribute(placements=[Replicate()])
    before = [collected(p.detach()).clone() for p in params]
    expect_error(optimizer.step, RuntimeError, "redistribute the gradient to the layout of the parameter")
    assert all(torch.equal(collected(p.detach()), b) for p, b in zip(params, before, strict=True))
    assert optimizer.param_groups[0]["params"][2] is params[2]
