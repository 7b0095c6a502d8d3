"""Files of U-Nets: MONAI's and nnU-Net's own nets where they are installed, PhysicsNeMo's files for EDM's names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpzoo.models import DiffusionUNet, ResidualUNet, UNet
from dpzoo.weights import TensorSource, WeightsMismatchError
from tests.models.lively import liven
from tests.weights.dialect_checks import assert_goes_back, load
from tests.weights.golden import golden
from tests.weights.mdlus import read_mdlus, recorded

MONAI_BASIC: dict[str, Any] = {"down": "max", "negative_slope": 0.1, "odd_sizes": "fit", "skip_first": True}
NNUNET: dict[str, Any] = {
    "channels": (4, 8, 8), "strides": 2, "convs_per_stage": (2, 1, 2), "decoder_convs": (1, 2),
    "deep_supervision": True,
}  # fmt: skip


def same(ours: nn.Module, reference: nn.Module, *shape: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(*shape)
    with torch.no_grad():
        expected, found = reference.eval()(x), ours.eval()(x)
    torch.testing.assert_close(found, list(expected) if isinstance(expected, tuple) else expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- MONAI
def test_monais_basic_unet():
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    reference = liven(nets.BasicUNet(2, 2, 3, (4, 4, 8, 16, 32, 4)))
    model = UNet(2, 3, channels=(4, 4, 8, 16, 32), **MONAI_BASIC)
    load(reference.state_dict(), model)
    same(model, reference, 1, 2, 32, 34)
    assert_goes_back("MONAI BasicUNet", reference.state_dict(), model)


@pytest.mark.parametrize("res_units", [0, 1, 2])
def test_monais_residual_unet(res_units: int):
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    reference = liven(nets.UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=res_units))
    model = ResidualUNet(1, 2, ndim=3, channels=(4, 8, 8), res_units=res_units)
    load({f"module.{n}": t for n, t in reference.state_dict().items()}, model)
    same(model, reference, 1, 1, 8, 8, 12)
    assert_goes_back("MONAI UNet", reference.state_dict(), model)


# ---------------------------------------------------------------------- nnU-Net
def test_nnunets_plain_unet():
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    torch.manual_seed(0)
    reference = liven(
        unet.PlainConvUNet(
            3, 3, (4, 8, 8), nn.Conv2d, 3, (1, 2, 2), (2, 1, 2), 5, (1, 2), conv_bias=True, norm_op=nn.InstanceNorm2d,
            norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, deep_supervision=True,
        )
    )  # fmt: skip
    model = UNet(3, 5, **NNUNET)
    load(reference.state_dict(), model)
    same(model, reference, 1, 3, 16, 12)
    assert_goes_back("nnU-Net", reference.state_dict(), model)


# ---------------------------------------------------------------------- by recorded names, without the libraries
NETS: dict[str, tuple[str, nn.Module]] = {
    "monai_basic_unet": ("MONAI BasicUNet", UNet(2, 3, channels=(4, 4, 8, 16, 32), **MONAI_BASIC)),
    "monai_unet": ("MONAI UNet", ResidualUNet(1, 2, ndim=3, channels=(4, 8, 8), res_units=2)),
    "nnunet_plain": ("nnU-Net PlainConvUNet", UNet(3, 5, **NNUNET)),
}


@pytest.mark.parametrize("name", NETS)
def test_recorded_names(name: str):
    dialect, model = NETS[name]
    file = golden(name)
    load(file, model)
    assert_goes_back(dialect, file, model)


def test_nnunets_aliases_may_be_missing_and_must_be_equal():
    file, model = golden("nnunet_plain"), UNet(3, 5, **NNUNET)
    load({n: t for n, t in file.items() if "all_modules" not in n and not n.startswith("decoder.encoder")}, model)
    first = model.encoder[0].convs[0].conv.weight.clone()
    assert torch.equal(first, file["encoder.stages.0.0.convs.0.conv.weight"])
    name = "decoder.encoder.stages.0.0.convs.0.all_modules.0.weight"
    with pytest.raises(WeightsMismatchError, match=rf"conv\.weight and {name} should hold the same values"):
        load({**file, name: file[name] + 1}, model)


def test_heads_and_deep_supervision():
    file = golden("nnunet_plain")
    view = load(file, UNet(3, 5, **{**NNUNET, "deep_supervision": False}))
    dropped = [c for c in view.changes if c.kind == "dropped"]
    assert {n for c in dropped for n in c.theirs} == {f"decoder.seg_layers.0.{p}" for p in ("weight", "bias")}
    view = load(file, UNet(3, 9, **NNUNET))
    assert set(view.kept) == {"head.weight", "head.bias", "deep_heads.0.weight", "deep_heads.0.bias"}


def test_residual_encoders_are_refused():
    file = golden("nnunet_plain")
    name = "encoder.stages.0.blocks.0.conv1.conv.weight"
    for state in ({**file, name: torch.zeros(1)}, {name: torch.zeros(1)}):
        with pytest.raises(WeightsMismatchError, match=r"needs residual encoder blocks \(ResEnc\)"):
            load(state, UNet(3, 5, **NNUNET))


# ---------------------------------------------------------------------- EDM's names
SONG: dict[str, Any] = {
    "model_channels": 4, "channel_mult": (1, 2), "channel_mult_emb": 2, "num_blocks": 1, "attn_levels": (1,),
    "dropout": 0.0,
}  # fmt: skip
RESIDUAL: dict[str, Any] = {
    "embedding": "fourier", "encoder": "residual", "resample_filter": (1, 3, 3, 1), "channel_mult_noise": 2,
}  # fmt: skip


def song_unet(name: str) -> DiffusionUNet:
    return DiffusionUNet(2, 2, **SONG, **(RESIDUAL if name == "song_unet_residual" else {"label_dim": 2}))


@pytest.mark.parametrize("name", ["song_unet", "song_unet_residual"])
def test_physicsnemos_song_unet_gives_its_outputs(name: str):
    source, case, model = read_mdlus(name), recorded(name), song_unet(name)
    load(source, model)
    with torch.no_grad():
        found = model(case["x"], case["noise_labels"], case.get("class_labels"))
    torch.testing.assert_close(found, case["out"], rtol=0, atol=1e-6)
    assert_goes_back("EDM SongUNet", source, model, resolution=8)


def test_another_resolution_and_old_names_are_the_same_net():
    source, expected, model = read_mdlus("song_unet"), song_unet("song_unet"), song_unet("song_unet")
    load(source, expected)

    def old(name: str) -> str:
        name = name.replace("8x8", "640x640").replace("4x4", "320x320")
        return name.replace("attn.norm", "norm2").replace("attn.", "")

    file: dict[str, Tensor] = {old(n): source.read(n) for n in source.names()}
    load({**file, "map_augment.weight": torch.zeros(2, 2)}, model)
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in model.state_dict().items())
    with pytest.raises(WeightsMismatchError, match=r"levels of \[640, 320\] points, the model 3 levels"):
        load(file, DiffusionUNet(2, 2, **{**SONG, "channel_mult": (1, 2, 2)}))
    with pytest.raises(WeightsMismatchError, match="pass resolution=, a multiple of 2"):
        assert_goes_back("EDM", TensorSource(file), model)
    with pytest.raises(WeightsMismatchError, match="a learned position embedding"):
        load({**file, "pos_embd": torch.zeros(1)}, model)
