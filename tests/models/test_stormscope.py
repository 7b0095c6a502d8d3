"""StormScope on one device: sizes, conditions, and that it learns."""

import pytest
import torch

from dpzoo.models import StormScope, create_model, list_models
from dpzoo.models.diffusion import EDMLoss, EDMSampler
from dpzoo.models.registry import create_tiny_model
from tests.models.lively import liven


def tiny(**options: object) -> StormScope:
    torch.manual_seed(0)
    model = create_tiny_model("stormscope_nano", **options)
    assert isinstance(model, StormScope)
    return liven(model)


def test_the_size_of_the_paper():
    with torch.device("meta"):
        model = create_model("stormscope", state_chans=47, background_chans=0, invariant_chans=0)
    assert isinstance(model, StormScope)
    net = model.network
    assert (len(net.blocks), net.embed_dim, net.blocks[0].attn.num_heads) == (16, 768, 16)
    assert net.x_embedder.grid_size == (256, 448)
    assert sum(p.numel() for p in model.parameters()) == 262_451_840
    assert list_models("stormscope*") == [
        "stormscope", "stormscope_6km", "stormscope_nano", "stormscope_shallow", "stormscope_small",
    ]  # fmt: skip


def test_it_is_a_preconditioned_dit_with_joined_fields():
    model = tiny()
    x, sigma, state, background, invariant = model.example_inputs(2)
    field = torch.cat([state, background, invariant.expand(2, -1, -1, -1)], 1)
    s = sigma.view(-1, 1, 1, 1)
    total = (s**2 + 0.25).sqrt()
    answer = model.network(x / total, sigma.log() / 4, field=field)
    wanted = 0.25 / total**2 * x + s * 0.5 / total * answer
    torch.testing.assert_close(model(x, sigma, state, background, invariant), wanted)
    torch.testing.assert_close(model(x, sigma, state=state, background=background, invariant=invariant), wanted)


def test_every_condition_matters():
    model = tiny()
    x, sigma, *conditions = model.example_inputs()
    out = model(x, sigma, *conditions)
    for i in range(3):
        changed = [c + 1 if i == j else c for j, c in enumerate(conditions)]
        assert not torch.allclose(model(x, sigma, *changed), out)


def test_missing_data_has_no_influence():
    model = tiny(mask_token=True)
    x, sigma, *conditions, invalid = model.example_inputs()
    filled = model(x, sigma, *conditions, invalid)
    hole = torch.full((), float("nan"))
    x = torch.where(invalid, hole, x)
    found = model(x, sigma, *(torch.where(invalid, hole, c) for c in conditions), invalid)
    assert torch.equal(found.isnan(), invalid.expand_as(found))
    torch.testing.assert_close(found[~found.isnan()], filled[~found.isnan()])


def test_conditions_that_do_not_fit():
    model = tiny()
    x, sigma, state, background, invariant = model.example_inputs()
    with pytest.raises(ValueError, match="built for 1 channels of background, got 0"):
        model(x, sigma, state, None, invariant)
    with pytest.raises(ValueError, match="built for 4 channels of state, got 1"):
        model(x, sigma, background, state, invariant)
    with pytest.raises(ValueError, match="must be >= 0, got"):
        StormScope((8, 8), 1, state_chans=-1)
    no_state = tiny(state_chans=0)
    assert no_state(x, sigma, None, background, invariant).shape == x.shape


def test_it_learns_and_samples():
    """The next state is half the background: after a few steps a sample comes nearer to it."""
    torch.manual_seed(0)
    model = create_tiny_model("stormscope_nano", in_chans=1, state_chans=0, invariant_chans=0)
    background = torch.randn(8, 1, 24, 16)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def apart() -> float:
        forecast = EDMSampler(12, sigma_max=5.0)(model, background, None, background)
        return (forecast - 0.5 * background).square().mean().sqrt().item()

    before, losses = apart(), []
    for _ in range(60):
        optimizer.zero_grad()
        loss = EDMLoss()(model, 0.5 * background, None, background)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert apart() < 0.5 * before


def test_it_compiles_as_one_graph():
    model = tiny()
    inputs = model.example_inputs(2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=1e-6)
    compiled(*inputs).sum().backward()
