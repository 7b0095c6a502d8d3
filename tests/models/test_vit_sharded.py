"""ViT domain-parallel gives one device's values, input and weight gradients: ours, and timm's own model unmodified.

Fields are cut along the first spatial dim. Every model is held at full size by every rank; only the input is sharded.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from dpzoo.models import ViT, create_model
from dpzoo.shard import Shard, ShardTensor, scatter, strict
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh
from tests.models.lively import liven

SMALL: dict[str, Any] = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
PICTURE = (24, 8)
VOLUME = (24, 4, 8)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "average pool": lambda: ViT(PICTURE, **SMALL, num_classes=5, class_token=False),
    "class token": lambda: ViT(PICTURE, **SMALL, num_classes=5),
    "class and register tokens": lambda: ViT(PICTURE, **SMALL, num_classes=5, reg_tokens=3, no_embed_class=True),
    "average pool past prefix": lambda: ViT(PICTURE, **SMALL, num_classes=5, reg_tokens=2, global_pool="avg"),
    "layer-scale and qk-norm": lambda: ViT(PICTURE, **SMALL, num_classes=5, init_values=0.3, qk_norm=True),
    "no pool": lambda: ViT(PICTURE, **SMALL, num_classes=5, global_pool=""),
    "dense": lambda: ViT(PICTURE, **SMALL, head="dense", out_chans=2),
    "dense with class token": lambda: ViT(PICTURE, **SMALL, head="dense", out_chans=2, class_token=True),
    "volume": lambda: ViT(VOLUME, **SMALL, num_classes=5),
    "volume, dense": lambda: ViT(VOLUME, **SMALL, head="dense", out_chans=2),
    "timm": lambda: VisionTransformer(PICTURE, **SMALL, num_classes=5),
    "timm, average pool": lambda: VisionTransformer(PICTURE, **SMALL, num_classes=5, global_pool="avg"),
    "timm, no class token": lambda: VisionTransformer(
        PICTURE, **SMALL, num_classes=5, class_token=False, global_pool="avg"
    ),
    "timm, all options": lambda: VisionTransformer(
        PICTURE, **SMALL, num_classes=5, reg_tokens=2, init_values=0.3, qk_norm=True, no_embed_class=True
    ),
}

# How the 24 rows lie on the ranks, by number of ranks.
CUTS: dict[str, dict[int, tuple[int, ...]]] = {
    "whole patches": {1: (24,), 2: (16, 8), 3: (8, 4, 12)},
    "inside patches": {1: (24,), 2: (10, 14), 3: (5, 13, 6)},
    "an empty rank": {1: (24,), 2: (24, 0), 3: (8, 0, 16)},
}


def build(name: str) -> nn.Module:
    """The same weights on every rank, none of them a zero or one that hides a missing term."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return liven(model)


def field(name: str, batch: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 3, *(VOLUME if "volume" in name else PICTURE), dtype=torch.float64)


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_uneven_whole_patches(name: str, ranks: int):
    with strict():  # no op of a ViT may gather a sharded tensor
        assert_parity(build(name), field(name), placements=2, sizes=CUTS["whole patches"][ranks])


@distributed(ranks=[1, 2, 3])
@pytest.mark.parametrize("cut", ["inside patches", "an empty rank"])
@pytest.mark.parametrize("name", ["average pool", "class token", "dense", "volume, dense", "timm"])
def test_hard_cuts(name: str, cut: str, ranks: int):
    with strict():
        assert_parity(build(name), field(name), placements=2, sizes=CUTS[cut][ranks])


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["average pool", "class token", "dense", "timm"])
def test_batch_of_two(name: str):
    with strict():
        assert_parity(build(name), field(name, batch=2), placements=2, sizes=CUTS["whole patches"][2])


@distributed(ranks=3)
@pytest.mark.parametrize("name", ["vit_nano_patch8", "vit_nano_patch4_gap", "vit_nano_patch4_dense"])
def test_named_variants(name: str):
    """On 2 and 4 ranks test_zoo.py has them."""
    torch.manual_seed(0)
    model = create_model(name, depth=2).double()
    assert_parity(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), placements=2, sizes=(8, 16, 8))


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", ["average pool", "class token", "dense", "volume, dense", "timm"])
def test_cut_of_the_last_dim(name: str, ranks: int):
    """Its shards interleave in the token sequence, so tokens have to move; the result is still one device's."""
    x = field(name)
    assert_parity(build(name), x, placements=x.ndim - 1, sizes={2: (5, 3), 3: (4, 1, 3)}[ranks])


@distributed(ranks=4)
@pytest.mark.parametrize("name", ["average pool", "class token", "dense", "timm"])
def test_two_dims_on_a_grid_of_ranks(name: str):
    assert_parity(build(name), field(name), placements=(2, 3), sizes=((16, 8), (5, 3)), mesh=grid_mesh())


@distributed(ranks=4)
@pytest.mark.parametrize("name", ["class token", "dense", "timm"])
def test_second_row_of_ranks(name: str):
    """Two replicas, each on its own pair of ranks."""
    with strict():
        assert_parity(build(name), field(name), placements=2, sizes=(10, 14), mesh=row_mesh())


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["dense", "volume, dense", "timm"])
def test_activations_stay_cut(name: str):
    """Right values are not enough: up to the pooling, every layer's output is this rank's part and no more."""
    model, seen = build(name), []

    def note(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        assert isinstance(output, ShardTensor), module
        assert isinstance(output.placements[0], Shard), module
        assert 0 < output.to_local().numel() < output.numel(), module
        seen.append(module)

    for path, module in model.named_modules():
        if path.startswith(("patch_embed", "blocks", "norm", "head.")) or (path == "head" and "dense" in name):
            module.register_forward_hook(note)
    out = model(scatter(field(name), domain_mesh(), dim=2, sizes=(16, 8)))
    assert len(seen) > 20
    if "dense" in name:
        assert out._spec.sharding_shapes()[0] == tuple((1, 2, rows, *out.shape[3:]) for rows in (16, 8))
