"""Transolver on one device: the paper's maths written out, published sizes, foreign state dicts, chunks, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.models import Transolver, create_model
from dpzoo.models.layers.physics_attention import PhysicsAttention
from tests.models.lively import liven

PARAMETERS = {  # millions, as published for the recipes
    "transolver_drivaer_surface": 3.99,
    "transolver_drivaer_surface_unified": 6.02,
    "transolver_drivaer_volume_unified": 8.96,
}


def small(**options) -> Transolver:
    torch.manual_seed(0)
    options = {"embed_dim": 16, "depth": 3, "num_heads": 2, "num_slices": 5, **options}
    model = Transolver(**options).double().eval()
    return liven(model, 0.2)


def random(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name: str):
    with torch.device("meta"):
        count = sum(p.numel() for p in create_model(name).parameters())
    assert count / 1e6 == pytest.approx(PARAMETERS[name], abs=0.005)


def written_out(attn: PhysicsAttention, x: Tensor) -> Tensor:
    """The formulas of the paper, one head, slice and point after the other."""
    batch, n, heads, dim = x.shape[0], x[0, ..., 0].numel(), attn.num_heads, attn.head_dim
    grid = x.shape[1:-1]

    def project(layer):
        if attn.grid_ndim:
            y = layer(x.movedim(-1, 1)).movedim(1, -1)
        else:
            y = layer(x)
        return y.reshape(batch, n, heads, dim)

    mid = project(attn.in_project_x)
    features = mid if attn.plus else project(attn.in_project_fx)
    out = torch.zeros(batch, n, heads, dim, dtype=x.dtype)
    for b in range(batch):
        for h in range(heads):
            if attn.plus:
                t = (attn.proj_temperature(mid[b, :, h]) + attn.bias[0, 0, h]).clamp(min=0.01)
            else:
                t = attn.temperature[0, 0, h]
                t = t.clamp(0.1, 5) if attn.grid_ndim else t
            w = torch.softmax(attn.in_project_slice(mid[b, :, h]) / t, -1)
            tokens = torch.stack([(w[:, g : g + 1] * features[b, :, h]).sum(0) / (w[:, g].sum() + 1e-5)
                                  for g in range(attn.num_slices)])  # fmt: skip
            q, k, v = attn.to_q(tokens), attn.to_k(tokens), attn.to_v(tokens)
            out[b, :, h] = w @ (torch.softmax(q @ k.T / math.sqrt(dim), -1) @ v)
    return attn.to_out(out.reshape(batch, *grid, heads * dim))


@pytest.mark.parametrize(
    ("options", "points"),
    [({}, (11,)), ({"grid_ndim": 2}, (4, 3)), ({"grid_ndim": 3}, (3, 2, 2)), ({"plus": True}, (9,))],
)
def test_attention_is_the_papers(options, points):
    torch.manual_seed(0)
    attn = PhysicsAttention(8, 2, 3, **options).double().eval()
    if not options.get("plus"):
        attn.temperature.data.copy_(torch.tensor([0.03, 0.7]).view(1, 1, 2, 1))  # one of them is clamped on grids
    x = torch.randn(2, *points, 8, dtype=torch.float64)
    torch.testing.assert_close(attn(x), written_out(attn, x), rtol=1e-12, atol=1e-12)


def test_slice_sums_of_half_precision_are_float32():
    attn = PhysicsAttention(8, 2, 3).bfloat16()
    weights, features = attn.assign(torch.randn(1, 4000, 8).bfloat16())
    sums = attn.gather_slices(weights, features)
    assert sums.dtype is torch.float32
    torch.testing.assert_close(sums[..., -1].sum(-1), torch.full((1, 2), 4000.0), rtol=1e-2, atol=0)
    exact = weights.double().sum(1)
    torch.testing.assert_close(sums[..., -1].double(), exact, rtol=1e-5, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        assert attn.float().gather_slices(weights, features).dtype is torch.float32


def test_autocast_stays_near():
    model = small(space_dim=3, out_dim=2).float()
    x = torch.rand(1, 50, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    torch.testing.assert_close(found.float(), model(x), rtol=0.1, atol=0.1)


def test_order_of_points_does_not_matter():
    model = small(space_dim=3, fun_dim=2, out_dim=2)
    x, fx, order = random(1, 20, 3), random(1, 20, 2), torch.randperm(20)
    torch.testing.assert_close(model(x[:, order], fx[:, order]), model(x, fx)[:, order])


def test_flat_grid_and_input_function_per_sample():
    model = small(space_dim=2, fun_dim=2, grid=(4, 3))
    x, fx = random(2, 4, 3, 2), random(2, 2)
    flat = model(x.flatten(1, 2), fx)
    assert flat.shape == (2, 12, 1)
    torch.testing.assert_close(flat, model(x, fx.view(2, 1, 1, 2).expand(2, 4, 3, 2)).flatten(1, 2))


def test_grids_of_other_sizes():
    model = small(space_dim=2, grid=(4, 3))
    assert model(random(1, 6, 5, 2)).shape == (1, 6, 5, 1)


def test_unified_positions_are_distances():
    model = small(space_dim=2, unified_pos=True, ref=2)
    seen = []
    model.preprocess.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.tensor([[[0.0, 0.0], [1.0, 1.0], [0.5, 0.0]]]).double())
    r = math.sqrt(2)
    expected = [[0, 1, 1, r], [r, 1, 1, 0], [0.5, math.sqrt(1.25), 0.5, math.sqrt(1.25)]]
    torch.testing.assert_close(seen[0][0], torch.tensor(expected).double())


def test_time_and_condition_matter_per_sample():
    model = small(space_dim=2, fun_dim=1, time=True, condition_dim=2)
    x, fx, time, condition = random(2, 7, 2), random(2, 7, 1), random(2), random(2, 2)
    out = model(x, fx, time, condition)
    for other in (
        model(x, fx, time + torch.tensor([0.0, 1.0]), condition),
        model(x, fx, time, condition.clone().index_fill_(0, torch.tensor(1), 3.0)),
    ):
        torch.testing.assert_close(other[0], out[0])
        assert not torch.allclose(other[1], out[1])


def test_noise_of_plus():
    model = small(plus=True)
    x = random(1, 9, 3)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    always = small(plus=True, slice_noise="always")
    assert not torch.equal(always(x), always(x))


# ---------------------------------------------------------------------- state dicts
def test_the_authors_layout_of_temperature_loads():
    model = small(space_dim=2, fun_dim=1, grid=(4, 3))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    for key in [k for k in state if k.endswith("temperature")]:
        assert state[key].shape == (1, 1, 2, 1)
        state[key] = state[key].reshape(1, 2, 1, 1)
    state["placeholder"] = random(16)  # held by the authors' structured model, used without an input function only
    other = small(space_dim=2, fun_dim=1, grid=(4, 3), depth=3)
    torch.nn.init.zeros_(other.blocks[0].Attn.temperature)
    other.load_state_dict(state)
    x, fx = random(1, 4, 3, 2), random(1, 4, 3, 1)
    assert torch.equal(other(x, fx), model(x, fx))


# ---------------------------------------------------------------------- chunks
@pytest.mark.parametrize("options", [{}, {"store_features": False}, {"interleave": True}])
@pytest.mark.parametrize("plus", [False, True])
def test_chunks_give_the_numbers_of_one_shot(options, plus):
    model = small(space_dim=3, fun_dim=2, out_dim=2, time=True, condition_dim=1, plus=plus)
    x, time, condition = random(2, 23, 3), random(2), random(2, 1)
    for fx in (random(2, 23, 2), random(2, 2)):
        for chunk_size in (1, 7, 23, 100):
            found = model.predict_in_chunks(x, fx, time, condition, chunk_size=chunk_size, **options)
            torch.testing.assert_close(found, model(x, fx, time, condition), rtol=1e-12, atol=1e-12)
            assert not found.requires_grad


def test_no_points():
    model = small(space_dim=3)
    assert model(random(1, 0, 3)).shape == (1, 0, 1)
    assert model.predict_in_chunks(random(1, 0, 3), chunk_size=4).shape == (1, 0, 1)


def test_chunks_are_all_that_is_held_at_once(monkeypatch):
    model = small(space_dim=3)
    longest = []
    assign = PhysicsAttention.assign
    monkeypatch.setattr(PhysicsAttention, "assign", lambda self, x: longest.append(x.shape[1]) or assign(self, x))
    model.predict_in_chunks(random(1, 50, 3), chunk_size=8)
    assert max(longest) == 8


# ---------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Transolver(grid=(4,)), "2 or 3 sizes"),
        (lambda: Transolver(embed_dim=10, num_heads=3), "3 heads do not divide 10"),
        (lambda: Transolver(embed_dim=9, num_heads=3, time=True), "even embed_dim"),
        (lambda: Transolver(plus=True, grid=(4, 4)), "points without order"),
        (lambda: small()(random(1, 4, 2)), r"x should be \(B, N, 3\)"),
        (lambda: small(grid=(4, 3))(random(1, 11, 3)), r"x should be \(B, 4, 3, 3\)"),
        (lambda: small()(random(1, 4, 3), random(1, 4, 1)), "fx is given"),
        (lambda: small(fun_dim=1)(random(1, 4, 3)), "fx is missing"),
        (lambda: small(fun_dim=1)(random(1, 4, 3), random(1, 5, 1)), r"fx should be \(1, 4, 1\) or \(1, 1\)"),
        (lambda: small(time=True)(random(1, 4, 3)), "time is missing"),
        (lambda: small().train().predict_in_chunks(random(1, 4, 3), chunk_size=2), r"model\.eval\(\)"),
        (lambda: small().predict_in_chunks(random(1, 4, 3), chunk_size=0), "at least 1"),
        (lambda: small(grid=(2, 2)).predict_in_chunks(random(1, 2, 2, 3), chunk_size=2), "structured"),
    ],
)
def test_errors(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_gelu_is_the_exact_one():
    model = small()
    x = random(3, 16)
    expected = model.blocks[0].mlp.linear_post(F.gelu(model.blocks[0].mlp.linear_pre[0](x)))
    torch.testing.assert_close(model.blocks[0].mlp(x), expected)
