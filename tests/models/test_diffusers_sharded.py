"""diffusers' DiT, unmodified, on a cut latent: one device's outputs and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpzoo.testing import assert_parity, distributed, grid_mesh
from tests.models.lively import liven

pytest.importorskip("diffusers")
from diffusers import DiTTransformer2DModel

ROWS = 8  # square: the model takes its patches' places from one size


class Sample(nn.Module):
    """The model's field, of the object it returns; time and class as the pipelines pass them."""

    def __init__(self, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=6, num_layers=2, patch_size=2,
            sample_size=ROWS, num_embeds_ada_norm=10, **options,
        )  # fmt: skip
        liven(self.model, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(
            x, timestep=torch.tensor([3, 700])[: len(x)], class_labels=torch.tensor([1, 4])[: len(x)]
        ).sample


def field(batch: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, ROWS, ROWS, dtype=torch.float64)


@distributed(ranks=2, timeout=60)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3), (8, 0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_parity(batch: int, sizes: tuple[int, int], training: bool):
    assert_parity(Sample().train(training), field(batch), 2, sizes, strict=True)


@distributed(ranks=4, timeout=60)
@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 3, 0, 4)])
def test_four_ranks(sizes: tuple[int, ...]):
    assert_parity(Sample(), field(1), 2, sizes, strict=True)


@distributed(ranks=4, timeout=60)
def test_two_dims_on_a_grid_of_ranks():
    assert_parity(Sample(), field(1), (2, 3), ((5, 3), (2, 6)), mesh=grid_mesh(), strict=True)
