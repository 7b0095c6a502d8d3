"""Positions, patch kernels and bias tables on other grids: as timm does it where it has a function for it."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, resample_patch_embed, resize_rel_pos_bias_table_simple
from timm.models import adapt_input_conv

from dpzoo.weights.resampling import (
    adapt_input_channels,
    resample_bias_table,
    resample_flat_bias_table,
    resample_patch_kernel,
    resample_positions,
    resize,
)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 2e-6) -> None:
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("mode", "antialias"), list(itertools.product(("bicubic", "bilinear"), (True, False))))
@pytest.mark.parametrize("new", [(5, 9), (20, 3), (12, 14), (1, 1)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_positions_are_timms(prefix: int, new: tuple[int, int], mode: str, antialias: bool):
    torch.manual_seed(0)
    positions = torch.randn(1, prefix + 12 * 7, 5)
    found = resample_positions(positions, (12, 7), new, prefix_tokens=prefix, mode=mode, antialias=antialias)
    close(found, resample_abs_pos_embed(positions, list(new), [12, 7], prefix, mode, antialias))


def test_the_old_grid_matters_and_is_checked():
    positions = torch.randn(1, 65, 3)
    square, wide = (resample_positions(positions, old, (4, 4), prefix_tokens=1) for old in ((8, 8), (4, 16)))
    assert not torch.allclose(square, wide)
    assert resample_positions(positions, (4, 16), (4, 16), prefix_tokens=1) is positions
    for old, prefix in (((8, 8), 0), ((9, 7), 1), ((4, 4, 4), 1)):
        with pytest.raises(ValueError, match="new grid is"):
            resample_positions(positions, old, (4, 4), prefix_tokens=prefix)


def test_half_precision_is_resampled_in_float32():
    positions = torch.randn(1, 64, 3).bfloat16()
    found = resample_positions(positions, (8, 8), (5, 11))
    close(found, resample_positions(positions.float(), (8, 8), (5, 11)).bfloat16(), atol=0)


def test_three_dims_at_once_are_torchs_trilinear():
    positions = torch.randn(1, 4 * 3 * 5, 2, dtype=torch.float64)
    found = resample_positions(positions, (4, 3, 5), (6, 2, 9), mode="bilinear", antialias=False)
    field = positions.view(1, 4, 3, 5, 2).movedim(-1, 1)
    expected = F.interpolate(field, (6, 2, 9), mode="trilinear", align_corners=False)
    close(found, expected.flatten(2).transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("antialias", [True, False])
def test_a_dim_of_three_is_a_dim_of_two(antialias: bool):
    field = torch.randn(3, 4, 9, 8, dtype=torch.float64)
    found = resize(field, (4, 5, 11), antialias=antialias)
    expected = F.interpolate(field, (5, 11), mode="bicubic", antialias=antialias)
    close(found, expected, atol=1e-12)


@pytest.mark.parametrize("new", [(8, 8), (14, 14), (32, 16), (16, 8), (5, 20)])
def test_patch_kernels_are_timms(new: tuple[int, int]):
    torch.manual_seed(0)
    kernel = torch.randn(4, 3, 16, 8)
    close(resample_patch_kernel(kernel, new), resample_patch_embed(kernel, list(new)), atol=1e-4)  # pinv in float32


@pytest.mark.parametrize("new", [(6,), (6, 8), (8, 6, 4)])
def test_an_enlarged_kernel_answers_an_enlarged_patch_alike(new: tuple[int, ...]):
    old = tuple(n // 2 for n in new)
    kernel, patch = torch.randn(2, 1, *old, dtype=torch.float64), torch.randn(1, *old, dtype=torch.float64)
    larger, enlarged = resample_patch_kernel(kernel, new), resize(patch, new)
    close((larger * enlarged).flatten(1).sum(1), (kernel * patch).flatten(1).sum(1), atol=1e-9)


def test_bias_tables_are_timms():
    table = torch.randn(13 * 13, 4, dtype=torch.float64)
    expected = resize_rel_pos_bias_table_simple(table, (11, 11), (21 * 21, 4))
    close(resample_flat_bias_table(table, (13, 13), (21, 21)), expected)
    found = resample_bias_table(table.T.reshape(4, 13, 13), (21, 21))
    close(found.flatten(1).T, expected)
    flipped = resample_bias_table(table.T.reshape(4, 13, 13).flip(1), (7, 9))
    close(flipped.flip(1), resample_bias_table(table.T.reshape(4, 13, 13), (7, 9)))


@pytest.mark.parametrize("channels", [1, 2, 3, 7])
def test_input_channels_are_timms(channels: int):
    kernel = torch.randn(4, 3, 5, 5)
    found = adapt_input_channels(kernel, channels)
    close(found, adapt_input_conv(channels, kernel.clone()))
    with pytest.raises(ValueError, match="only kernels for pictures"):
        adapt_input_channels(torch.randn(4, 5, 3, 3), 3)


def test_wrong_dims_and_modes():
    with pytest.raises(ValueError, match="has no patches"):
        resample_patch_kernel(torch.randn(4, 3, 5, 5), (5, 5, 5))
    with pytest.raises(ValueError, match="has no windows"):
        resample_bias_table(torch.randn(4, 5, 5), (5,))
    with pytest.raises(ValueError, match="has no table"):
        resample_flat_bias_table(torch.randn(24, 2), (5, 5), (3, 3))
    with pytest.raises(ValueError, match="mode must be"):
        resize(torch.randn(1, 4, 4), (2, 2), mode="area")
