"""Every registered model: it builds, runs forward and backward, its weights survive a round trip, and on shards it
gives one device's values and gradients.

A new model is tested by being registered; `tiny=` of its registration makes it quick here.
"""

import io

import pytest
import torch
from torch import nn

from dpzoo.models import create_model, list_models
from dpzoo.models.registry import create_tiny_model, cut_dims
from dpzoo.testing import distributed, domain_mesh
from dpzoo.testing.parity import Parity, plan_cuts
from tests.models.lively import liven


def lively(name: str) -> nn.Module:
    """The tiny model with no weight that is zero and hides a term, and nothing random in its forward."""
    torch.manual_seed(0)
    model = create_tiny_model(name)
    liven(model)
    for part in model.modules():
        for rate in ("p", "drop_prob"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
    return model


def distinct() -> list[str]:
    """One name of those that are the same model when they are tiny."""
    found: dict[str, str] = {}
    with torch.device("meta"):
        for name in list_models():
            model = create_tiny_model(name)
            shapes = [None if x is None else tuple(x.shape) for x in model.example_inputs()]
            found.setdefault(f"{model!r} {shapes} {[p.shape for p in model.parameters()]}", name)
    return list(found.values())


@pytest.mark.parametrize("name", list_models())
def test_forward_backward(name: str):
    model = lively(name)
    out = model(*model.example_inputs(batch_size=2))
    assert out.shape[0] == 2
    assert torch.isfinite(out).all()
    out.square().mean().backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None, f"{key} took no part in the output"
        assert torch.isfinite(weight.grad).all(), key


def pytest_generate_tests(metafunc: pytest.Metafunc):
    """Here and not in a decorator: every rank imports this module, and building all models takes seconds."""
    if "distinct_name" in metafunc.fixturenames:
        metafunc.parametrize("distinct_name", distinct())


@distributed(ranks=[2, 4])
def test_domain_parallel(distinct_name: str, ranks: int):
    model = lively(distinct_name)
    inputs = model.example_inputs()
    cuts = cut_dims(distinct_name, inputs)
    parity = Parity(model, inputs, domain_mesh(), strict=True)
    for layout in ("even", "uneven") if ranks == 2 else ("uneven",):
        parity.run_on(plan_cuts(inputs, parity.mesh, cuts, layout))
    parity.compare()


@pytest.mark.parametrize("name", list_models())
def test_weights_survive_a_file(name: str):
    first, second = lively(name).eval(), create_tiny_model(name).eval()
    inputs = first.example_inputs()
    assert not torch.equal(first(*inputs), second(*inputs))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert torch.equal(first(*inputs), second(*inputs))


@pytest.mark.parametrize("name", list_models())
def test_builds_on_meta_at_full_size(name: str):
    with torch.device("meta"):
        model = create_model(name)
    assert all(p.is_meta for p in model.parameters())
    assert model(*model.example_inputs()).is_meta


COMPILED = ["vit_nano_patch4", "vit_nano_patch4_3d_dense", "unet_nano", "diffusion_unet_nano", "dit_nano_patch4_field"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str):
    model = create_tiny_model(name)
    inputs = model.example_inputs(batch_size=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=1e-6)
    compiled(*inputs).sum().backward()
