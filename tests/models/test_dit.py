"""DiT on one device: the release's keys and sizes, the paper's formulas, conditions, masked regions, positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dpzoo.models import DiT, create_model
from dpzoo.models.dit_block import DiTBlock, GridAttention
from dpzoo.models.layers.condition import ClassEmbedder, NumberEmbedder, sinusoids
from dpzoo.models.layers.pos_embed import sincos_positions
from dpzoo.models.layers.rotary import RotaryEmbedding, rotary_angles, rotate
from tests.models.lively import liven

SMALL: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 3, "in_chans": 3, "patch_size": 2}
KEYS = {
    "pos_embed": (1, 256, 384),
    "x_embedder.proj.weight": (384, 4, 2, 2),
    "x_embedder.proj.bias": (384,),
    "t_embedder.mlp.0.weight": (384, 256),
    "t_embedder.mlp.0.bias": (384,),
    "t_embedder.mlp.2.weight": (384, 384),
    "t_embedder.mlp.2.bias": (384,),
    "y_embedder.embedding_table.weight": (1001, 384),
    "blocks.0.attn.qkv.weight": (1152, 384),
    "blocks.0.attn.qkv.bias": (1152,),
    "blocks.0.attn.proj.weight": (384, 384),
    "blocks.0.attn.proj.bias": (384,),
    "blocks.0.mlp.fc1.weight": (1536, 384),
    "blocks.0.mlp.fc1.bias": (1536,),
    "blocks.0.mlp.fc2.weight": (384, 1536),
    "blocks.0.mlp.fc2.bias": (384,),
    "blocks.0.adaLN_modulation.1.weight": (2304, 384),
    "blocks.0.adaLN_modulation.1.bias": (2304,),
    "final_layer.linear.weight": (32, 384),
    "final_layer.linear.bias": (32,),
    "final_layer.adaLN_modulation.1.weight": (768, 384),
    "final_layer.adaLN_modulation.1.bias": (768,),
}


def lively(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    liven(model, 0.2)
    return model.double().eval()


def test_keys_and_shapes_are_the_releases():
    with torch.device("meta"):
        model = create_model("dit_small_patch2", depth=1)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == KEYS


@pytest.mark.parametrize(("name", "millions"), [("small", 33), ("base", 130), ("large", 458), ("xlarge", 675)])
def test_sizes_are_the_papers(name: str, millions: int):
    """Table 4 of the paper."""
    with torch.device("meta"):
        model = create_model(f"dit_{name}_patch2")
    count = sum(p.numel() for p in model.parameters()) + model.pos_embed.numel()
    assert count / 1e6 == pytest.approx(millions, abs=0.6)  # the paper rounds, and cuts off


def test_a_stormscope_grid():
    with torch.device("meta"):
        model = create_model("dit_stormscope")
    assert model.x_embedder.grid_size == (256, 448)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == pytest.approx(262.4, abs=1.5)


def test_starts_as_the_identity():
    """adaLN-zero: a new block passes its tokens on, and a new model gives zeros."""
    torch.manual_seed(0)
    model = DiT(8, **SMALL)
    x, t = torch.randn(2, 3, 8, 8), torch.rand(2) * 1000
    assert torch.equal(model.blocks[0](torch.ones(2, 4, 4, 24), torch.randn(2, 24)), torch.ones(2, 4, 4, 24))
    assert not model(x, t).any()


def test_block_is_the_papers_formula():
    torch.manual_seed(0)
    block = lively(DiTBlock(8, 2, grid_size=(3,)))
    x, c = torch.randn(2, 3, 8).double(), torch.randn(2, 8).double()
    linear = block.adaLN_modulation[1]
    six = (nn.functional.silu(c) @ linear.weight.T + linear.bias)[:, None].chunk(6, -1)

    def normed(x, shift, scale):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt() * (1 + scale) + shift

    def attention(x):
        q, k, v = (part.view(2, 3, 2, 4).transpose(1, 2) for part in block.attn.qkv(x).chunk(3, -1))
        y = (q @ k.mT / 2).softmax(-1) @ v
        return block.attn.proj(y.transpose(1, 2).reshape(2, 3, 8))

    def perceptron(x):
        return block.mlp.fc2(nn.functional.gelu(block.mlp.fc1(x), approximate="tanh"))

    y = x + six[2] * attention(normed(x, six[0], six[1]))
    y = y + six[5] * perceptron(normed(y, six[3], six[4]))
    torch.testing.assert_close(block(x, c), y, rtol=1e-10, atol=1e-10)


def test_equals_diffusers_with_the_same_weights():
    """At time 0, where its frequencies, which differ in their end point, do not show."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=3,
        attention_head_dim=8,
        in_channels=3,
        out_channels=6,
        num_layers=2,
        patch_size=2,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    lively(theirs)
    ours = DiT(8, **SMALL, out_chans=6, condition="class", condition_size=10, condition_drop=0.1).double().eval()
    source = theirs.state_dict()
    first = "transformer_blocks.0.norm1.emb."
    state = {
        "pos_embed": theirs.pos_embed.pos_embed,
        "y_embedder.embedding_table.weight": source[first + "class_embedder.embedding_table.weight"],
    }
    pairs = {
        "x_embedder.proj": "pos_embed.proj",
        "t_embedder.mlp.0": first + "timestep_embedder.linear_1",
        "t_embedder.mlp.2": first + "timestep_embedder.linear_2",
        "final_layer.adaLN_modulation.1": "proj_out_1",
        "final_layer.linear": "proj_out_2",
    }
    for i in range(2):
        at = f"transformer_blocks.{i}."
        pairs |= {
            f"blocks.{i}.attn.proj": at + "attn1.to_out.0",
            f"blocks.{i}.mlp.fc1": at + "ff.net.0.proj",
            f"blocks.{i}.mlp.fc2": at + "ff.net.2",
            f"blocks.{i}.adaLN_modulation.1": at + "norm1.linear",
        }
        for end in ("weight", "bias"):
            qkv = [source[f"{at}attn1.to_{part}.{end}"] for part in "qkv"]
            state[f"blocks.{i}.attn.qkv.{end}"] = torch.cat(qkv)
        for emb in ("timestep_embedder", "class_embedder"):  # every block has its own there
            for key in [k for k in source if k.startswith(f"{at}norm1.emb.{emb}")]:
                source[key].copy_(source[first + key.split("norm1.emb.")[1]])
    state |= {f"{a}.{end}": source[f"{b}.{end}"] for a, b in pairs.items() for end in ("weight", "bias")}
    ours.load_state_dict(state)
    x, y = torch.randn(2, 3, 8, 8).double(), torch.tensor([3, 7])
    expected = theirs(x, timestep=torch.zeros(2, dtype=torch.int64), class_labels=y).sample
    torch.testing.assert_close(ours(x, torch.zeros(2), y), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grid", [(8, 8), (4, 12), (12, 4), (4, 4, 8), (16,)])
def test_rectangles_and_volumes(grid: tuple[int, ...]):
    model = lively(DiT(grid, **{**SMALL, "patch_size": (2,) * len(grid)}, out_chans=5))
    out = model(torch.randn(2, 3, *grid).double(), torch.rand(2).double())
    assert out.shape == (2, 5, *grid)


def test_patches_keep_their_places():
    """A change in one patch, without attention, comes out in that patch."""
    model = lively(DiT((4, 6), **SMALL, pos_embed="none"))
    for block in model.blocks:
        nn.init.zeros_(block.attn.proj.weight)
        nn.init.zeros_(block.attn.proj.bias)
    x, t = torch.randn(1, 3, 4, 6).double(), torch.zeros(1)
    changed = x.clone()
    changed[..., 2:4, 4:6] += 1
    differs = (model(x, t) != model(changed, t)).any(1)[0]
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[2:4, 4:6] = True
    assert torch.equal(differs, expected)


# ---------------------------------------------------------------------- positions
def test_sincos_of_a_grid_is_the_formula():
    table = sincos_positions((3, 5), 8).view(3, 5, 8)
    for row in range(3):
        for column in range(5):
            expected = []
            for place in (column, row):  # the last dim has the first channels
                angles = [place, place / 100]
                expected += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
            torch.testing.assert_close(table[row, column], torch.tensor(expected))


def test_sincos_shares_channels_that_do_not_divide():
    table = sincos_positions((2, 3, 4), 20)
    assert table.shape == (24, 20)
    assert len({tuple(row) for row in table.tolist()}) == 24  # every place has its own
    with pytest.raises(ValueError, match=r"3 coordinate.*even number of channels, at least 6; got 4"):
        sincos_positions((2, 2, 2), 4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_is_a_complex_product(interleaved: bool):
    torch.manual_seed(0)
    x, angles = torch.randn(7, 8).double(), torch.randn(7, 4).double()
    pairs = x.view(7, 4, 2) if interleaved else x.view(7, 2, 4).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(7, 4).double(), angles)
    expected = torch.view_as_real(turned)
    expected = (expected if interleaved else expected.mT).reshape(7, 8)
    torch.testing.assert_close(rotate(x, angles.cos(), angles.sin(), interleaved=interleaved), expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("grid", "shift"), [((9,), (3,)), ((4, 5), (1, 2)), ((3, 3, 4), (1, 0, 2))])
def test_rotary_products_depend_on_the_distance(grid: tuple[int, ...], shift: tuple[int, ...], interleaved: bool):
    torch.manual_seed(0)
    rotary = RotaryEmbedding(grid, 16, theta=50.0, interleaved=interleaved).double()
    q, k = (torch.randn(16).double().expand(1, *grid, 1, 16) for _ in range(2))
    q, k = (t[0, ..., 0, :] for t in rotary(q, k, on_grid=True))
    here, there = (0,) * len(grid), tuple(1 if n > s + 1 else 0 for n, s in zip(grid, shift, strict=True))
    moved = [tuple(a + s for a, s in zip(at, shift, strict=True)) for at in (here, there)]
    torch.testing.assert_close(q[here] @ k[moved[0]], q[there] @ k[moved[1]], rtol=1e-6, atol=1e-6)
    assert abs(q[here] @ k[here] - q[here] @ k[moved[0]]) > 1e-3
    flat = rotary(*(torch.randn(2, 3, math.prod(grid), 16).double() for _ in range(2)))
    assert flat[0].shape == (2, 3, math.prod(grid), 16)


def test_rotary_of_a_row_and_of_a_grid_agree():
    """The flat and the grid layout turn alike, and each dim of a grid has its share of the pairs."""
    rotary = RotaryEmbedding((3, 4), 8)
    q = torch.randn(2, 3, 4, 5, 8)
    flat = q.flatten(1, 2).transpose(1, 2)
    on_grid, _ = rotary(q, q, on_grid=True)
    in_row, _ = rotary(flat, flat)
    torch.testing.assert_close(on_grid.flatten(1, 2).transpose(1, 2), in_row)
    angles = rotary_angles((3, 4), 8, theta=100.0)
    torch.testing.assert_close(angles[2, 3], torch.tensor([2.0, 0.2, 3.0, 0.3]))
    assert not list(rotary.state_dict())


# ---------------------------------------------------------------------- conditions
def test_time_is_cosines_then_sines():
    t = torch.tensor([0.0, 3.0])
    torch.testing.assert_close(
        sinusoids(t, 4),
        torch.tensor([[1, 1, 0, 0], [math.cos(3), math.cos(0.03), math.sin(3), math.sin(0.03)]]),
    )
    to_the_end = sinusoids(t, 4, endpoint=True)[1]
    torch.testing.assert_close(to_the_end[1], torch.tensor(math.cos(0.0003)))
    model = DiT(8, 2, 2, embed_dim=8, depth=1, num_heads=1, time_endpoint=True)
    assert model.t_embedder.endpoint
    assert sinusoids(torch.tensor([999]), 4).dtype is torch.float32
    assert sinusoids(t.half(), 4).dtype is torch.float32  # a time of 1000 has no room in half precision


@pytest.mark.parametrize("condition", ["class", "scalar", "vector"])
def test_conditions_matter(condition: str):
    model = lively(DiT(4, **SMALL, condition=condition, condition_size=3))
    x, t, c = model.example_inputs(batch_size=2)
    c = c if condition == "class" else c.double()
    other = (c + 1) % 3 if condition == "class" else c + 1
    first, second = model(x, t, c), model(x, t, torch.cat([c[:1], other[1:]]))
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])
    assert not torch.allclose(model(x, t + 1, c), first)


def test_field_of_conditions_matters():
    model = lively(DiT((4, 6), **SMALL, field_chans=2))
    x, t, _, field = model.example_inputs()
    assert model.x_embedder.proj.weight.shape[1] == 5
    assert not torch.allclose(model(x, t, None, field), model(x, t, None, field + 1))


def test_classes_are_dropped_in_training_only():
    torch.manual_seed(0)
    embedder = ClassEmbedder(5, 4, drop_prob=0.5)
    y, like = torch.arange(5).repeat(40), torch.zeros(1)
    out = embedder(y, like)
    dropped = (out == embedder.no_class(200)).all(1)
    assert 60 < dropped.sum() < 140
    assert torch.equal(out[~dropped], embedder.embedding_table(y)[~dropped])
    assert torch.equal(embedder.eval()(y, like), embedder.embedding_table(y))


def test_without_a_class():
    model = lively(DiT(4, **SMALL, condition="class", condition_size=3, condition_drop=0.1))
    x, t, _ = model.example_inputs()
    torch.testing.assert_close(model(x, t), model(x, t, torch.tensor([3])))
    model = DiT(4, **SMALL, condition="class", condition_size=3)
    with pytest.raises(ValueError, match="without a vector for 'no class'"):
        model(x.float(), t.float())


def test_without_time():
    model = lively(DiT(4, **SMALL, time=False))
    (x,) = model.example_inputs()
    assert model(x).shape == x.shape


# ---------------------------------------------------------------------- regions without data
@pytest.mark.parametrize("kernel_size", [None, 3])
def test_invalid_points_have_no_influence(kernel_size: int | None):
    model = lively(DiT((8, 6), **SMALL, field_chans=1, mask_token=True, kernel_size=kernel_size))
    x, t, _, field, _ = model.example_inputs()
    invalid = torch.zeros(1, 1, 8, 6, dtype=torch.bool)
    invalid[..., 3:5, 1:3] = True
    x.masked_fill_(invalid, float("nan"))
    x.requires_grad_()
    out = model(x, t, None, field, invalid)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[invalid.expand_as(x)].any()
    assert torch.equal(out, model(x.detach().nan_to_num(7.0), t, None, field.masked_fill(invalid, 5.0), invalid))
    for block in model.blocks:
        assert block.attn.mask_token.grad.any()


def test_a_patch_with_one_invalid_point_is_masked():
    model = DiT((4, 6), **SMALL, mask_token=True)
    invalid = torch.zeros(2, 1, 4, 6, dtype=torch.bool)
    invalid[0, 0, 1, 5] = True
    masked = model._invalid_tokens(invalid)
    assert masked.shape == (2, 2, 3, 1)
    assert masked.nonzero().tolist() == [[0, 0, 2, 0]]


# ---------------------------------------------------------------------- neighborhoods
@pytest.mark.parametrize("pos_embed", ["sincos", "rotary"])
@pytest.mark.parametrize("grid", [(10,), (6, 8), (4, 6, 6)])
def test_a_window_of_the_whole_grid_is_full_attention(grid: tuple[int, ...], pos_embed: str):
    options = {**SMALL, "patch_size": (2,) * len(grid), "pos_embed": pos_embed, "qk_norm": True}
    full = lively(DiT(grid, **options))
    window = DiT(grid, **options, kernel_size=tuple(n // 2 for n in grid)).double().eval()
    window.load_state_dict(full.state_dict())
    x, t = full.example_inputs(batch_size=2)
    torch.testing.assert_close(window(x, t), full(x, t), rtol=1e-9, atol=1e-9)


def test_a_window_sees_no_further():
    attention = lively(GridAttention(8, 2, grid_size=(9,), kernel_size=3))
    x = torch.randn(1, 9, 8).double()
    changed = x.clone()
    changed[:, 4] += 1
    differs = (attention(x) != attention(changed)).any(-1)[0]
    assert differs.tolist() == [False] * 3 + [True] * 3 + [False] * 3


# ---------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"condition": "colour"}, "condition must be one of"),
        ({"condition": "class"}, "condition='class' with condition_size=0"),
        ({"condition_size": 3}, "condition='none' with condition_size=3"),
        ({"condition": "vector", "condition_size": 3, "condition_drop": 0.1}, "condition_drop=0.1 belongs to"),
        ({"pos_embed": "fourier"}, "pos_embed must be one of"),
        ({"pos_embed": "rotary", "num_heads": 8}, "even number of channels, at least 4; got 3"),
        ({"num_heads": 5}, "embed_dim=24, num_heads=5"),
        ({"kernel_size": 3, "attn_drop_rate": 0.1}, "no dropout of its weights"),
        ({"img_size": 9}, "9 = 4 \\* 2 \\+ 1"),
        ({"time_freq_dim": 7}, "freq_dim must be even, got 7"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DiT(**{"img_size": 8, **SMALL, **options})


@pytest.mark.parametrize(
    ("options", "inputs", "message"),
    [
        ({}, {"t": None}, "t is missing"),
        ({"time": False}, {}, "t is given, but the model was built with time=False"),
        ({}, {"condition": torch.zeros(1, 2)}, "condition is given, but"),
        ({"condition": "vector", "condition_size": 2}, {}, "condition is missing, \\(vector, size 2\\)"),
        ({"condition": "scalar", "condition_size": 2}, {"condition": torch.zeros(1, 3)}, "expected 2 number"),
        ({"field_chans": 2}, {}, "field_chans=2, but the field is missing"),
        ({}, {"field": torch.zeros(1, 2, 8, 8)}, "field_chans=0, but the field is given"),
        ({}, {"invalid": torch.zeros(1, 1, 8, 8).bool()}, "mask_token=False"),
        ({"mask_token": True}, {"invalid": torch.zeros(1, 1, 8, 8)}, "must be bool of shape .*got torch.float32"),
        ({}, {"x": torch.zeros(1, 3, 8, 6)}, "built for inputs of shape"),
    ],
)
def test_inputs_that_do_not_fit(options: dict[str, Any], inputs: dict[str, Any], message: str):
    model = DiT(8, **SMALL, **options)
    with pytest.raises(ValueError, match=message):
        model(**{"x": torch.zeros(1, 3, 8, 8), "t": torch.zeros(1), **inputs})


def test_one_number_may_come_without_a_dim():
    embedder = NumberEmbedder(6, freq_dim=4)
    t = torch.rand(3)
    assert torch.equal(embedder(t), embedder(t[:, None]))
