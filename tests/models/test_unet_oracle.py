"""Where nnU-Net or MONAI is installed: their own nets, their weights renamed into ours, the same bits out.

The renaming is the one that the docstrings of ``dpzoo.models.unet`` and ``dpzoo.models.unet_residual`` tabulate.
"""

import re

import pytest
import torch
from torch import nn

from dpzoo.models import ResidualUNet, UNet
from tests.models.lively import liven


def renamed(state: dict[str, torch.Tensor], rules: dict[str, str]) -> dict[str, torch.Tensor]:
    """The first rule that matches a key names it anew; an empty name drops it."""
    out = {}
    for key, value in state.items():
        pattern = next((p for p in rules if re.match(p, key)), None)
        assert pattern is not None, key
        if rules[pattern]:
            out[re.sub(pattern, rules[pattern], key)] = value
    return out


def assert_same(reference: nn.Module, ours: nn.Module, rules: dict[str, str], *shape: int) -> None:
    torch.manual_seed(0)
    liven(reference)
    ours.load_state_dict(renamed(reference.state_dict(), rules), strict=True)
    x = torch.randn(shape)
    expected, found = reference.eval()(x), ours.eval()(x)
    torch.testing.assert_close(found, list(expected) if isinstance(expected, tuple) else expected, rtol=0, atol=0)


@pytest.mark.parametrize("ndim", [2, 3])
def test_nnunet(ndim: int):
    unet = pytest.importorskip("dynamic_network_architectures.architectures.unet")
    conv, norm = getattr(nn, f"Conv{ndim}d"), getattr(nn, f"InstanceNorm{ndim}d")
    kernels, strides = [(1, 3, 3)[-ndim:], 3, 3, 3], [1, (1, 2, 2)[-ndim:], 2, 2]
    options = {"conv_bias": True, "norm_op": norm, "norm_op_kwargs": {"eps": 1e-5, "affine": True}}
    options |= {"nonlin": nn.LeakyReLU, "deep_supervision": True}
    reference = unet.PlainConvUNet(3, 4, (4, 8, 16, 16), conv, kernels, strides, (2, 2, 1, 2), 5, (2, 1, 2), **options)
    ours = UNet(
        3,
        5,
        ndim=ndim,
        channels=(4, 8, 16, 16),
        strides=strides[1:],
        kernel_sizes=kernels,
        convs_per_stage=(2, 2, 1, 2),
        decoder_convs=(2, 1, 2),
        deep_supervision=True,
    )
    rules = {
        r".*all_modules.*|decoder\.encoder\..*": "",
        r"encoder\.stages\.(\d+)\.0\.": r"encoder.\1.",
        r"decoder\.transpconvs\.(\d+)": r"decoder.\1.up",
        r"decoder\.stages\.(\d+)": r"decoder.\1",
        r"decoder\.seg_layers\.2": "head",
        r"decoder\.seg_layers\.(\d+)": r"deep_heads.\1",
    }
    assert_same(reference, ours, rules, 2, 3, *(8, 16, 24)[:ndim])


@pytest.mark.parametrize("ndim", [2, 3])
def test_monai_basic(ndim: int):
    nets = pytest.importorskip("monai.networks.nets")
    reference = nets.BasicUNet(ndim, 2, 3, (4, 4, 8, 16, 32, 4))
    options = {"down": "max", "negative_slope": 0.1, "odd_sizes": "fit", "skip_first": True}
    ours = UNet(2, 3, ndim=ndim, channels=(4, 4, 8, 16, 32), **options)
    unit, new = r"conv_(\d)\.(?:adn\.)?(conv|N)\.", {"conv": "conv", "N": "norm"}
    rules = {}
    for kind, name in new.items():
        part = unit.replace("(conv|N)", kind)
        rules[rf"conv_0\.{part}"] = rf"encoder.0.convs.\1.{name}."
        rules[rf"down_(\d)\.convs\.{part}"] = rf"encoder.\1.convs.\2.{name}."
        for i in range(4):
            rules[rf"upcat_{4 - i}\.convs\.{part}"] = rf"decoder.{i}.convs.\1.{name}."
    rules |= {rf"upcat_{4 - i}\.upsample\.deconv": f"decoder.{i}.up" for i in range(4)}
    assert_same(reference, ours, {**rules, "final_conv": "head"}, 2, 2, *(37, 39, 34)[:ndim])


@pytest.mark.parametrize("ndim", [2, 3])
@pytest.mark.parametrize("res_units", [0, 1, 2])
def test_monai_residual(ndim: int, res_units: int):
    nets = pytest.importorskip("monai.networks.nets")
    reference = nets.UNet(ndim, 1, 2, (4, 8, 16), (2, 2), num_res_units=res_units)
    ours = ResidualUNet(1, 2, ndim=ndim, channels=(4, 8, 16), res_units=res_units)
    rules = {}
    for i in range(3):
        stage = r"model\." + r"1\.submodule\." * i
        down = stage + ("" if i == 2 else r"0\.")
        rules[down + r"conv\.unit(\d)\.conv"] = rf"encoder.{i}.convs.\1.conv"
        rules[down + r"conv\.unit(\d)\.adn\.A"] = rf"encoder.{i}.convs.\1.act"
        rules[down + r"residual"] = f"encoder.{i}.residual"
        rules[down + r"conv"] = f"encoder.{i}.conv"
        rules[down + r"adn\.A"] = f"encoder.{i}.act"
        up = stage + r"2\." + (r"0\." if res_units else "")
        rules[up + "conv"] = f"decoder.{1 - i}.up.conv"
        rules[up + r"adn\.A"] = f"decoder.{1 - i}.up.act"
        rules[stage + r"2\.1\.conv\.unit0\.conv"] = f"decoder.{1 - i}.residual_unit.convs.0.conv"
        rules[stage + r"2\.1\.conv\.unit0\.adn\.A"] = f"decoder.{1 - i}.residual_unit.convs.0.act"
    assert_same(reference, ours, rules, 2, 1, *(16, 20, 12)[:ndim])
