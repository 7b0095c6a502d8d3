"""Optimisers go on with other groups, other names of the same modules, and parameters that never had a gradient."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.parallel import parallelize, split_param_groups
from dpzoo.shard import scatter
from dpzoo.testing import session_pool
from dpzoo.train import CheckpointError, CheckpointWriter, RunState, Team
from dpzoo.train.checkpoint import Position


class Tied(nn.Module):
    """One weight under two names, a frozen one, and one that the forward pass does not use."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x):
        return self.frozen(self.second(torch.tanh(self.first(x))))


def step(model, optimizer, seed):
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def split(model):
    weights = list(dict.fromkeys(model.parameters()))
    return [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:]}]


def pair(groups, kind=torch.optim.AdamW, seed=0, **options):
    torch.manual_seed(seed)
    model = Tied()
    return model, kind(groups(model), lr=0.1, **options)


def together(model):
    return [{"params": list(model.parameters()), "weight_decay": 0.5}]


@pytest.mark.parametrize(
    ("saved", "loaded", "options"),
    [
        (together, split, {"kind": torch.optim.AdamW}),
        (split, split, {"kind": torch.optim.AdamW, "amsgrad": True}),
        (together, together, {"kind": torch.optim.SGD, "momentum": 0.9}),
        (together, together, {"kind": torch.optim.SGD}),
    ],
    ids=["other groups", "amsgrad", "momentum", "no state"],
)
def test_the_next_step_is_the_same(saved, loaded, options, tmp_path):
    model, optimizer = pair(saved, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    with CheckpointWriter(tmp_path, Team()) as writer:
        path = writer.save(3, RunState(model, optimizer, Team()).state(Position(3)))
    again, other = pair(loaded, seed=1, **options)
    if options["kind"] is torch.optim.AdamW:  # names change, weights do not
        apply_activation_checkpointing(again, check_fn=lambda module: isinstance(module, nn.Linear))
    assert RunState(again, other, Team()).load(path) == Position(3)
    assert {p.shape for p in other.state} == {p.shape for p in optimizer.state if optimizer.state[p]}
    for _ in range(2):
        step(model, optimizer, 7)
        step(again, other, 7)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    assert all(p.grad is None for p in again.parameters())


def test_another_kind_of_optimiser_is_refused(tmp_path):
    model, optimizer = pair(together)
    step(model, optimizer, 0)
    with CheckpointWriter(tmp_path, Team()) as writer:
        path = writer.save(1, RunState(model, optimizer, Team()).state(Position(1)))
    model, other = pair(together, torch.optim.SGD)
    with pytest.raises(CheckpointError, match="another optimiser: it holds the state of AdamW, this run has SGD"):
        RunState(model, other, Team()).load(path)
    with pytest.raises(ValueError, match="a parameter that the model does not have"):
        RunState(nn.Linear(2, 2), other, Team()).state(Position())


def test_what_else_has_a_state_comes_back(tmp_path):
    model, optimizer = pair(together)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in range(2):
        step(model, optimizer, seed)
        scheduler.step()
    run = RunState(model, optimizer, Team(), others={"scheduler": scheduler})
    torch.manual_seed(3)
    with CheckpointWriter(tmp_path, Team()) as writer:
        path = writer.save(2, run.state(Position(2)))
        bare = writer.save(3, RunState(model, optimizer, Team()).state(Position(3)))
    drawn = torch.rand(3)
    torch.manual_seed(4)
    other, its = pair(together)
    restored = torch.optim.lr_scheduler.ExponentialLR(its, 0.5)
    RunState(other, its, Team(), others={"scheduler": restored}).load(path)
    assert restored.last_epoch == 2 and restored.get_last_lr() == scheduler.get_last_lr() == [0.025]
    assert its.param_groups[0]["lr"] == 0.025
    assert torch.equal(torch.rand(3), drawn)  # torch's generator goes on
    with pytest.warns(UserWarning, match="has no state of 'scheduler': it begins anew"):
        RunState(other, its, Team(), others={"scheduler": restored}).load(bare)


# ---------------------------------------------------------------------- weights on two meshes
class Placed(nn.Module):
    """A line over tokens, each with a place of its own."""

    def __init__(self):
        super().__init__()
        self.place, self.line = nn.Parameter(torch.zeros(1, 7, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.line(torch.tanh(x + self.place))


@functools.cache
def two_by_two():
    """One mesh a process: DTensor keeps the first of equal meshes in its caches, and a second has groups of its own."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))


def step_on_two_meshes(folder, first, last):
    """Steps `first` to `last` on 2 x 2 ranks (on from a checkpoint if `first`); save; return the weights."""
    mesh = two_by_two()
    torch.manual_seed(first)
    model = parallelize(Placed().double(), mesh, strategy="fsdp", spatial={"place": 1})
    optimizer = torch.optim.AdamW(split_param_groups(model.parameters()), lr=0.1)
    assert len(optimizer.param_groups) == 2
    run = RunState(model, optimizer, Team(mesh))
    if first:
        assert run.load(folder / f"step_{first:08d}") == Position(first)
    for number in range(first, last):
        x = torch.randn(1, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        model(scatter(x, mesh["domain"], dim=1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with CheckpointWriter(folder, run.team) as writer:
        writer.save(last, run.state(Position(last)))
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def step_alone(first, last, path=None):
    torch.manual_seed(0)
    model = Placed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if path is not None:
        RunState(model, optimizer, Team()).load(path)
    for number in range(first, last):
        x = torch.randn(1, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def test_weights_and_state_on_two_meshes_go_on_there_and_on_one_process(tmp_path):
    expected = step_alone(0, 4)
    session_pool().run(step_on_two_meshes, tmp_path, 0, 2, ranks=4)
    found = [*session_pool().run(step_on_two_meshes, tmp_path, 2, 4, ranks=4)]
    found.append(step_alone(2, 4, tmp_path / "step_00000002"))
    for weights in found:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-12)
