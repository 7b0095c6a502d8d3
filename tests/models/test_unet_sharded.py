"""U-Nets domain-parallel give one device's values, input and weight gradients, on any cut of the field."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dpzoo.models import DiffusionUNet, ResidualUNet, UNet, create_model
from dpzoo.shard import Shard, ShardTensor, scatter
from dpzoo.testing import assert_parity, distributed, domain_mesh, expect_error, grid_mesh, row_mesh
from tests.models.lively import liven

TINY: dict[str, Any] = {"in_chans": 2, "out_chans": 3, "channels": (4, 6, 8)}
TINY_DIFFUSION: dict[str, Any] = {"in_chans": 2, "out_chans": 3, "model_channels": 8, "num_blocks": 1, "dropout": 0.0}
NCSNPP: dict[str, Any] = {"embedding": "fourier", "encoder": "residual", "resample_filter": (1, 3, 3, 1)}

# name -> (model, grid)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "strided": (lambda: UNet(**TINY), (24, 8)),
    "strided, odd": (lambda: UNet(**TINY, odd_sizes="fit"), (23, 9)),
    "pooled, batch norm": (lambda: UNet(**TINY, down="max", norm="batch", act="relu"), (24, 8)),
    "pooled, odd": (lambda: UNet(**TINY, down="max", odd_sizes="fit"), (23, 9)),
    "averaged, group norm": (lambda: UNet(**TINY, down="avg", norm="group", act="silu"), (24, 8)),
    "linear up": (lambda: UNet(**TINY, up="linear", odd_sizes="fit"), (23, 9)),
    "nearest up": (lambda: UNet(**TINY, up="nearest"), (24, 8)),
    "deep supervision": (lambda: UNet(**TINY, deep_supervision=True), (24, 8)),
    "volume": (lambda: UNet(**TINY, ndim=3, strides=((2, 1, 2), 2)), (24, 4, 8)),
    "residual": (lambda: ResidualUNet(**TINY), (24, 8)),
    "residual volume": (lambda: ResidualUNet(**TINY, ndim=3), (24, 4, 8)),
    "DDPM++": (lambda: DiffusionUNet(**TINY_DIFFUSION, channel_mult=(1, 2, 2), attn_levels=(1,)), (24, 8)),
    "NCSN++": (lambda: DiffusionUNet(**TINY_DIFFUSION, **NCSNPP, channel_mult=(1, 2, 2)), (24, 8)),
    "DDPM++ volume": (lambda: DiffusionUNet(**TINY_DIFFUSION, channel_mult=(1, 2), ndim=3), (24, 4, 8)),
}
# name -> (arguments, grid): every gradient travels to every rank, so the widths are halved.
NANO: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "unet_nano": ({"channels": (4, 8, 16)}, (24, 8)),
    "unet_nano_3d": ({"channels": (4, 8, 16)}, (16, 8, 8)),
    "diffusion_unet_nano": ({"model_channels": 8}, (24, 8)),
    "diffusion_unet_nano_3d": ({"model_channels": 4}, (16, 4, 6)),
}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights on every rank, none so small that it hides a missing term."""
    torch.manual_seed(0)
    model = make().double()
    return liven(model)


def inputs(model: nn.Module, grid: tuple[int, ...], batch: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(batch, model.in_chans, *grid, dtype=torch.float64)
    return [x, torch.randn(batch, dtype=torch.float64)] if isinstance(model, DiffusionUNet) else [x]


def compare(model: nn.Module, grid: tuple[int, ...], placement: Any, sizes: Any, batch: int = 1, **options: Any):
    given = inputs(model, grid, batch)
    rest = [None] * (len(given) - 1)
    assert_parity(model, given, [placement, *rest], [sizes, *rest], **options)


def cut(n: int, ranks: int) -> tuple[int, ...]:
    """Uneven sizes that no stride divides."""
    return {2: (n - 7, 7), 3: (5, n - 8, 3)}[ranks]


@distributed(ranks=3)
@pytest.mark.parametrize("name", MODELS)
def test_uneven(name: str):
    make, grid = MODELS[name]
    compare(build(make), grid, 2, cut(grid[0], 3), strict=True)


@distributed(ranks=3)
@pytest.mark.parametrize("name", ["strided", "pooled, odd", "linear up", "volume", "NCSN++"])
def test_an_empty_rank(name: str):
    make, grid = MODELS[name]
    compare(build(make), grid, 2, (11, 0, grid[0] - 11))


@distributed(ranks=3)
@pytest.mark.parametrize("name", NANO)
def test_named_variants(name: str):
    """On 2 and 4 ranks test_zoo.py has them."""
    arguments, grid = NANO[name]
    compare(build(lambda: create_model(name, **arguments)), grid, 2, cut(grid[0], 3))


@distributed(ranks=4)
@pytest.mark.parametrize("name", [*NANO, "pooled, odd", "strided, odd"])
def test_two_dims_on_a_grid_of_ranks(name: str):
    make, grid = MODELS[name] if name in MODELS else (lambda: create_model(name, **NANO[name][0]), NANO[name][1])
    h, w = grid[:2]
    compare(build(make), grid, (2, 3), ((h - 7, 7), (w - 3, 3)), mesh=grid_mesh())


@distributed(ranks=4)
@pytest.mark.parametrize("name", ["strided", "DDPM++"])
def test_second_row_of_ranks(name: str):
    make, grid = MODELS[name]
    compare(build(make), grid, 2, cut(grid[0], 2), mesh=row_mesh())


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["strided", "NCSN++"])
def test_last_dim_and_batch_of_two(name: str):
    make, grid = MODELS[name]
    compare(build(make), grid, 3, (5, grid[-1] - 5), batch=2)


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["strided", "pooled, odd", "nearest up", "residual", "volume", "DDPM++", "NCSN++"])
def test_activations_stay_cut(name: str):
    """Right values are not enough: every layer's output is this rank's part and no more."""
    make, grid = MODELS[name]
    model, seen = build(make), []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, ShardTensor):
            assert output.placements[0] == Shard(2), module
            assert 0 < output.to_local().numel() < output.numel(), module
            seen.append(module)

    for module in model.modules():
        module.register_forward_hook(note)
    x, *rest = inputs(model, grid)
    sizes = (16, grid[0] - 16)  # a border between coarse rows, so that it is still there after going down and up
    out = model(scatter(x, domain_mesh(), dim=2, sizes=sizes), *rest)
    assert len(seen) > 15
    assert out._spec.sharding_shapes()[0] == tuple((1, 3, rows, *grid[1:]) for rows in sizes)


@distributed(ranks=2)
def test_same_error_as_one_device():
    model = UNet(**TINY)
    x = torch.randn(1, 2, 26, 8)
    sharded = scatter(x, domain_mesh(), dim=2, sizes=(19, 7))
    with pytest.raises(ValueError, match=r"26, 8.*not a multiple of \(4, 4\)") as one_device:
        model(x)
    message = expect_error(lambda: model(sharded), ValueError)
    assert str(one_device.value) in message
