"""The neighborhood transformers on one device: keys and shapes of the public checkpoints, and the papers' structure."""

import re

import pytest
import torch

from dpzoo.models import NeighborhoodTransformer, create_model
from dpzoo.models.layers.neighborhood_attention import NeighborhoodAttention
from dpzoo.models.neighborhood import block_dilations
from tests.ops.neighborhood_oracle import dense

SMALL = {"embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "kernel_size": 3, "num_classes": 5}


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("nat_mini", 20.0),
        ("nat_tiny", 27.9),
        ("nat_small", 50.7),
        ("nat_base", 89.8),
        ("dinat_mini", 20.0),
        ("dinat_tiny", 27.9),
        ("dinat_small", 50.7),
        ("dinat_base", 89.8),
        ("dinat_large", 200.9),
    ],
)
def test_parameters_as_published(name, millions):
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_keys_and_shapes_of_the_checkpoints():
    with torch.device("meta"):
        state = create_model("nat_base").state_dict()
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    expected = {
        "patch_embed.proj.0.weight": (64, 3, 3, 3),
        "patch_embed.proj.1.bias": (128,),
        "patch_embed.norm.weight": (128,),
        "levels.0.blocks.0.norm1.weight": (128,),
        "levels.0.blocks.2.attn.rpb": (4, 13, 13),
        "levels.0.blocks.2.attn.qkv.weight": (384, 128),
        "levels.1.blocks.3.attn.proj.bias": (256,),
        "levels.2.blocks.17.norm2.bias": (512,),
        "levels.2.blocks.17.mlp.fc1.weight": (1024, 512),
        "levels.3.blocks.4.mlp.fc2.weight": (1024, 2048),
        "levels.3.blocks.4.gamma1": (1024,),
        "levels.0.downsample.reduction.weight": (256, 128, 3, 3),
        "levels.2.downsample.norm.weight": (1024,),
        "norm.weight": (1024,),
        "head.weight": (1000, 1024),
    }
    assert {key: shapes.get(key) for key in expected} == expected
    kinds = {re.sub(r"\.\d+", ".N", key) for key in shapes}
    level = "levels.N.blocks.N"
    assert kinds == {
        *(f"patch_embed.{k}" for k in ("proj.N.weight", "proj.N.bias", "norm.weight", "norm.bias")),
        *(f"{level}.{n}.{k}" for n in ("norm1", "norm2") for k in ("weight", "bias")),
        *(f"{level}.{n}.{k}" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2") for k in ("weight", "bias")),
        *(f"{level}.{k}" for k in ("attn.rpb", "gamma1", "gamma2")),
        *(f"levels.N.downsample.{k}" for k in ("reduction.weight", "norm.weight", "norm.bias")),
        *(f"{n}.{k}" for n in ("norm", "head") for k in ("weight", "bias")),
    }


def test_dilations_take_turns():
    assert block_dilations((3, 4), (8, 2)) == [(1, 8, 1), (1, 2, 1, 2)]
    assert block_dilations((2, 1), None) == [(1, 1), (1,)]
    assert block_dilations((2, 1), ((3, 2), (1,))) == [(3, 2), (1,)]
    with pytest.raises(ValueError, match="2 levels"):
        block_dilations((2, 1), (1,))
    with pytest.raises(ValueError, match="level 1 has 1 blocks"):
        block_dilations((2, 1), (1, (1, 2)))
    model = create_model("dinat_mini", depths=(1, 2, 1, 1))
    assert [b.attn.dilation for b in model.levels[1].blocks] == [(1, 1), (4, 4)]


@pytest.mark.parametrize("grid", [(7, 6), (5, 4), (2, 7)])
def test_attention_layer(grid):
    """The layer is its projections around the definition; a grid smaller than the window is padded at its end."""
    torch.manual_seed(0)
    layer = NeighborhoodAttention(6, 2, (3, 2), dilation=(2, 2), rel_pos_bias=True).double()
    x = torch.randn(2, *grid, 6, dtype=torch.float64)
    padded = torch.zeros(2, max(grid[0], 6), max(grid[1], 4), 6, dtype=torch.float64)
    padded[:, : grid[0], : grid[1]] = x
    q, k, v = layer.qkv(padded).unflatten(-1, (3, 2, 3)).unbind(-3)
    out = dense(q, k, v, (3, 2), (1, 1), (2, 2), (False, False), table=layer.rpb).flatten(-2)
    torch.testing.assert_close(layer(x), layer.proj(out[:, : grid[0], : grid[1]]))


@pytest.mark.parametrize("size", [(32, 32), (37, 18), (5, 3)])
def test_any_size(size):
    x = torch.randn(2, 3, *size)
    assert NeighborhoodTransformer(**SMALL)(x).shape == (2, 5)
    field = NeighborhoodTransformer(**{**SMALL, "num_classes": 0}, head="dense", out_chans=4)
    assert field(x).shape == (2, 4, *size)


def test_volume_and_features():
    model = NeighborhoodTransformer(1, **SMALL, ndim=3)
    shapes = [tuple(f.shape) for f in model.forward_features(torch.randn(1, 1, 17, 8, 12))]
    assert shapes == [(1, 5, 2, 3, 8), (1, 3, 1, 2, 16)]
    assert {n.rpartition(".")[2] for n in model.no_weight_decay()} == {"rpb"}


@pytest.mark.parametrize(
    "arguments",
    [
        {"head": "other"},
        {"out_chans": 3},
        {"ndim": 1},
        {"num_heads": (1,)},
        {"num_heads": (3, 2)},
        {"kernel_size": (3, 3, 3)},
    ],
)
def test_contradictions(arguments):
    with pytest.raises(ValueError):
        NeighborhoodTransformer(**{**SMALL, **arguments})


def test_compiles_as_one_graph():
    model = create_model("dinat_nano", depths=(2, 1))
    x = torch.randn(1, 3, 32, 24)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-6)
    compiled(x).sum().backward()
