"""timm's own transformers, unmodified, on a cut picture: one device's outputs and gradients, and no op gathers.

Small widths and depths by timm's own arguments, so that a test takes a second; every layer is timm's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from dpzoo.testing import assert_parity, distributed, grid_mesh, row_mesh
from tests.models.lively import liven

SWIN: dict[str, Any] = {
    "img_size": (64, 32), "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 3), "num_classes": 3,
}  # fmt: skip

MODELS: dict[str, Callable[..., nn.Module]] = {
    "swin": functools.partial(timm.create_model, "swin_tiny_patch4_window7_224", drop_path_rate=0.0, **SWIN),
    "vit": functools.partial(
        timm.create_model, "vit_base_patch16_224", img_size=(64, 32), patch_size=8, embed_dim=24, depth=2, num_heads=3,
        num_classes=3,
    ),
    "deit3": functools.partial(
        timm.create_model, "deit3_small_patch16_224", img_size=(64, 32), patch_size=8, embed_dim=24, depth=2,
        num_heads=3, num_classes=3, drop_path_rate=0.0,
    ),
    "maxvit": functools.partial(
        timm.create_model, "maxvit_nano_rw_256", img_size=64, embed_dim=(32, 64), depths=(1, 1), num_classes=3,
        drop_path_rate=0.0,
    ),
}  # fmt: skip


def build(name: str, training: bool = True) -> nn.Module:
    """The same weights on every rank, none of them a zero that hides a missing term."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train(training)
    return liven(model, 0.05)


def picture(name: str, batch: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, 64, 64 if name == "maxvit" else 32, dtype=torch.float64)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("sizes", [(32, 32), (44, 20)])
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str, sizes: tuple[int, int]):
    assert_parity(build(name), picture(name), 2, sizes, strict=True)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("name", MODELS)
def test_in_eval_mode(name: str):
    """Batch norms then use their buffers."""
    assert_parity(build(name, training=False), picture(name), 2, (29, 35), strict=True)


@distributed(ranks=4, timeout=90)
@pytest.mark.parametrize("name", MODELS)
def test_four_ranks(name: str):
    assert_parity(build(name), picture(name), 2, (13, 26, 5, 20), strict=True)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("name", ["swin", "maxvit"])
def test_an_idle_rank(name: str):
    assert_parity(build(name), picture(name), 2, (64, 0), strict=True)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("name", MODELS)
def test_two_samples(name: str):
    """A flatten of samples and rows interleaves the shards: rows move, to another dim, and come back."""
    assert_parity(build(name), picture(name, batch=2), 2, (44, 20), strict=True)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("name", ["swin", "maxvit"])
def test_columns_cut(name: str):
    x = picture(name)
    assert_parity(build(name), x, 3, (x.shape[3] - 11, 11), strict=True)


@distributed(ranks=4, timeout=90)
@pytest.mark.parametrize("name", ["swin", "maxvit"])
def test_two_dims_on_a_grid_of_ranks(name: str):
    x = picture(name)
    assert_parity(build(name), x, (2, 3), ((40, 24), (x.shape[3] - 11, 11)), mesh=grid_mesh(), strict=True)


@distributed(ranks=4, timeout=90)
def test_second_row_of_ranks():
    """Two replicas, each on its own pair of ranks."""
    assert_parity(build("swin"), picture("swin"), 2, (44, 20), mesh=row_mesh(), strict=True)


@distributed(ranks=2, timeout=120)
def test_swin_tiny_forward():
    """The real one, without gradients."""
    torch.manual_seed(0)
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=5).eval()
    x = torch.randn(1, 3, 224, 224)
    assert_parity(model, x, 2, (100, 124), dtype=torch.float32, grads=False, strict=True, rtol=1e-4, atol=1e-4)
