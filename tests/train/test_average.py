"""Averaged weights: the recursion, what validations see, and that a resumed run goes on with them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from dpzoo.testing import distributed, grid_mesh
from dpzoo.train import CheckpointError, TrainConfig, WeightAverage, fit, load_model
from tests.parallel.mixed import collected, laid_out, whole
from tests.train.toy import Clouds, build, configured, objective, train, train_on

FULL = configured(epochs=2, checkpoint_every=2, ema=0.9)


def averaged(folder):
    model, _ = build(seed=7)
    load_model(model, folder, average=True)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def assert_equal(one, other):
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-9, atol=1e-12)


def test_the_average_is_that_of_a_loop_by_hand(tmp_path):
    seen = [build()[0].state_dict()]

    def spying(model, sample):
        seen.append({name: weight.clone() for name, weight in model.state_dict().items()})
        return objective(model, sample)

    model, optimizer = build()
    fit(model, optimizer, Clouds(), spying, FULL, tmp_path)
    after = [*seen[2:], model.state_dict()]  # the weights after steps 1, 2, ...
    assert len(after) == 10
    expected = dict(seen[0])
    for step, weights in enumerate(after, 1):
        decay = min(0.9, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * weights[name] for name in expected}
    assert_equal(averaged(tmp_path), expected)
    assert any(not torch.allclose(averaged(tmp_path)[name], weight) for name, weight in model.named_parameters())


def test_a_resumed_run_on_other_ranks_has_the_same_average(tmp_path):
    train_on((1, 1), tmp_path / "whole", FULL)
    train_on((1, 2), tmp_path / "parts", replace(FULL, max_steps=3))
    train_on((1, 3), tmp_path / "parts", FULL)
    assert_equal(averaged(tmp_path / "parts"), averaged(tmp_path / "whole"))


def test_validation_sees_the_average_and_training_does_not(tmp_path):
    seen = []

    def measure(model, sample):
        seen.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        return objective(model, sample)

    _, weights = train(tmp_path / "a", config=replace(FULL, epochs=1), validation=Clouds(samples=1), measure=measure)
    assert_equal(seen[0], averaged(tmp_path / "a"))
    _, without = train(tmp_path / "b", config=replace(FULL, epochs=1, ema=None))
    assert_equal(weights, without)


def test_a_run_without_an_average_can_take_one_up(tmp_path):
    train(tmp_path, config=replace(FULL, ema=None, max_steps=3))
    with pytest.raises(CheckpointError, match="step_00000003 has no averaged weights"):
        averaged(tmp_path)
    outcome, _ = train(tmp_path, config=FULL)
    assert outcome.finished
    assert averaged(tmp_path)


def test_a_decay_that_is_none():
    for bad in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"ema is {bad}"):
            TrainConfig(ema=bad)


def test_the_first_weights_are_forgotten():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 100.0)
    average = WeightAverage(model, 0.999)
    torch.nn.init.constant_(model.weight, 1.0)
    for step in range(1, 51):
        average.update(step)
    assert float(average.weights["weight"]) == pytest.approx(1.0, abs=0.01)


@distributed(ranks=4)
def test_weights_on_two_meshes_and_in_half_precision():
    mesh, steps = grid_mesh(), 5
    full = whole(torch.bfloat16)
    ours, theirs = nn.Module(), nn.Module()
    for name, mine, other in zip("abcdef", laid_out(full, mesh), full, strict=True):
        ours.register_parameter(name, mine) if isinstance(mine, nn.Parameter) else None
        theirs.register_parameter(name, nn.Parameter(other.detach().double()))
    averages = [WeightAverage(model, 0.999) for model in (ours, theirs)]
    for step in range(1, steps + 1):
        for model, average in zip((ours, theirs), averages, strict=True):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)  # exact in bfloat16
            average.update(step + 1000)  # small changes, which bfloat16 would round away
    for name, average in averages[0].weights.items():
        assert average.dtype is torch.float32
        torch.testing.assert_close(collected(average).double(), averages[1].weights[name], rtol=1e-5, atol=1e-6)
    with averages[0].in_use():
        assert all(p.dtype is torch.bfloat16 for p in ours.parameters())
        torch.testing.assert_close(collected(ours.c.detach()), collected(averages[0].weights["c"]).bfloat16())
    torch.testing.assert_close(collected(ours.c.detach()), theirs.c.detach().bfloat16())
