"""Neighborhood transformers domain-parallel give one device's values, input and weight gradients, on any cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpzoo.models import NeighborhoodTransformer
from dpzoo.shard import Shard, ShardTensor, scatter, scatter_tensor, strict
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh
from tests.models.lively import liven

SMALL: dict[str, Any] = {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2), "kernel_size": 3, "num_classes": 5}
DENSE: dict[str, Any] = {**SMALL, "num_classes": 0, "head": "dense", "out_chans": 2}
PICTURE, VOLUME = (52, 24), (24, 8, 12)

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nat": (lambda: NeighborhoodTransformer(**SMALL, layer_scale=0.5), PICTURE),
    "dinat": (lambda: NeighborhoodTransformer(**SMALL, dilations=(2, 2)), PICTURE),
    "no bias table, even kernel": (
        lambda: NeighborhoodTransformer(**{**SMALL, "kernel_size": (4, 2)}, rel_pos_bias=False),
        PICTURE,
    ),
    "dense": (lambda: NeighborhoodTransformer(**DENSE, dilations=(3, 1)), PICTURE),
    "volume": (lambda: NeighborhoodTransformer(**SMALL, ndim=3), VOLUME),
    "dense volume": (lambda: NeighborhoodTransformer(**{**DENSE, "kernel_size": 2}, ndim=3), VOLUME),
}


def build(name: str) -> nn.Module:
    """The same weights on every rank, none so small that it hides a missing term."""
    torch.manual_seed(0)
    model = MODELS[name][0]().double()
    return liven(model)


def field(name: str, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, *MODELS[name][1], dtype=torch.float64)


def cut(n: int, ranks: int) -> tuple[int, ...]:
    """Uneven sizes that no stride divides."""
    return {2: (n - 7, 7), 3: (5, n - 12, 7), 4: (9, 2, n - 14, 3)}[ranks]


@distributed(ranks=[2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_uneven(name: str, ranks: int):
    assert_parity(build(name), field(name), 2, cut(MODELS[name][1][0], ranks), strict=True)


@distributed(ranks=[2, 4])
@pytest.mark.parametrize("name", ["nat", "dinat", "dense", "volume"])
def test_even(name: str, ranks: int):
    assert_parity(build(name), field(name), 2, "even", strict=True)


@distributed(ranks=3)
@pytest.mark.parametrize("name", ["dinat", "dense"])
def test_an_empty_rank(name: str):
    assert_parity(build(name), field(name), 2, (20, 0, 32))


@distributed(ranks=4)
@pytest.mark.parametrize("name", ["dinat", "dense", "volume"])
def test_two_dims_on_a_grid_of_ranks(name: str):
    h, w = MODELS[name][1][:2]
    assert_parity(build(name), field(name), (2, 3), ((h - 7, 7), (w - 3, 3)), mesh=grid_mesh())


@distributed(ranks=4)
def test_second_row_of_ranks():
    assert_parity(build("dinat"), field("dinat"), 2, cut(52, 2), mesh=row_mesh())


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["nat", "dense volume"])
def test_last_dim_and_batch_of_two(name: str):
    n = MODELS[name][1][-1]
    placement = len(MODELS[name][1]) + 1
    with strict():
        assert_parity(build(name), field(name, batch=2), placement, (5, n - 5))


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["dinat", "dense"])
def test_activations_stay_cut(name: str):
    """Right values are not enough: up to the pooling, every layer's output is this rank's part and no more."""
    model, seen = build(name), []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(output, ShardTensor), module
        assert isinstance(output.placements[0], Shard), module
        assert 0 < output.to_local().numel() < output.numel(), module
        seen.append(module)

    for path, module in model.named_modules():
        if path.startswith(("patch_embed.", "levels.0.blocks.", "levels.1.blocks.", "levels.0.downsample", "norm")):
            module.register_forward_hook(note)
    out = model(scatter(field(name), domain_mesh(), dim=2, sizes=(32, 20)))
    assert len(seen) > 30
    if name == "dense":
        assert out._spec.sharding_shapes()[0] == tuple((1, 2, rows, 24) for rows in (32, 20))


@distributed(ranks=2, timeout=110)
def test_one_graph():
    torch.manual_seed(0)
    model, full = NeighborhoodTransformer(**SMALL, dilations=(2, 1)).double(), field("nat")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    grads = []
    for run, x in (
        (model, full.clone()),
        (compiled, scatter_tensor(full, 0, domain_mesh(), [Shard(2)], sizes={0: (33, 19)})),
    ):
        model.zero_grad()
        x.requires_grad_(True)
        out = run(x)
        out.square().sum().backward()
        found = [out, x.grad, *(p.grad for p in model.parameters())]
        grads.append([t.full_tensor() if isinstance(t, ShardTensor) else t for t in found])
    for got, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)
