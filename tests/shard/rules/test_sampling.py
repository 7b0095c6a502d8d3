"""grid_sample, affine_grid and fold: fields, points, samples and channels cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import GatherWarning, Shard, reset_warnings, scatter_tensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_same_error, op_test
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}


def _sampled(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, g: F.grid_sample(x, g * 0.7, **{"align_corners": False, **options})


FIELD, POINTS = (2, 3, 9, 6), (2, 7, 5, 2)
CASES = [
    OpCase(
        "grid_sample, cut points",
        fn=_sampled(),
        shape=[FIELD, POINTS],
        shard=[None, 1],
        mesh2d=[None, (1, 2)],
        covers=("grid_sample", "grid_sample of whole fields"),
    ),
    OpCase("grid_sample, cut field", fn=_sampled(mode="bicubic"), shape=[FIELD, POINTS], shard=[2, None], **FEW),
    OpCase(
        "grid_sample, cut channels",
        fn=_sampled(mode="nearest"),
        shape=[FIELD, POINTS],
        shard=[1, None],
        **FEW,
    ),
    OpCase(
        "grid_sample, both cut",
        fn=_sampled(padding_mode="border"),
        shape=[FIELD, POINTS],
        shard=[2, 1],
        mesh2d=[(2, 3), (1, 2)],
        gathers=True,
        **FEW,
    ),
    OpCase(
        "grid_sample, samples",
        fn=_sampled(padding_mode="reflection", align_corners=True),
        shape=[(5, 2, 4, 3), (5, 3, 2, 2)],
        shard=[0, 0],
        mesh2d=[(0, 2), (0, 1)],
        gathers=True,
        **FEW,
    ),
    OpCase(
        "grid_sample, samples and points",
        fn=_sampled(),
        shape=[(5, 2, 4, 3), (5, 3, 2, 2)],
        shard=[0, 1],
        gathers=True,
        **ONCE,
    ),
    OpCase("grid_sample, volume", fn=_sampled(), shape=[(1, 2, 5, 4, 3), (1, 4, 3, 2, 3)], shard=[None, 1], **FEW),
    OpCase(
        "grid_sample, one channel",
        fn=_sampled(),
        shape=[(1, 1, 9, 6), (1, 4, 3, 2)],
        shard=[2, None],
        gathers=True,
        **ONCE,
    ),
    OpCase(
        "affine_grid",
        fn=lambda t: F.affine_grid(t, [5, 2, 4, 3], align_corners=False),
        shape=(5, 2, 3),
        shard=0,
        covers=("affine_grid",),
        **FEW,
    ),
    OpCase(
        "affine_grid, rows",
        fn=lambda t: F.affine_grid(t, [3, 2, 4, 3], align_corners=True),
        shape=(3, 2, 3),
        shard=1,
        **ONCE,
    ),
    OpCase(
        "affine_grid, volume",
        fn=lambda t: F.affine_grid(t, [2, 1, 2, 3, 4], align_corners=True),
        shape=(2, 3, 4),
        shard=0,
        **ONCE,
    ),
    OpCase(
        "affine_grid to grid_sample",
        fn=lambda x, t: F.grid_sample(x, F.affine_grid(t, list(x.shape), align_corners=False), align_corners=False),
        shape=[FIELD, (2, 2, 3)],
        shard=[2, None],
        **FEW,
    ),
    OpCase(
        "fold, samples",
        fn=lambda x: F.fold(x, (6, 5), 3, padding=1),
        shape=(5, 18, 30),
        shard=0,
        covers=("fold", "fold of whole pictures"),
        **FEW,
    ),
    OpCase(
        "fold, blocks", fn=lambda x: F.fold(x, (6, 5), (2, 3), 1, (0, 1), [2, 1]), shape=(4, 12, 15), shard=2, **FEW
    ),
    OpCase(
        "fold, one sample", fn=lambda x: F.fold(x, (6, 4), 2, stride=2), shape=(1, 8, 6), shard=2, gathers=True, **ONCE
    ),
    OpCase("fold, unbatched", fn=lambda x: F.fold(x, (6, 4), 2, stride=2), shape=(8, 6), shard=1, gathers=True, **ONCE),
    OpCase(
        "fold of unfold",
        fn=lambda x: F.fold(F.unfold(x, 3, padding=1), (9, 6), 3, padding=1),
        shape=(4, 2, 9, 6),
        shard=2,
        **FEW,
    ),
]

test_sampling = op_test(CASES)


@distributed(ranks=2)
def test_a_gathered_field_is_reported():
    reset_warnings()
    x = scatter_tensor(torch.randn(FIELD), 0, domain_mesh(), [Shard(2)])
    points = scatter_tensor(torch.randn(POINTS), 0, domain_mesh(), [Shard(1)])
    with pytest.warns(GatherWarning, match="grid_sample"):
        out = F.grid_sample(x, points, align_corners=False)
    assert out.placements == (Shard(2),)  # cut like its points


BAD: dict[str, Callable[[Tensor], Any]] = {
    "points of another batch": lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2), align_corners=False),
    "points of another dimension": lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 3), align_corners=False),
    "unknown mode": lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 2), mode="cubic", align_corners=False),
    "unknown padding": lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 2), padding_mode="wrap", align_corners=False),
    "other dtype": lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 2, dtype=torch.float64), align_corners=False),
    "grid of an image": lambda x: F.affine_grid(x, [1, 3, 9, 6], align_corners=False),
    "grid of no size": lambda x: F.affine_grid(x[0, :, :2, :3], [3, 3, 0, 6], align_corners=False),
    "blocks that do not fit": lambda x: F.fold(x[0], (9, 6), 2),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2)
