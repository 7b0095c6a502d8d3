"""Configurations of other libraries build the models that their weights fit, and that compute what theirs do."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import dpzoo
from dpzoo.models import DiT, StormScope, Transolver, ViT
from dpzoo.models.foreign_configs import foreign_call
from dpzoo.weights import WeightsError
from tests.weights.made import EXAMPLES
from tests.weights.mdlus import recorded


def test_a_folder_of_timm(tmp_path):
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), num_classes=7, depth=1).eval()
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 7,
        "global_pool": "token",
        "model_args": {"img_size": [32, 48], "depth": 1},
        "pretrained_cfg": {"input_size": [3, 224, 224]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = ViT.from_pretrained(tmp_path)
    image = torch.randn(2, 3, 32, 48)
    torch.testing.assert_close(ours(image), theirs(image), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    [
        ("vit_base_patch16_224", "vit_base_patch16", 224),
        ("vit_large_patch14_224", "vit_large_patch14", 224),
        ("vit_small_patch14_dinov2", "vit_small_patch14_dinov2", 518),
        ("vit_base_patch14_reg4_dinov2", "vit_base_patch14_reg4_dinov2", 518),
    ],
)
def test_architectures_of_timm(architecture, name, size):
    with torch.device("meta"):
        theirs = timm.create_model(architecture)
        config = {"architecture": architecture, "pretrained_cfg": {"input_size": [3, size, size]}}
        call = foreign_call({**config, "num_classes": theirs.num_classes})
        assert call is not None
        assert call[0] == name
        ours = dpzoo.create_model(call[0], **call[1])
    shapes = {key: t.shape for key, t in theirs.state_dict().items() if "mask_token" not in key}
    assert {key: t.shape for key, t in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(
    ("file", "kind", "inputs"),
    [
        ("transolver", Transolver, ("x", "fx", "time")),
        ("dit", DiT, ("x", "t", "condition")),
        ("edm_dit", StormScope, ("x", "sigma", "state")),
    ],
)
def test_files_of_physicsnemo_give_its_outputs(file, kind, inputs):
    report = dpzoo.load_pretrained(EXAMPLES / f"{file}.mdlus")
    assert type(report.model) is kind
    assert not report.missing
    case = recorded(file)
    found = report.model.eval()(*(case[name] for name in inputs))
    torch.testing.assert_close(found, case["out"], rtol=0, atol=2e-6)


def test_what_a_file_of_physicsnemo_says_and_ours_cannot():
    known = {"__name__": "Transolver", "__args__": {"n_hidden": 16}}
    assert foreign_call({"args": known}) == ("Transolver", {"embed_dim": 16, "slice_eps": 0.01})
    for odd in ({"use_te": True}, {"act": "relu"}):
        assert foreign_call({"args": {**known, "__args__": odd}}) is None


def test_a_folder_of_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, in_channels=4, out_channels=8, sample_size=8,
        num_embeds_ada_norm=10, norm_eps=1e-6,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "transformer")
    report = dpzoo.load_pretrained(tmp_path)
    assert isinstance(report.model, DiT)
    assert not report.missing
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([3, 500]), torch.tensor([1, 9])
    expected = theirs.eval()(x, timestep=t, class_labels=y).sample
    torch.testing.assert_close(report.model.eval()(x, t, y), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "config", [None, {}, {"architecture": "resnet50"}, {"_class_name": "UNet2DModel"}, {"args": []}]
)
def test_those_that_are_not_known(config, tmp_path):
    assert foreign_call(config) is None
    save_file(load_file(EXAMPLES / "outputs.safetensors"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config or {}))
    with pytest.raises(WeightsError, match="does not describe a model that is known here"):
        dpzoo.load_pretrained(tmp_path)
