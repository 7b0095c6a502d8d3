"""The diffusion U-Net on one device, and its layers against plain formulations."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpzoo.models import DiffusionUNet, create_model
from dpzoo.models.layers.grid_attention import GridAttention
from dpzoo.models.layers.resample import ResampleConv, filter_field, outer_filter
from dpzoo.models.layers.time_embedding import FourierTime, PositionalTime
from tests.models.lively import liven

TINY: dict[str, Any] = {"in_chans": 2, "out_chans": 3, "model_channels": 8, "num_blocks": 1, "dropout": 0.0}
NCSNPP: dict[str, Any] = {
    "embedding": "fourier",
    "encoder": "residual",
    "resample_filter": (1, 3, 3, 1),
    "channel_mult_noise": 2,
}


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """No weight so near zero that a wrong term hides."""
    torch.manual_seed(0)
    return liven(model)


def inputs(*grid: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2, *grid, generator=generator), torch.randn(2, generator=generator)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("style", [{}, NCSNPP], ids=["DDPM++", "NCSN++"])
def test_shapes_and_gradients(ndim: int, style: dict[str, Any]):
    model = shaken(DiffusionUNet(**TINY, **style, ndim=ndim, channel_mult=(1, 2, 3), attn_levels=(1,)))
    x, noise = inputs(*(8, 12, 4)[:ndim])
    out = model(x.requires_grad_(), noise.requires_grad_())
    assert out.shape == (2, 3, *x.shape[2:])
    out.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert x.grad.abs().sum() > 0
    assert noise.grad.abs().sum() > 0


def test_labels_and_noise_matter():
    model = shaken(DiffusionUNet(**TINY, channel_mult=(1, 2), label_dim=4))
    x, noise = inputs(8, 8)
    labels = torch.eye(4)[:2]
    out = model(x, noise, labels)
    assert not torch.allclose(out, model(x, noise, labels.flip(0)))
    assert not torch.allclose(out, model(x, noise + 1, labels))
    with pytest.raises(ValueError, match="label_dim=4 and needs class_labels"):
        model(x, noise)


def test_dropout_only_in_training():
    model = shaken(DiffusionUNet(**{**TINY, "dropout": 0.5}, channel_mult=(1, 2)))
    given = inputs(8, 8)
    assert not torch.equal(model(*given), model(*given))
    model.eval()
    assert torch.equal(model(*given), model(*given))


@pytest.mark.parametrize(
    ("arguments", "grid", "message"),
    [
        ({"channel_mult": (1, 1, 1)}, (8, 6), r"grid of \(8, 6\) cannot be halved 2 times; pad it to \(8, 8\)"),
        ({"ndim": 3}, (8, 8), r"takes \(B, 2, D, H, W\)"),
        ({"in_chans": 1}, (8, 8), r"takes \(B, 1, H, W\), got an input of shape \(2, 2, 8, 8\)"),
        ({"attn_levels": (3,)}, (8, 8), r"attn_levels \[3\] do not exist"),
        ({"embedding": "rope"}, (8, 8), "embedding must be one of"),
        ({"encoder": "skip"}, (8, 8), "encoder must be one of"),
        ({"ndim": 4}, (8, 8), "ndim=4"),
    ],
)
def test_errors(arguments: dict[str, Any], grid: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        DiffusionUNet(**{**TINY, "channel_mult": (1, 2), "attn_levels": (), **arguments})(*inputs(*grid))


def test_keys_are_stable():
    def block(at: str, *more: str) -> list[str]:
        parts = ["norm0", "conv0", "affine", "norm1", "conv1", *more]
        return [f"{at}.{part}.{kind}" for part in parts for kind in ("weight", "bias")]

    attention = ("attn.norm", "attn.qkv", "attn.proj")
    expected = [f"map_layer{i}.{kind}" for i in range(2) for kind in ("weight", "bias")]
    expected += ["encoder.0.conv.weight", "encoder.0.conv.bias", *block("encoder.0.blocks.0")]
    expected += block("encoder.1.down", "skip") + block("encoder.1.blocks.0", "skip", *attention)
    expected += block("middle.0", *attention) + block("middle.1")
    expected += (
        block("decoder.0.up", "skip") + block("decoder.0.blocks.0", "skip") + block("decoder.0.blocks.1", "skip")
    )
    expected += block("decoder.1.blocks.0", "skip") + block("decoder.1.blocks.1", "skip", *attention)
    expected += [f"out_{part}.{kind}" for part in ("norm", "conv") for kind in ("weight", "bias")]
    state = create_model("diffusion_unet_nano").state_dict()
    assert [k for k in state if not k.endswith("resample_filter")] == expected
    filters = {k for k in state if k.endswith("resample_filter")}
    assert filters == {
        f"{at}.{c}.resample_filter" for at in ("encoder.1.down", "decoder.0.up") for c in ("conv0", "skip")
    }


def test_equals_the_net_written_out():
    """Two levels, NCSN++ style, attention on the coarse one: every sum from the state dict."""
    model = shaken(DiffusionUNet(**TINY, **NCSNPP, channel_mult=(1, 2), attn_levels=(1,))).double()
    w = model.state_dict()
    x, noise = (t.double() for t in inputs(8, 12))

    def norm(h: torch.Tensor, key: str) -> torch.Tensor:
        return F.group_norm(h, max(1, h.shape[1] // 4), w[f"{key}.weight"], w[f"{key}.bias"], 1e-6)

    def conv(h: torch.Tensor, key: str, padding: int = 1) -> torch.Tensor:
        return F.conv2d(h, w[f"{key}.weight"], w[f"{key}.bias"], padding=padding)

    def smooth(h: torch.Tensor) -> torch.Tensor:
        """The binomial filter between the points: n + 1 rows of n."""
        for dim in (2, 3):
            h = F.pad(h, (0, 0, 2, 2) if dim == 2 else (2, 2))
            n = h.shape[dim] - 3
            taps = zip((1, 3, 3, 1), range(4), strict=True)
            h = sum(c / 8 * h.narrow(dim, shift, n) for c, shift in taps)
        return h

    def resampled(h: torch.Tensor, how: str) -> torch.Tensor:
        if how == "down":
            return smooth(h)[:, :, 1:-1:2, 1:-1:2]
        if how == "up":
            wide = h.new_zeros(*h.shape[:2], 2 * h.shape[2], 2 * h.shape[3])
            wide[:, :, ::2, ::2] = 4 * h
            return smooth(wide)[:, :, :-1, :-1]
        return h

    def block(h: torch.Tensor, key: str, how: str = "") -> torch.Tensor:
        y = conv(resampled(F.silu(norm(h, f"{key}.norm0")), how), f"{key}.conv0")
        y = y + (emb @ w[f"{key}.affine.weight"].T + w[f"{key}.affine.bias"])[:, :, None, None]
        y = conv(F.silu(norm(y, f"{key}.norm1")), f"{key}.conv1")
        if f"{key}.skip.weight" in w:
            h = conv(resampled(h, how), f"{key}.skip", 0)
        y = (y + h) / math.sqrt(2)
        return attention(y, f"{key}.attn") if f"{key}.attn.norm.weight" in w else y

    def attention(h: torch.Tensor, key: str) -> torch.Tensor:
        q, k, v = conv(norm(h, f"{key}.norm"), f"{key}.qkv", 0).flatten(2).unflatten(1, (-1, 3)).unbind(2)
        weights = torch.einsum("bcq,bck->bqk", q, k / math.sqrt(q.shape[1])).softmax(2)
        out = torch.einsum("bqk,bck->bcq", weights, v).reshape(h.shape)
        return (conv(out, f"{key}.proj", 0) + h) / math.sqrt(2)

    angles = 2 * math.pi * noise[:, None] * w["map_noise.freqs"]
    emb = torch.cat([angles.sin(), angles.cos()], 1)
    for i in range(2):
        emb = F.silu(emb @ w[f"map_layer{i}.weight"].T + w[f"map_layer{i}.bias"])
    a = conv(x, "encoder.0.conv")
    b = block(a, "encoder.0.blocks.0")
    side = F.conv2d(smooth(x), w["encoder.1.residual.weight"], w["encoder.1.residual.bias"], stride=2)
    c = (block(b, "encoder.1.down", "down") + side) / math.sqrt(2)
    d = block(c, "encoder.1.blocks.0")
    y = block(block(d, "middle.0"), "middle.1")
    y = block(torch.cat([y, d], 1), "decoder.1.blocks.0")
    y = block(torch.cat([y, c], 1), "decoder.1.blocks.1")
    y = block(y, "decoder.0.up", "up")
    y = block(torch.cat([y, b], 1), "decoder.0.blocks.0")
    y = block(torch.cat([y, a], 1), "decoder.0.blocks.1")
    torch.testing.assert_close(model(x, noise), conv(F.silu(norm(y, "out_norm")), "out_conv"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_box_filter_is_pooling_and_repeating(ndim: int):
    x = torch.randn(2, 3, *(8, 6, 4)[:ndim])
    box = outer_filter((1, 1), ndim)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
    torch.testing.assert_close(filter_field(x, box, "down"), pool(x, 2))
    torch.testing.assert_close(filter_field(x, box, "up"), F.interpolate(x, scale_factor=2))


@pytest.mark.parametrize("taps", [(1, 1), (1, 3, 3, 1), (1, 2, 5, 5, 2, 1)])
@pytest.mark.parametrize("resample", ["down", "up"])
def test_filters_keep_a_constant_inside(taps: tuple[int, ...], resample: str):
    out = filter_field(torch.ones(1, 2, 16, 16), outer_filter(taps, 2), resample)
    assert out.shape[2:] == ((8, 8) if resample == "down" else (32, 32))
    torch.testing.assert_close(out[:, :, 2:-2, 2:-2], torch.ones_like(out[:, :, 2:-2, 2:-2]))


def test_stride_conv_is_a_filter_and_a_strided_convolution():
    conv = ResampleConv(2, 4, 3, resample="down", taps=(1, 1), stride_conv=True)
    x = torch.randn(1, 2, 8, 12)
    padded = F.pad(x, (1, 1, 1, 1))
    smooth = F.avg_pool2d(padded, 2, stride=1)
    torch.testing.assert_close(conv(x), F.conv2d(smooth, conv.weight, conv.bias, stride=2))
    assert conv(x).shape == (1, 4, 4, 6)


def test_resampling_arguments():
    with pytest.raises(ValueError, match="even number of taps"):
        ResampleConv(2, 2, 3, resample="down", taps=(1, 2, 1))
    with pytest.raises(ValueError, match="resample must be one of"):
        ResampleConv(2, 2, 3, resample="half")
    with pytest.raises(ValueError, match="stride_conv=True"):
        ResampleConv(2, 2, 3, resample="up", stride_conv=True)


def test_attention_with_heads():
    layer = shaken(GridAttention(8, num_heads=2)).double()
    x = torch.randn(2, 8, 3, 5, dtype=torch.float64)
    q, k, v = layer.qkv(layer.norm(x)).reshape(2, 2, 4, 3, 15).unbind(3)
    weights = (torch.einsum("bhcq,bhck->bhqk", q, k) / 2).softmax(-1)
    out = torch.einsum("bhqk,bhck->bhcq", weights, v).reshape(2, 8, 3, 5)
    torch.testing.assert_close(layer(x), layer.proj(out))
    with pytest.raises(ValueError, match="multiple of num_heads"):
        GridAttention(8, num_heads=3)


def test_time_embeddings():
    t = torch.tensor([0.0, 0.5, 7.0])
    out = PositionalTime(6, max_period=100.0)(t)
    freqs = torch.tensor([1.0, 0.1, 0.01])
    torch.testing.assert_close(out, torch.cat([(t[:, None] * freqs).sin(), (t[:, None] * freqs).cos()], 1))
    fourier = FourierTime(8, scale=2.0)
    assert list(fourier.state_dict()) == ["freqs"]
    angles = 2 * math.pi * t[:, None] * fourier.freqs
    torch.testing.assert_close(fourier(t), torch.cat([angles.sin(), angles.cos()], 1))
    with pytest.raises(ValueError, match="even number of channels"):
        PositionalTime(5)
