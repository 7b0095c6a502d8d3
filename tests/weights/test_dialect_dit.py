"""Files of diffusion transformers: the authors' names, diffusers' model, PhysicsNeMo's files and outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpzoo.models import DiT, StormScope
from dpzoo.models.layers.pos_embed import sincos_positions
from dpzoo.weights import TensorSource, WeightsMismatchError
from dpzoo.weights.dialects import get_dialect
from tests.models.lively import liven
from tests.weights.dialect_checks import assert_goes_back, kinds, load
from tests.weights.golden import golden
from tests.weights.mdlus import read_mdlus, recorded

SMALL: dict[str, Any] = {
    "img_size": 8, "patch_size": 2, "in_chans": 3, "out_chans": 6, "embed_dim": 16, "depth": 2, "num_heads": 2,
    "condition": "class", "condition_size": 10, "condition_drop": 0.1,
}  # fmt: skip


def dit(seed: int = 0, **options: Any) -> DiT:
    torch.manual_seed(seed)
    return liven(DiT(**{**SMALL, **options}), 0.1).eval()


def inputs(*size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    return torch.randn(2, 3, *size), torch.tensor([3.0, 17.0]), torch.tensor([1, 4])


# ---------------------------------------------------------------------- the authors' release
def test_sines_and_cosines_are_rebuilt_on_another_grid_and_learned_ones_resampled():
    source, model = dit(), dit(1, img_size=(8, 12))
    view = load(source.state_dict(), model, old_grid=(4, 4))
    assert set(view.kept) == {"pos_embed"}
    assert "rebuilt for 4 x 6 from 4 x 4" in view.kept["pos_embed"]
    assert torch.equal(model.pos_embed[0], sincos_positions((4, 6), 16))

    latents = dit(in_chans=4)  # no picture: but its table says that it is a square
    assert (
        "rebuilt for 4 x 6 from 4 x 4"
        in load(latents.state_dict(), dit(1, in_chans=4, img_size=(8, 12))).kept["pos_embed"]
    )

    load(source.state_dict(), wide := dit(1, img_size=(4, 16)))  # as many places, elsewhere
    assert torch.equal(wide.pos_embed[0], sincos_positions((2, 8), 16))

    learned = {**source.state_dict(), "pos_embed": torch.randn(1, 16, 16)}
    assert kinds(load(learned, model, old_grid=(4, 4))) == {"resampled": 1}
    assert not torch.allclose(model.pos_embed[0], sincos_positions((4, 6), 16), atol=0.1)
    with pytest.raises(WeightsMismatchError, match="pass it as old_grid="):
        load({**learned, "x_embedder.proj.weight": torch.randn(16, 4, 2, 2)}, model)


def test_a_bare_network_in_a_preconditioner_and_out():
    small = {"img_size": (8, 8), "in_chans": 2, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
    torch.manual_seed(0)
    outer = liven(StormScope(**small, kernel_size=3))
    inner = DiT(**{**small, "in_chans": 2, "field_chans": 2}, kernel_size=3)
    view = load(outer.state_dict(), inner)
    assert next(c for c in view.changes if c.kind == "dropped").theirs == ("sigma_data",)
    assert torch.equal(inner.blocks[0].attn.qkv.weight, outer.network.blocks[0].attn.qkv.weight)
    again = StormScope(**small, kernel_size=3, sigma_data=0.7)
    assert set(load(inner.state_dict(), again).kept) == {"sigma_data"}
    assert torch.equal(again.network.blocks[0].attn.qkv.weight, outer.network.blocks[0].attn.qkv.weight)


def test_missing_features_have_names():
    with pytest.raises(WeightsMismatchError, match=r"needs a class \(build it with condition='class'\)"):
        load(dit().state_dict(), dit(condition="none", condition_size=0, condition_drop=0.0))
    with pytest.raises(WeightsMismatchError, match=r"needs mask tokens \(build it with mask_token=True\)"):
        load(dit(mask_token=True).state_dict(), dit())


# ---------------------------------------------------------------------- diffusers
def diffusers_dit() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    # Of the two norms of a block, one has an epsilon of its own.
    return liven(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=6, num_layers=2, patch_size=2,
            sample_size=8, num_embeds_ada_norm=10, norm_eps=1e-6,
        ), 0.1,
    ).eval()  # fmt: skip


def repeated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """diffusers' file: the embedders of every block are those of the first."""
    return {n: state[n.replace("blocks.1.norm1.emb", "blocks.0.norm1.emb")] for n in state}


def test_diffusers_files_give_diffusers_outputs():
    reference = diffusers_dit()
    state = repeated(reference.state_dict())
    reference.load_state_dict(state)
    model = dit(1, time_endpoint=True)
    view = load(TensorSource(state, config=dict(reference.config)), model)
    assert set(view.kept) == {"pos_embed"}
    assert kinds(view)["merged"] == 9  # five tensors of the embedders, weight and bias of two blocks' queries ...
    x, t, y = inputs(8, 8)
    with torch.no_grad():
        expected = reference(x, timestep=t.long(), class_labels=y).sample
        torch.testing.assert_close(model(x, t, y), expected, rtol=0, atol=1e-6)
    assert_goes_back("diffusers DiT", state, model)


def test_recorded_names():
    file, model = golden("diffusers_dit"), dit()
    load(file, model)
    qkv = [file[f"transformer_blocks.1.attn1.to_{part}.bias"] for part in "qkv"]
    assert torch.equal(model.blocks[1].attn.qkv.bias, torch.cat(qkv))
    assert_goes_back("diffusers DiT", file, model)


def test_diffusers_copies_must_be_equal():
    state = golden("diffusers_dit")
    name = "transformer_blocks.1.norm1.emb.timestep_embedder.linear_2.weight"
    state[name] = state[name] + 1e-6
    with pytest.raises(
        WeightsMismatchError, match=r"block.*s\.0.*linear_2\.weight and transformer_.*s\.1.* should hold the same"
    ):
        load(state, dit())
    del state[name]  # a file without repetitions
    load(state, dit())


def test_diffusers_config_must_agree():
    source = TensorSource(golden("diffusers_dit"), origin="folder", config={"num_attention_heads": 2})
    with pytest.raises(
        WeightsMismatchError, match="folder: the file's config says num_attention_heads 2, the model has 4"
    ):
        load(source, dit(num_heads=4))


def test_what_diffusers_has_no_place_for():
    with pytest.raises(
        WeightsMismatchError, match=r"diffusers DiT has no place for blocks\.0\.attn\.mask_token, blocks\.1"
    ):
        assert_goes_back("diffusers DiT", {}, dit(mask_token=True))


# ---------------------------------------------------------------------- PhysicsNeMo
def stormscope(**options: Any) -> StormScope:
    given = {
        "img_size": (12, 16), "in_chans": 3, "state_chans": 2, "patch_size": 4, "embed_dim": 16, "depth": 2,
        "num_heads": 2, "kernel_size": 3, "qk_norm": True, "mask_token": True, "pos_embed": "learned",
        "time_freq_dim": 16, "time_hidden_dim": 32,
    }  # fmt: skip
    return StormScope(**{**given, **options}).eval()


def test_physicsnemos_edm_dit_gives_its_outputs():
    source, model = read_mdlus("edm_dit"), stormscope()
    view = load(source, model)
    case = recorded("edm_dit")
    with torch.no_grad():
        found = model(case["x"], case["sigma"], state=case["state"])
    torch.testing.assert_close(found, case["out"], rtol=0, atol=1e-6)
    assert "a norm without weights" in {c.detail for c in view.changes}
    assert_goes_back("physicsnemo DiT", source, model)


def test_physicsnemos_dit_with_a_vector_gives_its_outputs():
    source = read_mdlus("dit")
    torch.manual_seed(0)
    model = DiT((8, 12), 4, 2, 3, condition="vector", condition_size=3, embed_dim=16, depth=1, num_heads=2,
                pos_embed="learned", time_freq_dim=8, time_hidden_dim=32).eval()  # fmt: skip
    load(source, model)
    case = recorded("dit")
    with torch.no_grad():
        found = model(case["x"], case["t"], case["condition"])
        torch.testing.assert_close(found, case["out"], rtol=0, atol=2e-6)
    assert_goes_back("physicsnemo DiT", source, model)
    torch.nn.init.normal_(model.y_embedder.bias)  # theirs has none: it moves into the time's
    other = DiT(**{**SMALL, "condition": "none", "condition_size": 0, "condition_drop": 0.0})
    with torch.no_grad():
        expected = model(case["x"], case["t"], case["condition"])
    back = get_dialect("physicsnemo DiT", model).from_dpzoo(TensorSource(model.state_dict()), model)
    load(TensorSource({n: back.read(n) for n in back.names()}), model)
    assert not model.y_embedder.bias.any()
    with torch.no_grad():
        torch.testing.assert_close(model(case["x"], case["t"], case["condition"]), expected, rtol=0, atol=2e-6)
    with pytest.raises(WeightsMismatchError, match=r"needs a condition vector \(build it with condition='vector'"):
        load(source, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4}, "config says num_heads 2, the model has 4"),
        ({"kernel_size": None}, r"config says attn_kernel 3, the model has none \(all tokens attend to all\)"),
        ({"dilation": 2, "img_size": (24, 32)}, "config says dilation 1, the model has 2"),
        ({"qk_norm": False}, "config says qk_norm True, the model has False"),
        ({"mask_token": False}, r"needs mask tokens \(build it with mask_token=True\)"),
        ({"pos_embed": "rotary", "num_heads": 2}, "needs an added position embedding|rotary positions False"),
    ],
)
def test_what_no_shape_shows_is_compared(options: dict[str, Any], message: str):
    with pytest.raises(WeightsMismatchError, match=message):
        load(read_mdlus("edm_dit"), stormscope(**options))


def test_file_version_one():
    """Before 0.2.0 the time embedding stood at the root."""
    source = read_mdlus("edm_dit")
    old = {n.replace("conditioning_embedder.t_embedder", "t_embedder"): source.read(n) for n in source.names()}
    model, expected = stormscope(), stormscope()
    load(TensorSource(old, config=source.config), model)
    load(source, expected)
    assert all(torch.equal(t, expected.state_dict()[n]) for n, t in model.state_dict().items())
    table = next(n for n in old if n.endswith("freqs"))
    with pytest.raises(WeightsMismatchError, match=r"t_embedder\.freqs: other frequencies than the model computes, 8"):
        load(TensorSource({**old, table: old[table] * 1.1}, config=source.config), model)


def test_physicsnemos_positions_move_by_the_grid_in_its_arguments():
    model = stormscope(img_size=(16, 24))
    view = load(read_mdlus("edm_dit"), model)
    assert next(c for c in view.changes if c.kind == "resampled").detail.startswith("grid 3 x 4 -> 4 x 6")


def test_detokenizers_and_embedders_that_we_lack():
    source = read_mdlus("edm_dit")
    state = {n: source.read(n) for n in source.names()}
    for name, feature in (
        ("model.model.detokenizer.conv_head.0.weight", "a convolution behind the patches"),
        ("model.model.conditioning_embedder.map_layer0.weight", "time and condition embedded together"),
    ):
        with pytest.raises(WeightsMismatchError, match=feature):
            load({**state, name: torch.zeros(1)}, stormscope())
