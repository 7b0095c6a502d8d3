"""Transolver domain-parallel gives one device's values, input and weight gradients, and says little between ranks."""

import pytest
import torch
from torch import Tensor

from dpzoo.models import Transolver
from dpzoo.models.layers.physics_attention import PhysicsAttention
from dpzoo.shard import Shard, ShardTensor, manual_seed, scatter, strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh
from tests.models.lively import liven

SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_slices": 5}
MODELS = {
    "points": {"space_dim": 3, "out_dim": 2, "fun_dim": 2},
    "unified positions": {"space_dim": 2, "fun_dim": 1, "unified_pos": True, "ref": 3},
    "time and condition": {"space_dim": 3, "fun_dim": 1, "time": True, "condition_dim": 2},
    "plus": {"space_dim": 3, "plus": True, "slice_noise": "never", "condition_dim": 2},
    "2-D": {"space_dim": 2, "fun_dim": 1, "grid": (17, 5)},
    "3-D": {"space_dim": 3, "grid": (13, 4, 3)},
}


def build(name: str) -> Transolver:
    torch.manual_seed(0)
    model = Transolver(**{**SIZES, **MODELS[name]}).double()
    return liven(model)


def inputs(model: Transolver) -> list[Tensor | None]:
    torch.manual_seed(1)
    given = list(model.example_inputs(batch_size=2))
    if model.grid is None:
        given[0] = given[0][:, :17]
        given[1] = given[1] if given[1] is None else given[1][:, :17]
    return given


def cuts(given: list[Tensor | None], dim: int | tuple[int, ...]) -> list[int | tuple[int, ...] | None]:
    return [dim if i < 2 and t is not None else None for i, t in enumerate(given)]


@distributed(ranks=[3])
@pytest.mark.parametrize("name", MODELS)
def test_parity(name: str):
    model = build(name)
    given = inputs(model)
    for layout in ("uneven", "empty"):
        assert_parity(model, given, cuts(given, 1), [layout] * len(given), strict=True)


@distributed(ranks=[1, 2, 4])
def test_parity_of_points():
    model = build("points")
    given = inputs(model)
    for layout in ("uneven", "empty_first"):
        assert_parity(model, given, cuts(given, 1), [layout] * len(given), strict=True)


@distributed(ranks=[4])
@pytest.mark.parametrize("name", ["2-D", "3-D"])
def test_two_grid_dims_cut(name: str):
    model = build(name)
    given = inputs(model)
    placements = cuts(given, (1, 2))
    assert_parity(model, given, placements, ["uneven"] * len(given), mesh=grid_mesh(), strict=True)


@distributed(ranks=[4])
def test_later_subgroup_and_batch_cut():
    model = build("points")
    given = inputs(model)
    assert_parity(model, given, cuts(given, 1), ["uneven"] * 4, mesh=row_mesh(), strict=True)
    assert_parity(model, given, cuts(given, (0, 1)), ["uneven"] * 4, mesh=grid_mesh(), strict=True)


@distributed(ranks=[3])
def test_function_values_cut_elsewhere_or_the_same_for_all_points():
    model = build("points")
    x, fx, *_ = inputs(model)
    assert_parity(model, [x, fx], [1, 1], ["uneven", "even"], strict=True)
    assert_parity(model, [x, fx[:, 0]], [1, None], ["uneven", None], strict=True)


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("options", [{}, {"plus": True, "slice_noise": "never"}])
def test_one_small_reduction_a_block_and_direction(options, ranks: int):
    torch.manual_seed(0)
    attn = PhysicsAttention(16, 2, 5, **options)
    x = scatter(torch.randn(2, 19, 16), domain_mesh(), 1, requires_grad=True)
    sums = 2 * 2 * 5 * (8 + 1) * 4  # batch x heads x slices x (features + 1) in float32
    with strict(), count_traffic() as forward:
        out = attn(x)
    assert (forward.calls, forward.nbytes) == (1, sums)
    loss = out.square().sum()
    weights = sum(p.numel() * 4 for p in attn.parameters())
    with strict(), count_traffic() as backward:
        loss.backward()
    tokens = 2 * 2 * 5 * 8 * 4
    shared = sum(p.numel() * 4 for m in (attn.to_q, attn.to_k, attn.to_v) for p in m.parameters())
    assert backward.calls == 2  # the gradients of the tokens, and those of all weights in one bucket
    assert backward.nbytes == tokens + weights - shared


@distributed(ranks=[2])
def test_model_traffic():
    """Depth reductions forward; depth and one bucket of weight gradients backward."""
    torch.manual_seed(0)
    model = Transolver(3, 2, embed_dim=16, depth=3, num_heads=2, num_slices=5)
    x = scatter(torch.rand(1, 21, 3), domain_mesh(), 1)
    with strict(), count_traffic() as forward:
        out = model(x)
    assert forward.calls == 3
    loss = out.square().sum()
    with count_traffic() as backward:
        loss.backward()
    assert backward.calls == 4


@distributed(ranks=[2, 3])
def test_chunks_of_a_sharded_cloud():
    model = build("points").eval()
    x, fx, *_ = inputs(model)
    expected = model(x, fx)
    for interleave in (False, True):
        sharded = [scatter(t, domain_mesh(), 1) for t in (x, fx)]
        with strict():
            found = model.predict_in_chunks(*sharded, chunk_size=5, interleave=interleave)
        assert found.placements == sharded[0].placements
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12)


@distributed(ranks=[3])
def test_noise_is_that_of_any_number_of_ranks():
    """The noise of a point depends on its global index, not on the rank that holds it."""
    model = Transolver(3, 2, **SIZES, plus=True).double()
    x = torch.rand(1, 12, 3, dtype=torch.float64)
    found = []
    for sizes in ((4, 4, 4), (1, 9, 2)):
        manual_seed(3)
        shapes = {0: tuple((1, n, 3) for n in sizes)}
        mesh = domain_mesh()
        start = sum(sizes[: mesh.get_local_rank()])
        local = x[:, start : start + sizes[mesh.get_local_rank()]]
        found.append(model(ShardTensor.from_local(local, mesh, [Shard(1)], sharding_shapes=shapes)).full_tensor())
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
