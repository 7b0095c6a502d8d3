"""Files of ViTs: timm's models and conversions are the truth; MAE's, DINO's and other files add names."""

import functools
from typing import Any

import pytest
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from dpzoo.models import ViT
from dpzoo.weights import TensorSource, WeightsMismatchError
from tests.models.lively import liven
from tests.weights.dialect_checks import assert_goes_back, kinds, load

SMALL: dict[str, Any] = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
SQUARE: dict[str, Any] = {**SMALL, "img_size": 16}


def theirs(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return liven(VisionTransformer(**{**SQUARE, **options}), 0.2).eval()


def ours(**options: Any) -> ViT:
    torch.manual_seed(1)
    return liven(ViT(**{**SQUARE, **options}), 0.2).eval()


def picture(*size: int, channels: int = 3) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(2, channels, *size)


def same(a: nn.Module, b: nn.Module, *size: int, channels: int = 3) -> None:
    x = picture(*(size or (16, 16)), channels=channels)
    with torch.no_grad():
        torch.testing.assert_close(a(x), b(x), rtol=0, atol=2e-6)


def config(*size: int) -> dict[str, Any]:
    """What timm writes beside a file."""
    return {"architecture": "vit", "pretrained_cfg": {"input_size": [3, *size]}}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reg_tokens": 3},
        {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1},
        {"class_token": False, "global_pool": "avg"},
        {"qk_norm": True, "qkv_bias": False, "global_pool": "avg"},
    ],
)
def test_timms_file_gives_timms_outputs(options: dict[str, Any]):
    reference, model = theirs(**options), ours(**options)
    view = load(reference.state_dict(), model)
    assert view.changes == ()
    same(model, reference)
    assert_goes_back("timm ViT", reference.state_dict(), model)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "model.backbone."])
def test_training_files(prefix: str):
    reference, model = theirs(), ours()
    view = load({prefix + name: t for name, t in reference.state_dict().items()}, model)
    assert kinds(view) == {"renamed": len(reference.state_dict())}
    same(model, reference)


# ---------------------------------------------------------------------- other grids
@pytest.mark.parametrize("options", [{}, {"reg_tokens": 3}, {"class_token": False, "global_pool": "avg"}])
def test_another_grid_is_timms_resampling(options: dict[str, Any]):
    reference, model = theirs(**options), ours(img_size=(8, 32), **options)
    view = load(TensorSource(reference.state_dict(), config=config(16, 16)), model)
    prefix = reference.num_prefix_tokens
    expected = resample_abs_pos_embed(reference.pos_embed, [2, 8], [4, 4], prefix)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=2e-6)
    assert kinds(view) == {"resampled": 1}
    assert view.changes[0].detail.startswith("grid 4 x 4 -> 2 x 8")
    wide = VisionTransformer(**{**SQUARE, "img_size": (8, 32), **options}).eval()
    wide.load_state_dict({**reference.state_dict(), "pos_embed": expected})
    same(model, wide, 8, 32)


def test_the_same_number_of_patches_on_another_grid_is_resampled():
    reference, model = theirs(), ours(img_size=(8, 32))
    assert reference.pos_embed.shape == model.pos_embed.shape
    load(TensorSource(reference.state_dict(), config=config(16, 16)), model)
    expected = resample_abs_pos_embed(reference.pos_embed, [2, 8], [4, 4], 1)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=2e-6)


def test_rectangular_grids_must_be_told():
    reference, model = theirs(img_size=(12, 20), in_chans=2), ours(img_size=(16, 24), in_chans=2)
    with pytest.raises(WeightsMismatchError, match=r"pos_embed has 16 rows, the model a grid of 4 x 6 and 1 prefix"):
        load(reference.state_dict(), model)
    load(reference.state_dict(), model, old_grid=(3, 5))
    expected = resample_abs_pos_embed(reference.pos_embed, [4, 6], [3, 5], 1)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=2e-6)
    with pytest.raises(WeightsMismatchError, match=r"not a grid of \(4, 4\) \(from old_grid\) with 1 prefix"):
        load(theirs(img_size=(12, 20)).state_dict(), model, old_grid=(4, 4))


def test_pictures_are_taken_for_square_and_the_report_says_so():
    reference, model = theirs(), ours(img_size=(8, 20))
    view = load(reference.state_dict(), model)
    assert "a square grid is assumed" in view.changes[0].detail
    expected = resample_abs_pos_embed(reference.pos_embed, [2, 5], [4, 4], 1)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "noted",
    [
        {"arguments": {"img_size": [12, 20]}},
        {"model_args": {"img_size": [12, 20]}, **config(224, 224)},
        {"position_grid": [3, 5]},
    ],
)
def test_configs_that_note_the_grid(noted: dict[str, Any]):
    reference, model = theirs(img_size=(12, 20), in_chans=2), ours(img_size=(16, 24), in_chans=2)
    load(TensorSource(reference.state_dict(), config=noted), model)
    expected = resample_abs_pos_embed(reference.pos_embed, [4, 6], [3, 5], 1)
    torch.testing.assert_close(model.pos_embed, expected, rtol=0, atol=2e-6)


def test_volumes():
    small = {**SMALL, "ndim": 3, "in_chans": 1, "class_token": False, "global_pool": "avg"}
    source, model = ViT(**{**small, "img_size": 8}), ViT(**{**small, "img_size": (8, 12, 4)})
    load(TensorSource(source.state_dict(), config={"arguments": {"img_size": 8}}), model)
    assert model.pos_embed.shape == (1, 6, 16)
    with pytest.raises(WeightsMismatchError, match=r"a grid of \(2, 2\) in the file, \(2, 3, 1\) in the model"):
        load(source.state_dict() | {"pos_embed": torch.zeros(1, 4, 16)}, model, old_grid=(2, 2))


# ---------------------------------------------------------------------- prefix tokens
def test_a_model_without_class_token_drops_it():
    reference = theirs(reg_tokens=2)
    model = ours(class_token=False, global_pool="avg", fc_norm=False)
    view = load(reference.state_dict(), model)
    assert torch.equal(model.pos_embed, reference.pos_embed[:, 3:])
    assert next(c for c in view.changes if c.kind == "dropped").theirs == ("cls_token", "reg_token")


def test_positions_of_prefix_tokens_move_into_the_tokens():
    """The same outputs: a token that always gets the same position is that sum."""
    reference, model = theirs(reg_tokens=2), ours(reg_tokens=2, no_embed_class=True)
    load(reference.state_dict(), model)
    same(model, reference)
    back = ours(reg_tokens=2)
    load(model.state_dict(), back)
    assert not back.pos_embed[:, :3].any()
    same(back, reference)


# ---------------------------------------------------------------------- channels, patches, heads
@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_and_patches_are_timms(channels: int):
    reference = theirs()
    view = load(reference.state_dict(), model := ours(in_chans=channels, patch_size=8, img_size=32))
    other = VisionTransformer(**{**SQUARE, "in_chans": channels, "patch_size": 8, "img_size": 32}).eval()
    state = dict(reference.state_dict())
    kernel = state["patch_embed.proj.weight"]
    kernel = kernel.sum(1, keepdim=True) if channels == 1 else kernel[:, [0, 1, 2, 0, 1]] * 3 / 5
    other.load_state_dict(checkpoint_filter_fn({**state, "patch_embed.proj.weight": kernel}, other))
    same(model, other, 32, 32, channels=channels)
    how = "summed" if channels == 1 else "repeated, scaled by 3/5"
    assert view.changes[-1].detail == f"input channels 3 -> {channels} ({how}); patch 4 x 4 -> 8 x 8"
    with pytest.raises(WeightsMismatchError, match="has 1 input channels, the model 4" if channels == 1 else "has 5"):
        load(model.state_dict(), ours(in_chans=4, patch_size=8, img_size=32))


def test_another_head_is_kept_and_told():
    reference, model = theirs(), ours(num_classes=7)
    own = {name: t.clone() for name, t in model.head.state_dict(prefix="head.").items()}
    view = load(reference.state_dict(), model)
    assert set(view.kept) == {"head.weight", "head.bias"}
    change = next(c for c in view.changes if c.kind == "dropped")
    assert (change.theirs, change.ours) == (("head.weight", "head.bias"), ("head.weight", "head.bias"))
    assert change.detail == "head: the file has 5 outputs, the model 7 outputs"
    assert all(torch.equal(model.state_dict()[name], t) for name, t in own.items())
    load(reference.state_dict(), features := ours(num_classes=0))
    x = picture(16, 16)
    torch.testing.assert_close(features(x), reference.forward_head(reference.forward_features(x), pre_logits=True))
    assert set(load(features.state_dict(), model).kept) == {"head.weight", "head.bias"}
    dense = ours(head="dense", class_token=True, num_classes=0)
    assert set(load(reference.state_dict(), dense).kept) == {"head.proj.weight", "head.proj.bias"}


def test_a_wider_net_is_not_another_head():
    view_names = functools.partial(load, ours(embed_dim=24).state_dict())
    with pytest.raises((RuntimeError, AssertionError)):  # shapes are left for the loader to report
        view_names(ours(num_classes=7))


# ---------------------------------------------------------------------- self-supervision
def test_maes_file():
    reference = theirs(num_classes=0)
    extras = ("mask_token", "decoder_pos_embed", "decoder_embed.weight", "decoder_blocks.0.attn.qkv.weight",
              "decoder_norm.bias", "decoder_pred.weight")  # fmt: skip
    view = load(reference.state_dict() | dict.fromkeys(extras, torch.zeros(2, 2)), model := ours(num_classes=0))
    assert {c.theirs for c in view.changes} == {(name,) for name in extras}
    assert {(c.kind, c.detail) for c in view.changes} == {("dropped", "only used in pretraining")}
    same(model, reference)


def test_dinos_teacher():
    reference = theirs(num_classes=0)
    file = {f"backbone.{n}": t for n, t in reference.state_dict().items()}
    view = load(
        file | {"head.mlp.0.weight": torch.zeros(2), "head.last_layer.weight_g": torch.zeros(2)}, model := ours()
    )
    assert set(view.kept) == {"head.weight", "head.bias"}
    model.head = nn.Identity()
    same(model, reference)


def test_dinov2s_registers_are_timms():
    reference = theirs(reg_tokens=2, init_values=0.1, num_classes=0, no_embed_class=True)
    file = dict(reference.state_dict())
    file["register_tokens"] = file.pop("reg_token")
    file["mask_token"] = torch.zeros(1, 16)
    file["pos_embed"] = torch.cat([torch.randn(1, 1, 16), file["pos_embed"]], dim=1)
    model = ours(reg_tokens=2, init_values=0.1, num_classes=0, no_embed_class=True)
    load({name: t.clone() for name, t in file.items()}, model)
    reference.load_state_dict(checkpoint_filter_fn(file, reference))
    same(model, reference)


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("dist_token", r"'dist_token' needs a distillation token \(DeiT\); the model does not have it"),
        ("blocks.0.mlp.w12.weight", "gated perceptrons"),
        ("blocks.1.ls1.gamma", r"LayerScale \(build it with init_values=1e-5\)"),
        ("fc_norm.weight", "a norm behind the pooling"),
        ("blocks.0.attn.q_norm.weight", r"qk_norm=True"),
    ],
)
def test_missing_features_have_names(name: str, feature: str):
    with pytest.raises(WeightsMismatchError, match=feature):
        load({**theirs().state_dict(), name: torch.zeros(2)}, ours())
