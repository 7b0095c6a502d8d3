"""Every registered model: it builds, runs forward and backward, and its weights survive a round trip.

A new model is tested by being registered; a family adds one row to ``SHRINK`` so that its big variants are quick here.
"""

import io
from typing import Any

import pytest
import torch

from dpzoo.models import create_model, list_models

SHRINK: dict[str, dict[str, Any]] = {
    "vit_": {"depth": 1},
    "unet_": {"channels": (4, 6, 8)},
    "diffusion_unet_": {"model_channels": 8, "num_blocks": 1},
}


def small(name: str, **kwargs: Any) -> torch.nn.Module:
    """The variant with as little depth and as few patches as still use all its parts."""
    family = next((f for f in SHRINK if name.startswith(f)), None)
    assert family is not None, f"{name} has no row in SHRINK of {__file__}"
    kwargs = {**SHRINK[family], **kwargs}
    with torch.device("meta"):
        patch_embed = getattr(create_model(name, **kwargs), "patch_embed", None)
    if patch_embed is not None:  # built for one grid
        kwargs["img_size"] = tuple(p * n for p, n in zip(patch_embed.patch_size, (3, 2, 2), strict=False))
    return create_model(name, **kwargs)


@pytest.mark.parametrize("name", list_models())
def test_forward_backward(name: str):
    torch.manual_seed(0)
    model = small(name)
    out = model(*model.example_inputs(batch_size=2))
    assert out.shape[0] == 2
    assert torch.isfinite(out).all()
    out.square().mean().backward()
    for key, weight in model.named_parameters():
        assert weight.grad is not None, f"{key} took no part in the output"
        assert torch.isfinite(weight.grad).all(), key


@pytest.mark.parametrize("name", list_models())
def test_weights_survive_a_file(name: str):
    torch.manual_seed(0)
    first, second = small(name).eval(), small(name).eval()
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


@pytest.mark.parametrize("name", ["vit_nano_patch4", "vit_nano_patch4_3d_dense", "unet_nano", "diffusion_unet_nano"])
def test_compiles_as_one_graph(name: str):
    model = small(name)
    inputs = model.example_inputs(batch_size=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=0, atol=1e-6)
    compiled(*inputs).sum().backward()
