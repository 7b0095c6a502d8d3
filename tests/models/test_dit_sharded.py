"""DiT domain-parallel gives one device's values, input and weight gradients, beyond the cuts that test_zoo.py walks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dpzoo
from dpzoo.models import DiT
from dpzoo.shard import Shard, ShardTensor, scatter, strict
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh
from tests.models.lively import liven

SMALL: dict[str, Any] = {
    "patch_size": 4,
    "in_chans": 2,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 2,
    "time_freq_dim": 8,
}
ROWS, COLUMNS = 24, 16

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"condition": "class", "condition_size": 4},
    "learned": {"pos_embed": "learned", "qk_norm": True},
    "rotary": {"pos_embed": "rotary"},
    "rotary, halves": {"pos_embed": "rotary", "rope_interleaved": False, "condition": "scalar", "condition_size": 2},
    "masked field": {"field_chans": 3, "mask_token": True, "condition": "vector", "condition_size": 3},
    "neighborhood": {"kernel_size": 3, "pos_embed": "rotary", "field_chans": 1, "mask_token": True},
    "dilated": {"kernel_size": (3, 2), "dilation": (2, 1)},
}


def build(name: str, grid: Sequence[int] = (ROWS, COLUMNS)) -> DiT:
    """The same weights on every rank, none of them a zero that hides a missing term."""
    torch.manual_seed(0)
    model = DiT(grid, **SMALL, **OPTIONS[name]).double()
    return liven(model)


def inputs(model: nn.Module, batch: int = 1) -> tuple[Tensor | None, ...]:
    torch.manual_seed(1)
    return model.example_inputs(batch)


def compare(name: str, dims: Any, sizes: Any, batch: int = 1, **options: Any) -> None:
    """Fields are cut as told; times and conditions are plain."""
    model = build(name)
    given = inputs(model, batch)
    fields = [x is not None and x.ndim == 4 for x in given]
    cuts, lengths = [dims if f else None for f in fields], [sizes if f else None for f in fields]
    assert_parity(model, given, cuts, lengths, strict=True, **options)


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_two_samples_inside_patches(name: str, ranks: int):
    compare(name, 2, {2: (10, 14), 3: (5, 13, 6)}[ranks], batch=2)


@distributed(ranks=3)
@pytest.mark.parametrize("name", ["full", "learned", "masked field", "neighborhood"])
def test_an_empty_rank(name: str):
    compare(name, 2, (8, 0, 16))


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["full", "rotary", "learned", "masked field", "neighborhood"])
def test_columns_cut(name: str):
    compare(name, 3, (5, 11))


@distributed(ranks=4, timeout=60)
@pytest.mark.parametrize("name", ["full", "rotary", "learned", "neighborhood"])
def test_two_dims_on_a_grid_of_ranks(name: str):
    compare(name, (2, 3), ((16, 8), (5, 11)), mesh=grid_mesh())


@distributed(ranks=4)
@pytest.mark.parametrize("name", ["full", "neighborhood"])
def test_second_row_of_ranks(name: str):
    """Two replicas, each on its own pair of ranks."""
    compare(name, 2, (10, 14), mesh=row_mesh())


@distributed(ranks=2)
def test_fields_may_be_cut_in_other_places_or_plain():
    model = build("masked field")
    x, t, c, field, invalid = inputs(model)
    sizes = [(10, 14), None, None, (16, 8), (4, 20)]
    assert_parity(model, [x, t, c, field, invalid], [2, None, None, 2, 2], sizes)
    assert_parity(model, [x, t, c, field, invalid], [2, None, None, None, None], [(10, 14), *[None] * 4])


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["learned", "neighborhood"])
def test_activations_stay_cut(name: str):
    """Right values are not enough: up to the field itself, every layer's tokens are this rank's part and no more."""
    model, seen = build(name), []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        assert isinstance(output, ShardTensor), module
        assert isinstance(output.placements[0], Shard), module
        assert 0 < output.to_local().numel() < output.numel(), module
        seen.append(module)

    for path, module in model.named_modules():
        if path.startswith(("x_embedder", "blocks.")) and not path.endswith("blocks") and "adaLN" not in path:
            module.register_forward_hook(note)
    cut = [
        scatter(x, domain_mesh(), dim=2, sizes=(16, 8)) if x is not None and x.ndim == 4 else x for x in inputs(model)
    ]
    with strict():
        out = model(*cut)
    assert len(seen) > 20
    assert out._spec.sharding_shapes()[0] == tuple((1, 2, rows, COLUMNS) for rows in (16, 8))


@distributed(ranks=2)
def test_every_rank_drops_the_same_classes():
    """The draws are those of the sample, whatever each rank's own generator is at."""
    torch.manual_seed(0)
    model = DiT((8, 8), **SMALL, condition="class", condition_size=4, condition_drop=0.5).train()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.1)
    mesh = domain_mesh()
    x = scatter(torch.randn(64, 2, 8, 8), mesh, dim=2)
    dpzoo.shard.manual_seed(3)
    torch.rand(mesh.get_local_rank() * 5)
    y = torch.zeros(64, dtype=torch.int64)
    embedded = model.y_embedder(y, x)
    assert isinstance(embedded, ShardTensor)
    mine = embedded.to_local(grad_placements=embedded.placements)
    dropped = (mine == model.y_embedder.no_class(64)).all(1)
    assert 10 < dropped.sum() < 54
    both = [torch.empty_like(dropped) for _ in range(2)]
    torch.distributed.all_gather(both, dropped)
    assert torch.equal(*both)
    model(x, torch.rand(64), y).sum().backward()
    assert model.y_embedder.embedding_table.weight.grad[-1].any()
