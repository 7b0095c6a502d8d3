"""The training loop: it learns on one process, and on two ranks it learns the same."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.demo.data import ForecastPairs, patch_row_split
from dpzoo.demo.memory import activation_bytes
from dpzoo.demo.train import DemoConfig, build_model, evaluate, train
from dpzoo.demo.worker import lift_rows
from dpzoo.shard import strict
from dpzoo.testing import distributed

SMALL = replace(DemoConfig(), embed_dim=32, depth=2, num_heads=2, epochs=2, train_members=(0, 1), learning_rate=5e-3)


def test_loss_falls_below_persistence():
    model, pairs = build_model(SMALL), ForecastPairs(list(SMALL.train_members))
    history = train(model, pairs, SMALL)
    forecast, persistence = evaluate(model, pairs)
    assert history[1] < history[0]
    assert forecast < 0.99 * persistence


def test_training_is_deterministic():
    pairs = ForecastPairs(list(SMALL.train_members))
    assert train(build_model(SMALL), pairs, SMALL) == train(build_model(SMALL), pairs, SMALL)


def test_every_sample_is_reported():
    seen = []
    train(build_model(SMALL), ForecastPairs([0]), SMALL, on_sample=lambda epoch, loss: seen.append(epoch))
    assert seen == [0, 0, 0, 1, 1, 1]


def test_persistence_scores_one_in_units_of_the_change():
    _, persistence = evaluate(build_model(SMALL), ForecastPairs([0, 1]))
    assert 1.0 < persistence < 1.005  # a little over 1: the unit is a standard deviation, and the mean change is not 0


def test_activation_bytes_counts_storages_once_and_no_weights():
    layer = torch.nn.Linear(3, 5)
    x = torch.randn(7, 3)
    assert activation_bytes(lambda: layer(x) + layer(x), layer) == 7 * 3 * 4


@distributed(ranks=[2, 3], timeout=60.0)
def test_ranks_learn_what_one_process_learns(ranks):
    rank, sizes = torch.distributed.get_rank(), patch_row_split(ranks, SMALL.patch)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    start = sum(sizes[:rank])
    rows = ForecastPairs(list(SMALL.train_members), start, start + sizes[rank])
    sharded = build_model(SMALL).double()
    history = train(sharded, rows, SMALL, lift_rows(mesh, sizes, torch.float64))
    plain = build_model(SMALL).double()
    whole = ForecastPairs(list(SMALL.train_members))
    assert history == pytest.approx(train(plain, whole, SMALL, lambda sample: sample.double()), rel=1e-10)
    for (name, weight), expected in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        if not name.endswith(
            "qkv.bias"
        ):  # Adam turns the rounding noise of the keys' bias, which has no effect, into steps
            torch.testing.assert_close(
                weight, expected, rtol=0, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )


@distributed(ranks=2, timeout=60.0)
def test_no_op_of_the_training_gathers_its_input(ranks):
    sizes = patch_row_split(ranks, SMALL.patch)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    start = sum(sizes[: torch.distributed.get_rank()])
    rows = ForecastPairs([0], start, start + sizes[torch.distributed.get_rank()])
    with strict():
        train(build_model(SMALL), rows, replace(SMALL, epochs=1), lift_rows(mesh, sizes, torch.float32))


@distributed(ranks=2, timeout=60.0)
def test_a_rank_keeps_its_share_of_the_activations(ranks):
    sizes = patch_row_split(ranks, SMALL.patch)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("domain",))
    rank = torch.distributed.get_rank()
    start = sum(sizes[:rank])
    model = build_model(SMALL)
    rows = lift_rows(mesh, sizes, torch.float32)(ForecastPairs([0], start, start + sizes[rank])[0][0])
    whole = activation_bytes(lambda: model(ForecastPairs([0])[0][0]), model)
    assert activation_bytes(lambda: model(rows), model) < 0.65 * whole
