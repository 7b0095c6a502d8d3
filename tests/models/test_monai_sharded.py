"""MONAI's own U-Nets, unmodified, on a cut picture: one device's outputs, input gradients and weight gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpzoo.testing import assert_parity, distributed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    nets = pytest.importorskip("monai.networks.nets")

SMALL: dict[str, Any] = {"in_channels": 2, "out_channels": 3}
# name -> (model, grid, sizes on two ranks)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, int]]] = {
    "UNet": (lambda: nets.UNet(2, **SMALL, channels=(4, 8, 12), strides=(2, 2), num_res_units=2), (24, 12), (17, 7)),
    "UNet, plain units": (lambda: nets.UNet(2, **SMALL, channels=(4, 8), strides=(2,)), (22, 8), (13, 9)),
    "UNet, batch norm": (
        lambda: nets.UNet(2, **SMALL, channels=(4, 8, 12), strides=(2, 2), num_res_units=1, norm="BATCH", act="RELU"),
        (24, 8),
        (10, 14),
    ),
    "UNet, volume": (
        lambda: nets.UNet(3, **SMALL, channels=(4, 8, 12), strides=(2, 2), num_res_units=2),
        (16, 8, 8),
        (11, 5),
    ),
    "BasicUNet": (lambda: nets.BasicUNet(2, **SMALL, features=(4, 4, 8, 8, 8, 4)), (35, 32), (18, 17)),
}


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double().train()


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str):
    _, grid, sizes = MODELS[name]
    torch.manual_seed(1)
    x = torch.randn(2, 2, *grid, dtype=torch.float64)
    assert_parity(_build(name), x, 2, sizes, strict=True, rtol=1e-8, atol=1e-9)
