"""The plain U-Nets on one device: shapes, odd grids, keys, errors, and the same sums written out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpzoo.models import ResidualUNet, UNet, create_model, list_models
from dpzoo.models.unet import fit_grid
from tests.models.lively import liven

TINY: dict[str, Any] = {"in_chans": 2, "out_chans": 3, "channels": (4, 6, 8)}


def field(*grid: int, channels: int = 2, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, *grid, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("down", ["stride", "max", "avg"])
@pytest.mark.parametrize("up", ["transpose", "linear", "nearest"])
def test_shapes_and_gradients(ndim: int, down: str, up: str):
    model = UNet(**TINY, ndim=ndim, down=down, up=up)
    x = field(*(16, 8, 12)[:ndim]).requires_grad_()
    out = model(x)
    assert out.shape == (2, 3, *x.shape[2:])
    out.square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "conv.bias" not in n
    )
    assert x.grad.abs().amin(dim=(0, 1)).min() >= 0 and x.grad.abs().sum() > 0


@pytest.mark.parametrize("norm", ["instance", "instance_plain", "batch", "group", "none"])
@pytest.mark.parametrize("act", ["leaky_relu", "relu", "prelu", "gelu", "silu", "none"])
def test_every_norm_and_activation(norm: str, act: str):
    assert UNet(**TINY, norm=norm, act=act)(field(8, 8)).isfinite().all()


def test_anisotropic_strides_and_kernels():
    strides, kernels = ((1, 2, 2), (2, 2, 4)), ((1, 3, 3), 3, (3, 3, 5))
    model = UNet(**TINY, ndim=3, strides=strides, kernel_sizes=kernels, convs_per_stage=(1, 2, 3), decoder_convs=(2, 1))
    assert model.total_stride == (2, 4, 8)
    assert model(field(4, 8, 16)).shape == (2, 3, 4, 8, 16)
    assert [len(stage.convs) for stage in model.encoder] == [1, 2, 3]
    assert [len(stage.convs) for stage in model.decoder] == [2, 1]
    assert model.encoder[2].convs[0].conv.weight.shape == (8, 6, 3, 3, 5)
    assert model.decoder[0].up.weight.shape == (8, 6, 2, 2, 4)


def test_deep_supervision_is_finest_first():
    model = UNet(2, 3, channels=(4, 6, 8, 10), deep_supervision=True)
    outs = model(field(16, 24))
    assert [tuple(o.shape) for o in outs] == [(2, 3, 16, 24), (2, 3, 8, 12), (2, 3, 4, 6)]
    plain = UNet(2, 3, channels=(4, 6, 8, 10))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("deep_heads")})
    assert torch.equal(plain(field(16, 24)), outs[0])


@pytest.mark.parametrize("down", ["stride", "max", "avg"])
@pytest.mark.parametrize("up", ["transpose", "linear", "nearest"])
@pytest.mark.parametrize("grid", [(9, 8), (10, 11), (13, 7), (5, 9)])
def test_any_grid_when_fitting(down: str, up: str, grid: tuple[int, int]):
    assert UNet(**TINY, down=down, up=up, odd_sizes="fit")(field(*grid)).shape == (2, 3, *grid)


def test_fitting_changes_nothing_on_grids_that_divide():
    torch.manual_seed(0)
    strict = UNet(**TINY)
    fitting = UNet(**TINY, odd_sizes="fit")
    fitting.load_state_dict(strict.state_dict())
    assert torch.equal(strict(field(8, 12)), fitting(field(8, 12)))


def test_fit_grid_drops_and_repeats_at_the_end():
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    assert fit_grid(x, (3, 4)) is x
    assert torch.equal(fit_grid(x, (2, 4)), x[:, :, :2])
    wide = fit_grid(x, (4, 3))
    assert torch.equal(wide[:, :, :3], x[..., :3])
    assert torch.equal(wide[:, :, 3], x[:, :, 2, :3])


@pytest.mark.parametrize(
    ("arguments", "grid", "message"),
    [
        ({}, (9, 8), r"grid of \(9, 8\) is not a multiple of \(4, 4\).*pad it to \(12, 8\)"),
        ({"down": "max", "odd_sizes": "fit"}, (3, 8), r"grid of \(3, 8\) is pooled away; .* \(4, 4\)"),
        ({"ndim": 3}, (8, 8), r"takes \(B, 2, D, H, W\), got an input of shape \(2, 2, 8, 8\)"),
        ({"in_chans": 5}, (8, 8), r"takes \(B, 5, H, W\)"),
    ],
)
def test_grids_that_do_not_fit(arguments: dict[str, Any], grid: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        UNet(**{**TINY, **arguments})(field(*grid))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"down": "pool"}, "down must be one of"),
        ({"up": "bicubic"}, "up must be one of"),
        ({"odd_sizes": "crop"}, "odd_sizes must be one of"),
        ({"norm": "layer"}, "norm must be one of"),
        ({"act": "tanh"}, "act must be one of"),
        ({"channels": (8,)}, "two or more stages"),
        ({"ndim": 4}, "ndim=4"),
        ({"strides": (2, 2, 2)}, "strides must be one int or 2 entries"),
        ({"strides": ((2, 2, 2), 2)}, "a stride must be one positive int, or 2"),
        ({"strides": (2, 0)}, "a stride must be"),
        ({"kernel_sizes": 4}, "kernel sizes must be odd"),
        ({"decoder_convs": (1,)}, "decoder_convs must be one int or 2"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        UNet(**{**TINY, **arguments})


def test_keys_are_stable():
    unit = ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]
    encoder = [f"encoder.{s}.convs.{c}.{k}" for s in range(3) for c in range(2) for k in unit]
    decoder = []
    for s in range(2):
        decoder += [f"decoder.{s}.up.weight", f"decoder.{s}.up.bias"]
        decoder += [f"decoder.{s}.convs.{c}.{k}" for c in range(2) for k in unit]
    heads = ["deep_heads.0.weight", "deep_heads.0.bias", "head.weight", "head.bias"]
    assert list(UNet(**TINY, deep_supervision=True).state_dict()) == encoder + decoder + heads
    assert list(UNet(**TINY).state_dict()) == encoder + decoder + heads[2:]


def test_residual_keys_are_stable():
    def unit(prefix: str) -> list[str]:
        return [f"{prefix}.conv.weight", f"{prefix}.conv.bias", f"{prefix}.act.weight"]

    keys = list(ResidualUNet(1, 2, channels=(4, 8)).state_dict())
    expected = []
    for s in range(2):
        expected += unit(f"encoder.{s}.convs.0") + unit(f"encoder.{s}.convs.1")
        expected += [f"encoder.{s}.residual.weight", f"encoder.{s}.residual.bias"]
    expected += unit("decoder.0.up") + [f"decoder.0.residual_unit.convs.0.conv.{k}" for k in ("weight", "bias")]
    assert keys == expected


@pytest.mark.parametrize("skip_first", [False, True])
def test_equals_the_net_written_out(skip_first: bool):
    torch.manual_seed(0)
    model = UNet(**TINY, skip_first=skip_first)
    liven(model, 0.3)
    w = model.state_dict()

    def unit(x: torch.Tensor, key: str, stride: int = 1) -> torch.Tensor:
        x = F.conv2d(x, w[f"{key}.conv.weight"], w[f"{key}.conv.bias"], stride, padding=1)
        mean, var = x.mean((2, 3), keepdim=True), x.var((2, 3), correction=0, keepdim=True)
        scale, shift = w[f"{key}.norm.weight"][:, None, None], w[f"{key}.norm.bias"][:, None, None]
        x = (x - mean) / (var + 1e-5).sqrt() * scale + shift
        return torch.where(x > 0, x, 0.01 * x)

    x = field(8, 12)
    a = unit(unit(x, "encoder.0.convs.0"), "encoder.0.convs.1")
    b = unit(unit(a, "encoder.1.convs.0", 2), "encoder.1.convs.1")
    y = unit(unit(b, "encoder.2.convs.0", 2), "encoder.2.convs.1")
    for i, skip in enumerate((b, a)):
        up = F.conv_transpose2d(y, w[f"decoder.{i}.up.weight"], w[f"decoder.{i}.up.bias"], stride=2)
        y = torch.cat([skip, up] if skip_first else [up, skip], 1)
        y = unit(unit(y, f"decoder.{i}.convs.0"), f"decoder.{i}.convs.1")
    expected = torch.einsum("bchw,oc->bohw", y, w["head.weight"][:, :, 0, 0]) + w["head.bias"][:, None, None]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("res_units", [0, 1, 2])
@pytest.mark.parametrize("ndim", [2, 3])
def test_residual_shapes_and_error(res_units: int, ndim: int):
    model = ResidualUNet(2, 3, ndim=ndim, channels=(4, 6, 8), res_units=res_units)
    grid = (8, 12, 4)[:ndim]
    assert model(field(*grid)).shape == (2, 3, *grid)
    with pytest.raises(ValueError, match=r"\(6, 8.*is not a multiple of \(4, 4"):
        model(field(*(6, 8, 8)[:ndim]))


def test_residual_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="one stride fewer"):
        ResidualUNet(1, 2, channels=(4, 8, 16), strides=(2, 2, 2))


def test_named_sizes():
    """Parameter counts of the originals at these widths: counted on nnU-Net's and MONAI's own nets."""
    counts = {"unet_monai_basic": 1_978_466, "unet_monai_basic_3d": 5_749_410, "unet_monai_residual": 1_625_161}
    for name, count in counts.items():
        with torch.device("meta"):
            assert sum(p.numel() for p in create_model(name).parameters()) == count, name
    assert {"unet_nano", "unet_nano_3d", "unet_small", "unet_base", "unet_nnunet_3d"} <= set(list_models("unet_*"))
