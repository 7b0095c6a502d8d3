"""Pooling on cut dims: windows that overlap, miss rows, stick out of the domain; indices count globally."""

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
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.counting import count_collectives
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}


def _second(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """`fn` and its first derivative: a backward through it is a second one."""

    def call(x: Tensor) -> Any:
        out = fn(x)
        return out, torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]

    return call


def _distinct(shape: tuple[int, ...]) -> Tensor:
    n = torch.Size(shape).numel()
    return torch.randperm(n).reshape(shape).double() / n


def _ties(shape: tuple[int, ...]) -> Tensor:
    """Few values, -inf among them: also whole windows of -inf."""
    values = torch.tensor([float("-inf"), float("-inf"), 0.0, 1.0], dtype=torch.float64)
    return values[torch.randint(0, 4, shape)]


def _with_nan(shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.1] = float("nan")
    return x


def _positive(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.1


def _whole_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-9, 10, shape)


MAX: dict[str, Any] = {"shape": (2, 3, 13, 7), "shard": 2, "fill": _distinct}
AVG: dict[str, Any] = {"shape": (2, 3, 13, 7), "shard": 2}
HARD = ("even", "uneven", "tiny", "empty", "empty_first", "empty_last")

CASES = [
    # ------------------------------------------------------------------ maximum
    OpCase("max2d k3 s2 p1", lambda: nn.MaxPool2d(3, 2, 1), mesh2d=(2, 3), layouts=HARD, covers=("max_pool2d",), **MAX),
    OpCase("max2d k2", lambda: nn.MaxPool2d(2), **MAX, **FEW),
    OpCase("max2d k3 s1", lambda: nn.MaxPool2d(3, 1), **MAX, **FEW),
    OpCase("max2d k2 s3", lambda: nn.MaxPool2d(2, 3), **MAX, **FEW),
    OpCase("max2d k4 s2 p2 d2", lambda: nn.MaxPool2d((4, 2), (2, 1), (2, 1), 2), mesh2d=(2, 3), **MAX, **FEW),
    OpCase("max2d ceil", lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), mesh2d=(2, 3), **MAX, **FEW),
    OpCase("max2d ceil, window half outside", lambda: nn.MaxPool2d(4, 4, ceil_mode=True), mesh2d=(2, 3), **MAX, **FEW),
    OpCase(
        "max2d indices",
        lambda: nn.MaxPool2d(3, 2, 1, return_indices=True),
        mesh2d=(2, 3),
        covers=("max_pool2d_with_indices",),
        layouts=HARD,
        **MAX,
        **FEW,
    ),
    OpCase(
        "max2d indices, spellings",
        fn=lambda x: (
            F.max_pool2d_with_indices(x, 2, return_indices=True)[1],
            F.max_pool2d(x, 2, 3, 1, 1, True, True),
            torch._C._nn.max_pool2d_with_indices(x, [2, 2]),
        ),
        mesh2d=(3, 2),
        **MAX,
        **ONCE,
    ),
    OpCase(
        "max2d indices, dilation, ceil",
        fn=lambda x: F.max_pool2d(x, 3, 2, 1, 2, ceil_mode=True, return_indices=True),
        mesh2d=(2, 3),
        **MAX,
        **FEW,
    ),
    OpCase(
        "max2d ties and -inf",
        fn=lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[1],
        shape=(2, 3, 13, 7),
        shard=2,
        fill=_ties,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "max2d values of ties and -inf",
        fn=lambda x: F.max_pool2d(x, 3, 1, 1).nan_to_num(neginf=-5.0),
        shape=(1, 2, 9, 5),
        shard=2,
        fill=_ties,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "max2d gradient of -inf windows",
        fn=lambda x: F.max_pool2d(x, 3, 1, 1),
        shape=(1, 2, 9, 5),
        shard=2,
        fill=lambda s: torch.full(s, float("-inf"), dtype=torch.float64),
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "max2d gradient of -inf windows, dilation",
        fn=lambda x: F.max_pool2d(x, 3, 2, 1, 2, True),
        shape=(1, 2, 9, 7),
        shard=2,
        fill=lambda s: torch.full(s, float("-inf"), dtype=torch.float64),
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "max2d nan",
        fn=lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        shape=(2, 3, 13, 7),
        shard=2,
        fill=_with_nan,
        grads=False,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "max2d whole numbers",
        fn=lambda x: F.max_pool2d(x, 3, 2, 1),
        shape=(2, 3, 13, 7),
        shard=2,
        fill=_whole_numbers,
        grads=False,
        **FEW,
    ),
    OpCase(
        "max2d unbatched",
        lambda: nn.MaxPool2d(3, 2, 1, return_indices=True),
        (3, 13, 7),
        1,
        fill=_distinct,
        mesh2d=(1, 2),
        **FEW,
    ),
    OpCase("max2d batch", lambda: nn.MaxPool2d(3, 2, 1), (5, 3, 6, 7), 0, fill=_distinct, **FEW),
    OpCase(
        "max2d channels",
        lambda: nn.MaxPool2d(3, 2, 1, return_indices=True),
        (2, 5, 6, 7),
        1,
        fill=_distinct,
        mesh2d=(1, 2),
        **FEW,
    ),
    OpCase(
        "max2d columns", lambda: nn.MaxPool2d(3, 2, 1, return_indices=True), (2, 2, 6, 11), -1, fill=_distinct, **FEW
    ),
    OpCase("max2d no samples", lambda: nn.MaxPool2d(3, 2, 1), (0, 3, 9, 7), 2, **ONCE),
    OpCase(
        "max2d keywords",
        fn=lambda x: torch.max_pool2d(input=x, kernel_size=3, stride=[], padding=1, ceil_mode=True),
        **MAX,
        **FEW,
    ),
    OpCase(
        "max2d twice",
        fn=_second(lambda x: F.max_pool2d(x, 3, 2, 1)),
        shape=(1, 2, 9, 5),
        shard=2,
        fill=_distinct,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase("max1d", lambda: nn.MaxPool1d(3, 2, 1), (2, 3, 13), 2, fill=_distinct, covers=("max_pool1d",), **FEW),
    OpCase(
        "max1d indices",
        fn=lambda x: (F.max_pool1d(x, 3, 2, 1, return_indices=True), torch.max_pool1d_with_indices(x, 2)),
        shape=(2, 3, 13),
        shard=2,
        fill=_distinct,
        covers=("max_pool1d_with_indices",),
        **FEW,
    ),
    OpCase("max1d unbatched", lambda: nn.MaxPool1d(3, 2, 1, ceil_mode=True), (3, 13), 1, fill=_distinct, **FEW),
    OpCase(
        "max1d twice", fn=_second(lambda x: F.max_pool1d(x, 3, 2, 1)), shape=(2, 9), shard=1, fill=_distinct, **ONCE
    ),
    OpCase(
        "max3d",
        lambda: nn.MaxPool3d(3, 2, 1),
        (1, 2, 9, 5, 6),
        2,
        fill=_distinct,
        mesh2d=(2, 4),
        covers=("max_pool3d",),
        **FEW,
    ),
    OpCase(
        "max3d indices",
        lambda: nn.MaxPool3d(3, 2, 1, return_indices=True),
        (1, 2, 9, 5, 6),
        3,
        fill=_distinct,
        mesh2d=(2, 4),
        covers=("max_pool3d_with_indices",),
        **FEW,
    ),
    # ------------------------------------------------------------------ average
    OpCase("avg2d k3 s2 p1", lambda: nn.AvgPool2d(3, 2, 1), mesh2d=(2, 3), layouts=HARD, covers=("avg_pool",), **AVG),
    OpCase("avg2d k2", lambda: nn.AvgPool2d(2), **AVG, **FEW),
    OpCase("avg2d k2 s3", lambda: nn.AvgPool2d(2, 3), **AVG, **FEW),
    OpCase(
        "avg2d not counting padding",
        lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        mesh2d=(2, 3),
        **AVG,
        **FEW,
    ),
    OpCase("avg2d ceil", lambda: nn.AvgPool2d(4, 3, 2, ceil_mode=True), mesh2d=(2, 3), **AVG, **FEW),
    OpCase("avg2d ceil, not counting padding", lambda: nn.AvgPool2d(4, 3, 2, True, False), mesh2d=(2, 3), **AVG, **FEW),
    OpCase(
        "avg2d divisor", lambda: nn.AvgPool2d((3, 2), (1, 2), (1, 0), divisor_override=5), mesh2d=(2, 3), **AVG, **FEW
    ),
    OpCase("avg2d unbatched", lambda: nn.AvgPool2d(3, 2, 1), (3, 13, 7), 1, **FEW),
    OpCase("avg2d batch", lambda: nn.AvgPool2d(3, 2, 1), (5, 3, 6, 7), 0, **FEW),
    OpCase("avg2d channels", lambda: nn.AvgPool2d(3, 2, 1), (2, 5, 6, 7), 1, **FEW),
    OpCase("avg2d no samples", lambda: nn.AvgPool2d(3, 2, 1), (0, 3, 9, 7), 2, **ONCE),
    OpCase(
        "avg2d whole numbers",
        fn=lambda x: (
            F.avg_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1, False, False),
            F.avg_pool2d(x, 2, 2, 0, divisor_override=3),
        ),
        shape=(2, 3, 13, 7),
        shard=2,
        fill=_whole_numbers,
        grads=False,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "avg2d keywords",
        fn=lambda x: F.avg_pool2d(input=x, kernel_size=[3], stride=(), padding=1, ceil_mode=True),
        **AVG,
        **FEW,
    ),
    OpCase("avg2d twice", fn=_second(lambda x: F.avg_pool2d(x, 3, 2, 1)), shape=(1, 2, 9, 5), shard=2, **FEW),
    OpCase("avg1d", lambda: nn.AvgPool1d(4, 3, 2, True), (2, 3, 13), 2, **FEW),
    OpCase("avg1d not counting padding", lambda: nn.AvgPool1d(4, 2, 2, count_include_pad=False), (3, 13), 1, **FEW),
    OpCase("avg3d", lambda: nn.AvgPool3d(3, 2, 1), (1, 2, 9, 5, 6), 2, mesh2d=(2, 4), **FEW),
    OpCase(
        "avg3d ceil, divisor", lambda: nn.AvgPool3d((3, 2, 2), 2, (1, 0, 1), True, False, 7), (1, 2, 9, 5, 6), 3, **FEW
    ),
    # ------------------------------------------------------------------ power mean
    OpCase("lp1d", lambda: nn.LPPool1d(2, 3, 2), (2, 3, 13), 2, fill=_positive, covers=("lp_pool",), **FEW),
    OpCase(
        "lp2d",
        lambda: nn.LPPool2d(3, (3, 2), 1, ceil_mode=True),
        (2, 3, 13, 7),
        2,
        fill=_positive,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase("lp3d", lambda: nn.LPPool3d(1.5, 2), (1, 2, 9, 5, 6), 2, fill=_positive, **FEW),
    # ------------------------------------------------------------------ adaptive
    OpCase(
        "adaptive avg2d to 1", lambda: nn.AdaptiveAvgPool2d(1), mesh2d=(2, 3), covers=("adaptive_avg_pool2d",), **AVG
    ),
    OpCase("adaptive avg2d to 5x3", lambda: nn.AdaptiveAvgPool2d((5, 3)), mesh2d=(2, 3), layouts=HARD, **AVG, **FEW),
    OpCase("adaptive avg2d larger", lambda: nn.AdaptiveAvgPool2d((17, None)), mesh2d=(2, 3), **AVG, **FEW),
    OpCase("adaptive avg2d to 2x1", lambda: nn.AdaptiveAvgPool2d((2, 1)), mesh2d=(2, 3), **AVG, **FEW),
    OpCase("adaptive avg2d unbatched", lambda: nn.AdaptiveAvgPool2d((4, 1)), (3, 13, 7), 1, **FEW),
    OpCase("adaptive avg2d batch", lambda: nn.AdaptiveAvgPool2d(1), (5, 3, 6, 7), 0, **FEW),
    OpCase("adaptive avg2d channels", lambda: nn.AdaptiveAvgPool2d(2), (2, 5, 6, 7), 1, **FEW),
    OpCase("adaptive avg2d no samples", lambda: nn.AdaptiveAvgPool2d(2), (0, 5, 6, 7), 2, **ONCE),
    OpCase(
        "adaptive avg2d twice",
        fn=_second(lambda x: F.adaptive_avg_pool2d(x, (4, 1))),
        shape=(1, 2, 9, 5),
        shard=2,
        **ONCE,
    ),
    OpCase("adaptive avg1d", lambda: nn.AdaptiveAvgPool1d(5), (2, 3, 13), 2, covers=("adaptive_avg_pool1d",), **FEW),
    OpCase("adaptive avg1d to 1", lambda: nn.AdaptiveAvgPool1d(1), (3, 13), 1, **FEW),
    OpCase(
        "adaptive avg3d",
        lambda: nn.AdaptiveAvgPool3d((4, 1, 5)),
        (1, 2, 9, 5, 6),
        2,
        mesh2d=(2, 3),
        covers=("adaptive_avg_pool3d",),
        **FEW,
    ),
    OpCase(
        "adaptive max2d to 1", lambda: nn.AdaptiveMaxPool2d(1), mesh2d=(2, 3), covers=("adaptive_max_pool2d",), **MAX
    ),
    OpCase("adaptive max2d to 5x3", lambda: nn.AdaptiveMaxPool2d((5, 3)), mesh2d=(2, 3), layouts=HARD, **MAX, **FEW),
    OpCase(
        "adaptive max2d ties",
        fn=lambda x: F.adaptive_max_pool2d(x, (3, 2)),
        shape=(2, 3, 13, 7),
        shard=2,
        mesh2d=(2, 3),
        fill=lambda s: torch.randint(0, 2, s).double(),
        **FEW,
    ),
    OpCase(
        "adaptive max2d nan",
        fn=lambda x: F.adaptive_max_pool2d(x, (3, 2)),
        shape=(2, 3, 13, 7),
        shard=2,
        fill=_with_nan,
        grads=False,
        mesh2d=(2, 3),
        **ONCE,
    ),
    OpCase(
        "adaptive max2d indices",
        lambda: nn.AdaptiveMaxPool2d((4, 3), return_indices=True),
        mesh2d=(2, 3),
        layouts=HARD,
        covers=("adaptive_max_pool2d_with_indices",),
        **MAX,
        **FEW,
    ),
    OpCase(
        "adaptive max2d indices, ties",
        fn=lambda x: (
            F.adaptive_max_pool2d(x, (5, 3), True),
            torch.nn.functional.adaptive_max_pool2d(x, (17, 2), True),
        ),
        shape=(2, 3, 13, 7),
        shard=2,
        mesh2d=(2, 3),
        fill=lambda s: torch.randint(0, 2, s).double(),
        **FEW,
    ),
    OpCase(
        "adaptive max2d indices, unbatched",
        fn=lambda x: F.adaptive_max_pool2d(x, (4, None), True),
        shape=(3, 13, 7),
        shard=1,
        fill=_distinct,
        **FEW,
    ),
    OpCase(
        "adaptive max2d indices, batch",
        fn=lambda x: F.adaptive_max_pool2d(x, 2, True),
        shape=(5, 3, 6, 7),
        shard=0,
        fill=_distinct,
        mesh2d=(0, 2),
        **FEW,
    ),
    OpCase("adaptive max2d indices, to 1", fn=lambda x: F.adaptive_max_pool2d(x, 1, True), gathers=True, **MAX, **ONCE),
    OpCase(
        "adaptive max1d indices",
        fn=lambda x: (F.adaptive_max_pool1d(x, 5, True), torch.adaptive_max_pool1d(x, 4)),
        shape=(2, 3, 13),
        shard=2,
        fill=_distinct,
        covers=("adaptive_max_pool1d_with_indices",),
        **FEW,
    ),
    OpCase(
        "adaptive max3d indices",
        fn=lambda x: F.adaptive_max_pool3d(x, (4, 2, 5), True),
        shape=(1, 2, 9, 5, 6),
        shard=2,
        fill=_distinct,
        mesh2d=(2, 4),
        covers=("adaptive_max_pool3d_with_indices",),
        **FEW,
    ),
    OpCase(
        "adaptive max1d",
        lambda: nn.AdaptiveMaxPool1d(5),
        (2, 3, 13),
        2,
        fill=_distinct,
        covers=("adaptive_max_pool1d",),
        **FEW,
    ),
    OpCase(
        "adaptive max3d",
        lambda: nn.AdaptiveMaxPool3d((4, 2, 5)),
        (1, 2, 9, 5, 6),
        2,
        fill=_distinct,
        mesh2d=(2, 4),
        covers=("adaptive_max_pool3d",),
        **FEW,
    ),
    # ------------------------------------------------------------------ by gathering
    OpCase(
        "max_unpool2d",
        fn=lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[2:]),
        gathers=True,
        covers=("max_unpool",),
        **MAX,
        **FEW,
    ),
    OpCase(
        "max_unpool1d and 3d",
        fn=lambda x: (
            F.max_unpool1d(*F.max_pool1d(x[0], 2, return_indices=True), 2),
            F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2),
        ),
        shape=(2, 4, 8, 6),
        shard=2,
        fill=_distinct,
        gathers=True,
        **ONCE,
    ),
    OpCase(
        "fractional_max_pool2d",
        fn=lambda x: F.fractional_max_pool2d(
            x, 2, output_size=(5, 3), _random_samples=torch.full((2, 3, 2), 0.4, dtype=x.dtype)
        ),
        gathers=True,
        **MAX,
        **ONCE,
    ),
]

test_pooling = op_test(CASES)


@distributed(ranks=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.randn(1, 3, 9, 6)
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2

    def pools(x: Tensor) -> Any:
        return (
            F.max_pool2d(x, 3, 2, 1),
            F.avg_pool2d(x, 3, 2, 1),
            F.adaptive_avg_pool2d(x, 1),
            F.adaptive_max_pool2d(x, (3, 2)),
        )

    assert_parity(pools, x, 2, (6, 3), dtype=dtype, rtol=tolerance, atol=tolerance, strict=True)


@distributed(ranks=2)
def test_average_of_large_halves_does_not_overflow():
    x = torch.full((1, 1, 8, 4), 30000.0, dtype=torch.float16)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    for pool in (
        lambda t: F.avg_pool2d(t, 4),
        lambda t: F.adaptive_avg_pool2d(t, 1),
        lambda t: F.avg_pool2d(t, 4, 2, 2),
    ):
        torch.testing.assert_close(pool(sharded).full_tensor(), pool(x))


@distributed(ranks=2)
def test_channels_last_is_kept():
    x = torch.randn(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    cut = plan_cut(x.shape, (2,), 2, (4, 5))
    assert cut is not None
    for pool in (nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1)):
        out = pool(cut_tensor(x, domain_mesh(), cut))
        assert out.stride() == pool(x).stride()
        assert out.to_local().is_contiguous(memory_format=torch.channels_last)


@distributed(ranks=2)
def test_communication():
    x = torch.randn(2, 3, 12, 6, dtype=torch.float64)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    with count_collectives() as comm:
        F.max_pool2d(sharded, 2)
        F.max_pool2d(sharded, 3, return_indices=True)
        F.avg_pool2d(sharded, 3)
        F.avg_pool2d(sharded, 2, padding=(0, 1), count_include_pad=False)
        F.adaptive_avg_pool2d(sharded, 6)
    assert comm.calls == 0
    with count_traffic() as traffic:
        F.max_pool2d(sharded, 3, 1, 1)
    assert (traffic.calls, traffic.nbytes) == (1, 2 * 3 * 6 * 8)
    with count_traffic() as traffic:
        F.adaptive_avg_pool2d(sharded, 1)
    assert traffic.nbytes <= 2 * 3 * 6 * 8  # one number per channel, or one row: never the shard


BAD: dict[str, Callable[[Tensor], Any]] = {
    "kernel wider than the domain": lambda x: F.max_pool2d(x, 10),
    "padding more than half the kernel": lambda x: F.max_pool2d(x, 3, 1, 2),
    "average, kernel wider than the domain": lambda x: F.avg_pool2d(x, 10),
    "average, padding too large": lambda x: F.avg_pool2d(x, 3, 1, 2),
    "average, divisor 0": lambda x: F.avg_pool2d(x, 3, divisor_override=0),
    "kernel 0": lambda x: F.max_pool2d(x, 0),
    "stride 0": lambda x: F.max_pool2d(x, 2, 0),
    "average, stride 0": lambda x: F.avg_pool2d(x, 2, 0),
    "dilation 0": lambda x: F.max_pool2d(x, 2, dilation=0),
    "too few dims": lambda x: F.max_pool2d(x[0, 0], 2),
    "average, too few dims": lambda x: F.avg_pool2d(x[0, 0], 2),
    "kernel of another length": lambda x: F.max_pool2d(x, (2, 2, 2)),
    "adaptive to a negative size": lambda x: F.adaptive_avg_pool2d(x, -1),
    "adaptive, too few dims": lambda x: F.adaptive_max_pool2d(x[0, 0], 2),
    "adaptive, sizes of another length": lambda x: F.adaptive_avg_pool2d(x, (1, 2, 3)),
    "power mean, kernel wider than the domain": lambda x: F.lp_pool2d(x, 2.0, 10),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2)
