"""Files of NAT and DiNAT: our names, with bias tables of other windows, none, or all zero."""

from typing import Any

import pytest
import torch

from dpzoo.models import NeighborhoodTransformer
from dpzoo.weights import WeightsMismatchError
from dpzoo.weights.resampling import resample_bias_table
from tests.models.lively import liven
from tests.weights.dialect_checks import assert_goes_back, kinds, load

SMALL: dict[str, Any] = {
    "embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "kernel_size": 3, "num_classes": 5, "layer_scale": 1e-5,
}  # fmt: skip
RPB = "levels.0.blocks.1.attn.rpb"


def nat(seed: int = 0, **options: Any) -> NeighborhoodTransformer:
    torch.manual_seed(seed)
    return liven(NeighborhoodTransformer(**{**SMALL, **options}), 0.2).eval()


def test_a_checkpoint_as_it_is():
    reference, model = nat(), nat(1)
    assert reference.state_dict()[RPB].shape == (1, 5, 5)
    view = load({**reference.state_dict(), "levels.0.blocks.0.attn.relative_position_index": torch.zeros(9, 9)}, model)
    assert kinds(view) == {"dropped": 1}
    assert all(torch.equal(t, reference.state_dict()[n]) for n, t in model.state_dict().items())
    assert_goes_back("SHI-Labs NAT", reference.state_dict(), model)


def test_tables_of_another_window_are_resampled():
    reference, model = nat(), nat(1, kernel_size=5)
    view = load(reference.state_dict(), model)
    assert kinds(view) == {"resampled": 3}
    assert view.changes[0].detail == "bias table 5 x 5 -> 9 x 9"
    expected = resample_bias_table(reference.state_dict()[RPB], (9, 9))
    torch.testing.assert_close(model.state_dict()[RPB], expected)


def test_a_file_without_tables_is_one_of_zeros():
    reference, model = nat(rel_pos_bias=False), nat(1)
    load(reference.state_dict(), model)
    assert not model.state_dict()[RPB].any()
    x = torch.randn(1, 3, 24, 20)
    torch.testing.assert_close(model(x), reference(x))


def test_tables_of_zeros_go_and_others_are_refused():
    model = nat(1, rel_pos_bias=False)
    state = {n: torch.zeros_like(t) if n.endswith("rpb") else t for n, t in nat().state_dict().items()}
    view = load(state, model)
    assert [c.detail for c in view.changes] == ["all zero"] * 3
    state[RPB] = state[RPB].clone()
    state[RPB][0, 2, 2] = 1e-3
    with pytest.raises(WeightsMismatchError, match=r"relative position biases \(build it with rel_pos_bias=True\)"):
        load(state, model)


def test_heads_channels_and_scales():
    model = nat(1, num_classes=0, in_chans=6)
    view = load(nat().state_dict(), model)
    assert {c.detail for c in view.changes} == {
        "input channels 3 -> 6 (repeated, scaled by 3/6)",
        "head: the file has 5 outputs, the model none",
    }
    dense = nat(1, head="dense", num_classes=0)
    kept = load(nat().state_dict(), dense).kept
    assert kept
    assert all(name.startswith("head.") for name in kept)
    with pytest.raises(WeightsMismatchError, match="layer_scale=1e-5"):
        load(nat().state_dict(), nat(1, layer_scale=None))
