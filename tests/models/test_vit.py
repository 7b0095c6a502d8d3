"""ViT against timm's own VisionTransformer: the same keys, shapes and key order, and the same outputs."""

import itertools
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from dpzoo.models import ViT, create_model, list_models
from dpzoo.models.layers import Attention, DenseHead, DropPath, patchify, unpatchify

SMALL: dict[str, Any] = {"embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}

# One row for each option, alone and in the combinations that meet in published weights.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "average pool": {"global_pool": "avg"},
    "average pool, norm before": {"global_pool": "avg", "fc_norm": False},
    "token pool, norm after": {"global_pool": "token", "fc_norm": True},
    "no pool": {"global_pool": ""},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 4},
    "registers, average pool": {"reg_tokens": 2, "global_pool": "avg"},
    "registers without class token": {"reg_tokens": 3, "class_token": False, "global_pool": "avg"},
    "prefix without positions": {"reg_tokens": 4, "no_embed_class": True},
    "layer-scale": {"init_values": 0.3},
    "layer-scale 0 is none": {"init_values": 0.0},
    "qk-norm": {"qk_norm": True},
    "no qkv bias": {"qkv_bias": False},
    "mlp ratio": {"mlp_ratio": 2.5},
    "features": {"num_classes": 0},
    "all at once": {"reg_tokens": 4, "init_values": 0.1, "qk_norm": True, "qkv_bias": False, "global_pool": "avg"},
}
GRIDS: dict[str, dict[str, Any]] = {
    "square": {"img_size": 24, "patch_size": 8},
    "wide": {"img_size": (16, 40), "patch_size": 8},
    "tall, one patch across": {"img_size": (40, 8), "patch_size": 8},
    "rectangular patches": {"img_size": (20, 24), "patch_size": (5, 3)},
    "two channels": {"img_size": (12, 8), "patch_size": 4, "in_chans": 2},
}


def fill(model: nn.Module) -> nn.Module:
    """Give every weight a value of order 0.1 to 1: with zeros and ones of an initialisation a swapped term can hide."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2 + 0.05)
    return model


def spec(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(key, tuple(value.shape)) for key, value in model.state_dict().items()]


def twins(dtype: torch.dtype = torch.float64, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
    """timm's model and ours, built with the same arguments and holding the same weights."""
    theirs = fill(VisionTransformer(**kwargs)).to(dtype).eval()
    ours = ViT(**kwargs).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert spec(ours) == spec(theirs)
    return theirs, ours


def picture(model: nn.Module, batch: int = 2) -> torch.Tensor:
    torch.manual_seed(1)
    return model.example_inputs(batch)[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_equal_timm(options: dict[str, Any]):
    theirs, ours = twins(img_size=(16, 24), patch_size=8, **{**SMALL, **options})
    x = picture(ours)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
def test_grids_equal_timm(grid: dict[str, Any]):
    theirs, ours = twins(**SMALL, **grid)
    x = picture(ours)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.forward_features(x), theirs.forward_features(x), rtol=1e-12, atol=1e-12)


def test_gradients_equal_timm():
    theirs, ours = twins(img_size=(16, 24), patch_size=8, **SMALL, reg_tokens=2, init_values=0.3, qk_norm=True)
    x, y = (picture(ours).requires_grad_() for _ in range(2))
    theirs(x).square().sum().backward()
    ours(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-11, atol=1e-11)
    for (key, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(
    "rates", [{"drop_path_rate": 0.4}, {"drop_rate": 0.3, "pos_drop_rate": 0.2}, {"proj_drop_rate": 0.3}]
)
def test_training_with_dropout_equals_timm_under_one_seed(rates: dict[str, float]):
    theirs, ours = twins(img_size=16, patch_size=8, **SMALL, **rates)
    x = picture(ours, batch=8)
    results = []
    for model in (theirs.train(), ours.train()):
        torch.manual_seed(5)
        results.append(model(x))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(results[1], ours.eval()(x))


def test_attention_dropout_acts_in_training_only():
    torch.manual_seed(0)
    layer, x = Attention(16, 2, attn_drop=0.5), torch.randn(2, 5, 16)
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    reference = Attention(16, 2).eval()
    reference.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), reference(x))


# --- the named variants -----------------------------------------------------------------------------------------------


def timm_names() -> list[tuple[str, str]]:
    """Pairs (our name, timm's name) of all variants that both have."""
    pairs = []
    for name, suffix in itertools.product(list_models("vit_"), ("", "_224")):
        if timm.is_model(f"{name}{suffix}"):
            pairs.append((name, f"{name}{suffix}"))
    return pairs


def test_most_variants_have_a_twin_in_timm():
    ours = {name for name in list_models("vit_") if "nano" not in name}
    without = {"tiny_patch8", "tiny_patch14", "tiny_patch32", "small_patch14", "base_patch14", "large_patch8"}
    assert ours - {name for name, _ in timm_names()} == {f"vit_{variant}" for variant in without}


@pytest.mark.parametrize(("name", "timm_name"), timm_names())
def test_variant_has_timms_keys_at_full_size(name: str, timm_name: str):
    with torch.device("meta"):  # timm sets num_classes by the weights it offers, so it is given here
        assert spec(create_model(name, num_classes=11)) == spec(timm.create_model(timm_name, num_classes=11))
        assert create_model(name).patch_embed.img_size == timm.create_model(timm_name).patch_embed.img_size


@pytest.mark.parametrize(("name", "timm_name"), [pair for pair in timm_names() if "large" not in pair[0]])
def test_variant_equals_timm_in_float32(name: str, timm_name: str):
    torch.manual_seed(0)
    sizes = {"depth": 2, "num_classes": 5, "img_size": 96 if "patch32" in name else 112}
    theirs = timm.create_model(timm_name, **sizes).eval()
    ours = create_model(name, **sizes).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = picture(ours, batch=1)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-6)


# --- three spatial dims -----------------------------------------------------------------------------------------------


class VolumeEmbed(nn.Module):
    """A 3-D patch embedding for timm's model, written as a sum over the voxels of each patch."""

    def __init__(self, img_size, patch_size, in_chans: int, embed_dim: int, bias: bool, **_: Any) -> None:
        super().__init__()
        self.grid_size = tuple(s // p for s, p in zip(img_size, patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1] * self.grid_size[2]
        self.patch_size = patch_size
        self.proj = nn.Conv3d(in_chans, embed_dim, patch_size, patch_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gd, gh, gw), (pd, ph, pw) = self.grid_size, self.patch_size
        tokens = [
            torch.einsum(
                "bcdhw,ncdhw->bn",
                x[:, :, d * pd : (d + 1) * pd, h * ph : (h + 1) * ph, w * pw : (w + 1) * pw],
                self.proj.weight,
            )
            for d, h, w in itertools.product(range(gd), range(gh), range(gw))
        ]
        return torch.stack(tokens, dim=1) + self.proj.bias


@pytest.mark.parametrize(
    "options", [{}, {"global_pool": "avg", "class_token": False}, {"reg_tokens": 2, "qk_norm": True}]
)
def test_volume_equals_timm_with_a_volume_embedding(options: dict[str, Any]):
    sizes = {"img_size": (4, 6, 10), "patch_size": (2, 3, 5), "in_chans": 2}
    theirs = fill(VisionTransformer(embed_layer=VolumeEmbed, **sizes, **{**SMALL, **options})).double().eval()
    ours = ViT(**sizes, **{**SMALL, **options}).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = picture(ours)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_one_spatial_dim():
    model = ViT(img_size=(12,), patch_size=3, **SMALL)
    assert model.patch_embed.grid_size == (4,)
    assert model(*model.example_inputs(2)).shape == (2, 7)


# --- the dense head ---------------------------------------------------------------------------------------------------

FIELDS = [((8,), (2,)), ((6, 10), (3, 2)), ((6, 10), (1, 10)), ((4, 6, 10), (2, 3, 5))]


@pytest.mark.parametrize(("size", "patch"), FIELDS)
def test_unpatchify_inverts_patchify_exactly(size: tuple[int, ...], patch: tuple[int, ...]):
    x = torch.randn(2, 3, *size)
    grid = [s // p for s, p in zip(size, patch, strict=True)]
    tokens = patchify(x, patch)
    assert tokens.shape == (2, torch.Size(grid).numel(), torch.Size(patch).numel() * 3)
    assert torch.equal(unpatchify(tokens, grid, patch), x)
    assert torch.equal(patchify(unpatchify(tokens, grid, patch), patch), tokens)


def test_patchify_order_is_row_major_grid_and_pixel_then_channel():
    x = torch.arange(2 * 4 * 6).reshape(1, 2, 4, 6)
    tokens = patchify(x, (2, 3))
    for row, column in itertools.product(range(2), range(2)):
        block = x[0, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        assert torch.equal(tokens[0, 2 * row + column], block.permute(1, 2, 0).flatten())


@pytest.mark.parametrize(("size", "patch"), FIELDS)
@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 2}], ids=["patches only", "with prefix"])
def test_dense_head_gives_a_field(size: tuple[int, ...], patch: tuple[int, ...], prefix: dict[str, Any]):
    model = ViT(size, patch, in_chans=2, head="dense", out_chans=5, embed_dim=48, depth=1, num_heads=3, **prefix)
    out = fill(model)(*model.example_inputs(2))
    assert out.shape == (2, 5, *size)


def test_dense_head_equals_timm_features_unpatchified_by_hand():
    kwargs = {"img_size": (6, 8), "patch_size": (3, 2), "in_chans": 2, "embed_dim": 48, "depth": 2, "num_heads": 3}
    theirs = fill(VisionTransformer(**kwargs, reg_tokens=1, num_classes=0)).double().eval()
    ours = fill(ViT(**kwargs, reg_tokens=1, class_token=True, head="dense", out_chans=5)).double().eval()
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert (missing, unexpected) == (["head.proj.weight", "head.proj.bias"], [])
    x = picture(ours)
    tokens = nn.functional.linear(theirs.forward_features(x)[:, 2:], ours.head.proj.weight, ours.head.proj.bias)
    expected = torch.empty(2, 5, 6, 8, dtype=torch.float64)
    for row, column in itertools.product(range(2), range(4)):
        block = tokens[:, 4 * row + column].reshape(2, 3, 2, 5).permute(0, 3, 1, 2)
        expected[:, :, 3 * row : 3 * row + 3, 2 * column : 2 * column + 2] = block
    torch.testing.assert_close(ours(x), expected, rtol=1e-12, atol=1e-12)


def test_dense_head_can_learn_the_identity():
    """Embedding, positions and head face the same way: what patchify cuts out, the head puts back in its place."""
    size, patch = (6, 10), (3, 2)
    model = ViT(size, patch, in_chans=2, head="dense", embed_dim=12, depth=0, num_heads=1)
    model.norm = nn.Identity()
    eye = torch.eye(12).reshape(12, 3, 2, 2)  # token channel = (patch row, patch column, channel)
    with torch.no_grad():
        model.patch_embed.proj.weight.copy_(eye.permute(0, 3, 1, 2))
        model.head.proj.weight.copy_(torch.eye(12))
        for p in (model.patch_embed.proj.bias, model.head.proj.bias, model.pos_embed):
            p.zero_()
    x = torch.randn(2, 2, *size)
    torch.testing.assert_close(model(x), x, rtol=0, atol=1e-6)


def test_dense_head_defaults():
    model = ViT((8, 8), 4, in_chans=3, head="dense", embed_dim=48, depth=1, num_heads=3)
    assert isinstance(model.head, DenseHead)
    assert model.cls_token is None
    assert model.num_classes == 0
    assert model(*model.example_inputs()).shape == (1, 3, 8, 8)


# --- stochastic depth -------------------------------------------------------------------------------------------------


def test_drop_path_rates_grow_linearly():
    model = ViT(16, 8, embed_dim=48, depth=5, num_heads=3, drop_path_rate=0.2)
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert rates == [getattr(block.drop_path2, "drop_prob", 0.0) for block in model.blocks]


def test_drop_path_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    out = DropPath(0.25).train()(torch.ones(4000, 3, 2))
    values = out.flatten(1)
    assert torch.equal(values.amin(1), values.amax(1))
    assert set(values[:, 0].tolist()) == {0.0, torch.tensor(1.0).div(0.75).item()}
    assert out.mean().item() == pytest.approx(1.0, abs=0.04)
    with pytest.raises(ValueError, match=r"\[0, 1\), got 1.0"):
        DropPath(1.0)


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"img_size": (61, 120), "patch_size": 4}, r"\(61, 120\).*\(4, 4\).*dim 0: 61 = 15 \* 4 \+ 1.* 60 or 64"),
    ({"img_size": (64, 30), "patch_size": (4, 8)}, r"dim 1: 30 = 3 \* 8 \+ 6.* 24 or 32"),
    ({"img_size": 10, "patch_size": 16}, r"dim 0: 10 = 0 \* 16 \+ 10.* to 16$"),
    ({"img_size": (8, 8), "patch_size": (2, 2, 2)}, r"patch_size=\(2, 2, 2\) has 3 sizes.* 2 spatial dims"),
    ({"img_size": (1, 2, 3, 4)}, r"1, 2 or 3 spatial dims, got 4"),
    ({"img_size": 0}, r"img_size=0 must be positive"),
    ({"embed_dim": 50, "num_heads": 3}, r"embed_dim=50, num_heads=3"),
    ({"head": "segment"}, r"\('classification', 'dense'\), got 'segment'"),
    ({"global_pool": "max"}, r"\('token', 'avg', ''\), got 'max'"),
    ({"global_pool": "token", "class_token": False}, r"needs class_token=True; use global_pool='avg'"),
    ({"out_chans": 3}, r"out_chans=3 belongs to head='dense'"),
    ({"head": "dense", "global_pool": "avg"}, r"does not pool.*global_pool='avg'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[str(a) for a, _ in BAD_ARGUMENTS])
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        ViT(**{"depth": 1, **arguments})


@pytest.mark.parametrize("shape", [(1, 3, 32, 28), (1, 4, 32, 32), (1, 3, 32), (3, 32, 32), (1, 3, 32, 32, 1)])
def test_input_of_another_shape_is_refused(shape: tuple[int, ...]):
    model = create_model("vit_nano_patch4", depth=1)
    with pytest.raises(ValueError, match=rf"\(batch, 3, 32, 32\), got \({', '.join(map(str, shape))}\)"):
        model(torch.zeros(shape))
