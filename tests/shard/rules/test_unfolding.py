"""Windows as values, pixel shuffles and differences along cut dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.testing import OpCase, distributed, expect_same_error, op_test
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}
IMAGE: dict[str, Any] = {"shape": (2, 4, 9, 6), "shard": 2, "mesh2d": (2, 3)}


def _second(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`fn` and its first derivative: a backward through it is a second one."""

    def call(x: Tensor) -> Any:
        out = fn(x)
        return out, torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)[0]

    return call


def _coordinates(n: int) -> Tensor:
    return torch.linspace(0, 3, n, dtype=torch.float64).exp()


CASES = [
    # ------------------------------------------------------------------ windows
    OpCase(
        "Tensor.unfold",
        fn=lambda x: (x.unfold(2, 4, 2), x.unfold(-2, 3, 1), x.unfold(2, 9, 1), x.unfold(2, 2, 5)),
        covers=("Tensor.unfold",),
        **IMAGE,
    ),
    OpCase(
        "Tensor.unfold, other dim",
        fn=lambda x: (x.unfold(3, 3, 2), x.unfold(dimension=1, size=2, step=2)),
        **IMAGE,
        **FEW,
    ),
    OpCase("Tensor.unfold, cut twice", fn=lambda x: x.unfold(2, 3, 1).unfold(3, 2, 2).sum(-1), **IMAGE, **FEW),
    OpCase("Tensor.unfold twice", fn=_second(lambda x: x.unfold(2, 4, 2)), **IMAGE, **ONCE),
    OpCase("Tensor.unfold, vector", fn=lambda x: x.unfold(0, 3, 2), shape=(9,), shard=0, **FEW),
    OpCase(
        "unfold",
        fn=lambda x: (
            F.unfold(x, 3, padding=1),
            F.unfold(x, (2, 3), stride=(3, 1)),
            F.unfold(x, 2, dilation=(3, 2), padding=2),
        ),
        shape=(2, 4, 9, 6),
        shard=2,
        covers=("unfold",),
        **FEW,
    ),
    OpCase("unfold, unbatched", fn=lambda x: F.unfold(x, 3, padding=(2, 1), stride=2), shape=(3, 9, 6), shard=1, **FEW),
    OpCase("unfold, batch", fn=lambda x: F.unfold(x, 3), shape=(5, 2, 4, 3), shard=0, **FEW),
    OpCase("unfold, columns", fn=lambda x: F.unfold(x, 3), shape=(2, 2, 4, 9), shard=3, gathers=True, **ONCE),
    OpCase("unfold, channels", fn=lambda x: F.unfold(x, 3), shape=(2, 5, 4, 3), shard=1, gathers=True, **ONCE),
    OpCase("unfold, keywords", lambda: nn.Unfold(kernel_size=2, stride=2), (2, 4, 8, 6), 2, **ONCE),
    OpCase("unfold twice", fn=_second(lambda x: F.unfold(x, 3, padding=1)), shape=(1, 2, 7, 4), shard=2, **ONCE),
    OpCase("fold", fn=lambda x: F.fold(x, (9, 6), 3, padding=1), shape=(2, 9, 54), shard=2, gathers=True, **ONCE),
    # ------------------------------------------------------------------ pixels
    OpCase("pixel_shuffle", fn=lambda x: F.pixel_shuffle(x, 2), covers=("pixel_shuffle",), **IMAGE, **FEW),
    OpCase(
        "pixel_shuffle, batch", fn=lambda x: F.pixel_shuffle(x, 2), shape=(5, 8, 3, 2), shard=0, mesh2d=(0, 1), **FEW
    ),
    OpCase(
        "pixel_shuffle, channels", fn=lambda x: F.pixel_shuffle(x, 2), shape=(2, 8, 3, 2), shard=1, mesh2d=(1, 3), **FEW
    ),
    OpCase(
        "pixel_unshuffle",
        fn=lambda x: F.pixel_unshuffle(x, 2),
        shape=(2, 3, 10, 6),
        shard=2,
        mesh2d=(2, 3),
        layouts=("even", "uneven", "empty_first", "empty_last"),
        covers=("pixel_unshuffle",),
        **FEW,
    ),
    OpCase("pixel_unshuffle, unbatched", lambda: nn.PixelUnshuffle(3), (2, 9, 6), 1, **FEW),
    OpCase("PixelShuffle", lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.PixelShuffle(2)), **IMAGE, **FEW),
    OpCase("channel_shuffle", fn=lambda x: F.channel_shuffle(x, 2), covers=("channel_shuffle",), **IMAGE, **ONCE),
    OpCase("pixel_shuffle twice", fn=_second(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2)), **IMAGE, **ONCE),
    # ------------------------------------------------------------------ differences
    OpCase(
        "gradient",
        fn=lambda x: torch.gradient(x, dim=2)[0] + torch.gradient(x, spacing=2.0, dim=(2,))[0],
        covers=("gradient",),
        **IMAGE,
    ),
    OpCase("gradient of all dims", fn=lambda x: torch.gradient(x), shape=(2, 9, 4), shard=1, mesh2d=(1, 2), **FEW),
    OpCase(
        "gradient, steps",
        fn=lambda x: torch.gradient(x, spacing=[2.0, 0.5], dim=(-2, 0)),
        shape=(3, 9, 4),
        shard=1,
        mesh2d=(0, 1),
        **FEW,
    ),
    OpCase(
        "gradient, second order at the ends",
        fn=lambda x: torch.gradient(x, spacing=0.5, dim=1, edge_order=2),
        shape=(2, 9),
        shard=1,
        **FEW,
    ),
    OpCase(
        "gradient, coordinates",
        fn=lambda x: (
            torch.gradient(x, spacing=[_coordinates(9)], dim=1),
            torch.gradient(x, spacing=(_coordinates(9), _coordinates(4)), dim=(1, 2), edge_order=2),
        ),
        shape=(2, 9, 4),
        shard=1,
        mesh2d=(1, 2),
        **FEW,
    ),
    OpCase(
        "gradient, shortest",
        fn=lambda x: (torch.gradient(x, dim=0), torch.gradient(x, dim=1, edge_order=2)),
        shape=(2, 3),
        shard=0,
        **FEW,
    ),
    OpCase(
        "gradient, whole numbers",
        fn=lambda x: torch.gradient(x, dim=0),
        shape=(9, 2),
        shard=0,
        fill=lambda s: torch.randint(-9, 9, s),
        grads=False,
        **ONCE,
    ),
    OpCase(
        "gradient twice", fn=_second(lambda x: torch.gradient(x, dim=0, edge_order=2)[0]), shape=(9, 2), shard=0, **ONCE
    ),
    OpCase("diff", fn=lambda x: (x.diff(dim=2), torch.diff(x, n=2, dim=-2), torch.diff(x)), **IMAGE, **FEW),
]

test_windows = op_test(CASES)

BAD: dict[str, Callable[[Tensor], Any]] = {
    "window longer than the dim": lambda x: x.unfold(2, 10, 1),
    "step 0": lambda x: x.unfold(2, 2, 0),
    "dim out of range": lambda x: x.unfold(4, 2, 1),
    "negative window": lambda x: x.unfold(2, -1, 1),
    "blocks wider than the picture": lambda x: F.unfold(x, 11),
    "blocks of three dims": lambda x: F.unfold(x, (1, 2, 3)),
    "blocks of a matrix": lambda x: F.unfold(x[0, 0], 2),
    "pixels that do not divide": lambda x: F.pixel_shuffle(x, 3),
    "rows that do not divide": lambda x: F.pixel_unshuffle(x, 2),
    "gradient of one point": lambda x: torch.gradient(x[:, :, :1], dim=2),
    "gradient, edge order 3": lambda x: torch.gradient(x, edge_order=3),
    "gradient, steps of another number": lambda x: torch.gradient(x, spacing=[1.0, 2.0], dim=(1, 2, 3)),
    "gradient, a dim twice": lambda x: torch.gradient(x, dim=(2, 2)),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 4, 9, 6), 2)
