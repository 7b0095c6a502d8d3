"""`F.interpolate` and `nn.Upsample` on cut dims: every mode, by sizes and by factors that hit no border."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import Shard, scatter_tensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_same_error, op_test
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}
IMAGE: dict[str, Any] = {"shape": (2, 3, 9, 6), "shard": 2, "mesh2d": (2, 3)}
HARD = ("even", "uneven", "tiny", "empty", "empty_first", "empty_last")


def _to(*sizes: Any, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: tuple(F.interpolate(x, size=size, **options) for size in sizes)


def _by(*factors: Any, **options: Any) -> Callable[[Tensor], Any]:
    return lambda x: tuple(F.interpolate(x, scale_factor=factor, **options) for factor in factors)


def _second(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """`fn` and its first derivative: a backward through it is a second one."""

    def call(x: Tensor) -> Any:
        out = fn(x)
        return out, torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)[0]

    return call


def _bytes(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


SIZES = (13, 6), (5, 17), (18, 6), 9, (1, 1), (40, 3)
FACTORS = 2, 1.7, 0.4, (3, 0.5), (2.0, 1.3), (1, 4), 5.0

CASES = [
    OpCase("nearest to sizes", fn=_to(*SIZES), layouts=HARD, covers=("interpolate",), **IMAGE),
    OpCase("nearest by factors", fn=_by(*FACTORS), layouts=HARD, **IMAGE, **FEW),
    OpCase("nearest by recomputed factors", fn=_by(1.7, (0.4, 2.3), recompute_scale_factor=True), **IMAGE, **FEW),
    OpCase(
        "nearest-exact",
        fn=lambda x: (_to(*SIZES, mode="nearest-exact")(x), _by(*FACTORS, mode="nearest-exact")(x)),
        **IMAGE,
        **FEW,
    ),
    OpCase("bilinear to sizes", fn=_to(*SIZES, mode="bilinear"), layouts=HARD, **IMAGE, **FEW),
    OpCase("bilinear by factors", fn=_by(*FACTORS, mode="bilinear"), layouts=HARD, **IMAGE, **FEW),
    OpCase(
        "bilinear by recomputed factors",
        fn=_by(1.7, (0.4, 2.3), mode="bilinear", recompute_scale_factor=True),
        **IMAGE,
        **FEW,
    ),
    OpCase(
        "bilinear, corners aligned",
        fn=lambda x: (
            _to(*SIZES, mode="bilinear", align_corners=True)(x),
            _by(*FACTORS, mode="bilinear", align_corners=True)(x),
        ),
        **IMAGE,
        **FEW,
    ),
    OpCase(
        "bilinear, antialias",
        fn=lambda x: (
            _to(*SIZES, mode="bilinear", antialias=True)(x),
            _by(*FACTORS, mode="bilinear", antialias=True)(x),
        ),
        **IMAGE,
        **FEW,
    ),
    OpCase("bicubic to sizes", fn=_to(*SIZES, mode="bicubic"), **IMAGE, **FEW),
    OpCase("bicubic by factors", fn=_by(*FACTORS, mode="bicubic"), **IMAGE, **FEW),
    OpCase("bicubic, corners aligned", fn=_to((13, 6), (5, 17), mode="bicubic", align_corners=True), **IMAGE, **FEW),
    OpCase(
        "bicubic, antialias",
        fn=lambda x: (
            _to((13, 6), (4, 3), mode="bicubic", antialias=True)(x),
            _by(0.4, mode="bicubic", antialias=True)(x),
        ),
        **IMAGE,
        **FEW,
    ),
    OpCase("area", fn=lambda x: (_to(*SIZES, mode="area")(x), _by(0.5, 1.7, mode="area")(x)), **IMAGE, **FEW),
    OpCase(
        "linear",
        fn=lambda x: (_to(13, 4, 1, mode="linear")(x), _by(2, 0.7, mode="linear", align_corners=True)(x)),
        shape=(2, 3, 9),
        shard=2,
        **FEW,
    ),
    OpCase(
        "1-D nearest and area",
        fn=lambda x: (_to(13, 4)(x), _by(2, 0.7)(x), _to(4, mode="area")(x)),
        shape=(2, 3, 9),
        shard=2,
        **FEW,
    ),
    OpCase(
        "trilinear",
        fn=lambda x: (_to((9, 4, 10), mode="trilinear")(x), _by(2, (1.5, 1, 0.5), mode="trilinear")(x)),
        shape=(1, 2, 7, 4, 5),
        shard=2,
        mesh2d=(2, 4),
        **FEW,
    ),
    OpCase(
        "trilinear, corners aligned",
        fn=_to((9, 4, 10), mode="trilinear", align_corners=True),
        shape=(1, 2, 7, 4, 5),
        shard=3,
        mesh2d=(3, 4),
        **FEW,
    ),
    OpCase(
        "3-D nearest and area",
        fn=lambda x: (_to((9, 4, 10))(x), _by(2)(x), _to((3, 2, 4), mode="area")(x)),
        shape=(1, 2, 7, 4, 5),
        shard=2,
        **FEW,
    ),
    OpCase(
        "batch",
        fn=lambda x: (_by(2, 1.5, mode="bilinear")(x), _to((3, 7))(x)),
        shape=(5, 2, 4, 3),
        shard=0,
        mesh2d=(0, 2),
        **FEW,
    ),
    OpCase(
        "channels",
        fn=lambda x: (_by(2, 1.5, mode="bilinear")(x), _to((3, 7))(x)),
        shape=(2, 5, 4, 3),
        shard=1,
        mesh2d=(1, 3),
        **FEW,
    ),
    OpCase("no samples", fn=_by(2), shape=(0, 3, 9, 6), shard=2, **ONCE),
    OpCase(
        "keywords",
        fn=lambda x: F.interpolate(input=x, size=[12, 7], mode="bilinear", align_corners=False),
        **IMAGE,
        **ONCE,
    ),
    OpCase("twice", fn=_second(lambda x: F.interpolate(x, size=(13, 7), mode="bilinear")), **IMAGE, **ONCE),
    OpCase("twice, by two", fn=_second(lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")), **IMAGE, **ONCE),
    OpCase("bytes, nearest", fn=_by(2, 1.5), fill=_bytes, grads=False, **IMAGE, **ONCE),
    OpCase("bytes, bilinear", fn=_by(2, 1.5, mode="bilinear"), fill=_bytes, grads=False, gathers=True, **IMAGE, **ONCE),
    OpCase(
        "Upsample",
        lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=(7, 5))),
        **IMAGE,
        **FEW,
    ),
    OpCase("UpsamplingBilinear2d", lambda: nn.UpsamplingBilinear2d(scale_factor=2), **IMAGE, **ONCE),
    OpCase("UpsamplingNearest2d", lambda: nn.UpsamplingNearest2d(size=(20, 6)), **IMAGE, **ONCE),
]

test_interpolate = op_test(CASES)


@distributed(ranks=2)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(mode: str, dtype: torch.dtype):
    torch.manual_seed(0)
    fn = lambda x: [F.interpolate(x, scale_factor=2, mode=mode), F.interpolate(x, size=(13, 7), mode=mode)]  # noqa: E731
    grads = dtype is torch.float32
    tolerance: dict[str, Any] = {} if grads else {"rtol": 1e-2, "atol": 1e-2}
    assert_parity(fn, torch.randn(1, 2, 9, 6), 2, (3, 6), dtype=dtype, grads=grads, strict=True, **tolerance)


@distributed(ranks=2)
@pytest.mark.parametrize("scale", [2.0, 3.0, 1.3, 41.0])
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear"])
def test_coordinates_far_from_the_origin(mode: str, scale: float):
    """torch's float coordinates lose digits as they grow; a shard that counts from its own start would not."""
    x = torch.arange(300.0).sin().abs().view(1, 1, -1, 1)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    expected = F.interpolate(x, scale_factor=(scale, 1.0), mode=mode)
    found = F.interpolate(sharded, scale_factor=(scale, 1.0), mode=mode).full_tensor()
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if "nearest" in mode else 2e-7)
    if "nearest" in mode:
        for dtype in (torch.float64, torch.bfloat16, torch.uint8):
            expected = F.interpolate((x * 9).to(dtype), scale_factor=(scale, 1.0), mode=mode)
            found = F.interpolate((sharded * 9).to(dtype), scale_factor=(scale, 1.0), mode=mode).full_tensor()
            assert torch.equal(found, expected)


@distributed(ranks=2)
def test_communication():
    x = scatter_tensor(torch.randn(2, 3, 12, 6, dtype=torch.float64), 0, domain_mesh(), [Shard(2)])
    row = 2 * 3 * 6 * 8
    with count_traffic() as traffic:
        F.interpolate(x, scale_factor=2)
        F.interpolate(x, scale_factor=0.5)
        F.interpolate(x, size=(6, 3), mode="area")
        F.interpolate(x, scale_factor=(1, 2), mode="nearest-exact")
    assert (traffic.calls, traffic.nbytes) == (0, 0)
    for options, rows in (({"mode": "bilinear"}, 1), ({"mode": "bicubic"}, 2)):
        with count_traffic() as traffic:
            F.interpolate(x, scale_factor=2, **options)
        assert (traffic.calls, traffic.nbytes) == (1, rows * row)


@distributed(ranks=2)
def test_channels_last_is_kept():
    x = torch.randn(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)]).contiguous(memory_format=torch.channels_last)
    assert (
        F.interpolate(sharded, scale_factor=2, mode="bilinear").stride()
        == F.interpolate(x, scale_factor=2, mode="bilinear").stride()
    )


BAD: dict[str, Callable[[Tensor], Any]] = {
    "neither size nor factor": lambda x: F.interpolate(x),
    "both": lambda x: F.interpolate(x, size=4, scale_factor=2),
    "mode of another rank": lambda x: F.interpolate(x, size=(4, 4), mode="trilinear"),
    "unknown mode": lambda x: F.interpolate(x, size=(4, 4), mode="cubic"),
    "sizes of another length": lambda x: F.interpolate(x, size=(4, 4, 4)),
    "aligned corners of nearest": lambda x: F.interpolate(x, scale_factor=2, align_corners=True),
    "empty output": lambda x: F.interpolate(x, scale_factor=0.05),
    "negative size": lambda x: F.interpolate(x, size=(-1, 4)),
    "antialias of nearest": lambda x: F.interpolate(x, size=(4, 4), antialias=True),
    "recomputed without factor": lambda x: F.interpolate(x, size=(4, 4), recompute_scale_factor=True),
    "whole numbers": lambda x: F.interpolate(x.long(), scale_factor=2, mode="bilinear"),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2)
