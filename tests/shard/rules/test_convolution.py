"""Convolution and transposed convolution: any window, any shards, halos over several ranks, two and three cut dims."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.shard import Shard, ShardTensor, scatter_tensor, strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_same_error, op_test, with_derivatives
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.counting import count_collectives
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}


def _whole_numbers(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-4, 5, shape)


def _conv2d(**options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b: F.conv2d(x, w, b, **options)


def _up2d(**options: Any) -> Callable[..., Tensor]:
    return lambda x, w, b: F.conv_transpose2d(x, w, b, **options)


W3, B5 = (5, 3, 3, 3), (5,)
UP3, B4 = (3, 4, 3, 3), (4,)

CASES = [
    OpCase(
        "conv2d k3 p1",
        lambda: nn.Conv2d(3, 5, 3, padding=1),
        (2, 3, 9, 7),
        2,
        mesh2d=(2, 3),
        layouts=("even", "uneven", "tiny", "empty", "empty_first", "empty_last"),
        covers=("conv",),
    ),
    OpCase("conv2d k4 s2 p1, no bias", lambda: nn.Conv2d(3, 4, 4, 2, 1, bias=False), (2, 3, 11, 8), 2, mesh2d=(3, 2)),
    OpCase("conv2d k7 s2 p3", lambda: nn.Conv2d(3, 4, 7, 2, 3), (1, 3, 13, 8), 2, mesh2d=(2, 3), **FEW),
    OpCase(
        "conv2d halo over all ranks", lambda: nn.Conv2d(2, 3, (9, 1), padding=(4, 0)), (1, 2, 9, 4), 2, subgroups=False
    ),
    OpCase(
        "conv2d corners of two cuts",
        lambda: nn.Conv2d(2, 3, 5, padding=2),
        (1, 2, 5, 6),
        2,
        mesh2d=(2, 3),
        ranks=(),
        subgroups=False,
    ),
    OpCase(
        "conv2d batch and rows",
        lambda: nn.Conv2d(2, 3, 3, padding=1),
        (3, 2, 7, 4),
        2,
        mesh2d=(0, 2),
        ranks=(),
        subgroups=False,
    ),
    OpCase(
        "conv2d channels and rows",
        lambda: nn.Conv2d(3, 3, 3, padding=1),
        (2, 3, 7, 4),
        2,
        mesh2d=(1, 2),
        ranks=(),
        subgroups=False,
    ),
    OpCase(
        "conv2d batch and channels",
        lambda: nn.Conv2d(3, 3, 3, padding=1),
        (2, 3, 7, 4),
        2,
        mesh2d=(0, 1),
        ranks=(),
        subgroups=False,
    ),
    OpCase(
        "conv2d same",
        lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=2),
        (2, 3, 11, 6),
        2,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase("conv2d valid", lambda: nn.Conv2d(3, 4, 3, padding="valid"), (2, 3, 9, 6), 2, **FEW),
    OpCase(
        "conv2d groups, dilation", lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2, groups=2), (1, 4, 9, 5), 2, **FEW
    ),
    OpCase("conv2d depthwise", lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4), (1, 4, 9, 5), 2, mesh2d=(2, 3), **FEW),
    OpCase(
        "conv2d depthwise separable 7x7",
        lambda: nn.Sequential(nn.Conv2d(3, 3, 7, padding=3, groups=3), nn.Conv2d(3, 4, 1)),
        (1, 3, 9, 8),
        2,
        **FEW,
    ),
    OpCase("conv2d k1", lambda: nn.Conv2d(3, 4, 1), (2, 3, 9, 4), 2, **FEW),
    OpCase("conv2d k1 s2 p1", lambda: nn.Conv2d(3, 4, 1, 2, 1), (2, 3, 9, 4), 2, **FEW),
    OpCase("conv2d k2 s3", lambda: nn.Conv2d(3, 4, 2, 3), (2, 3, 10, 8), 2, **FEW),
    OpCase("conv2d patches", lambda: nn.Conv2d(3, 4, 4, 4), (2, 3, 16, 8), 2, **FEW),
    OpCase("conv2d unbatched", lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 9, 5), 1, mesh2d=(1, 2), **FEW),
    OpCase("conv2d unbatched channels", lambda: nn.Conv2d(5, 4, 3, padding=1), (5, 4, 5), 0, **FEW),
    OpCase("conv2d columns", lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 4, 9), -1, **FEW),
    OpCase("conv2d batch", lambda: nn.Conv2d(3, 4, 3, 2, 1), (5, 3, 6, 5), 0, **FEW),
    OpCase("conv2d channels", lambda: nn.Conv2d(6, 4, 3, padding=1), (2, 6, 4, 5), 1, **FEW),
    OpCase(
        "conv2d circular rows",
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        (1, 2, 9, 5),
        2,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "conv2d reflect",
        lambda: nn.Conv2d(2, 3, 5, padding=2, padding_mode="reflect"),
        (1, 2, 9, 5),
        2,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "conv2d replicate",
        lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="replicate"),
        (1, 2, 9, 5),
        2,
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "conv2d sharded weight",
        fn=lambda x, w: F.conv2d(x, w, padding=1),
        shape=[(2, 3, 9, 5), (4, 3, 3, 3)],
        shard=[2, 0],
        **FEW,
    ),
    OpCase(
        "conv2d keywords",
        fn=lambda x, w, b: torch.conv2d(input=x, weight=w, bias=b, stride=[2, 1], padding=[1, 0]),
        shape=(2, 3, 9, 5),
        shard=2,
        plain=[W3, B5],
        **FEW,
    ),
    OpCase(
        "conv2d plain input",
        fn=lambda w, x: F.conv2d(x, w),
        shape=W3,
        shard=0,
        plain=[(2, 3, 6, 5)],
        gathers=True,
        **FEW,
    ),
    OpCase("conv2d no samples", lambda: nn.Conv2d(3, 4, 3, padding=1), (0, 3, 9, 5), 2, **FEW),
    OpCase(
        "conv2d whole numbers",
        fn=lambda x, w: F.conv2d(x, w, padding=1),
        shape=(2, 3, 9, 5),
        shard=2,
        plain=[(4, 3, 3, 3)],
        fill=_whole_numbers,
        grads=False,
        **FEW,
    ),
    OpCase(
        "conv2d complex",
        fn=lambda x, w: F.conv2d(x, w, padding=1),
        shape=(2, 3, 9, 5),
        shard=2,
        plain=[(4, 3, 3, 3)],
        fill=lambda shape: torch.randn(shape, dtype=torch.complex128),
        **ONCE,
    ),
    OpCase(
        "conv2d twice",
        fn=with_derivatives(_conv2d(padding=1)),
        shape=(1, 3, 9, 4),
        shard=2,
        plain=[W3, B5],
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase(
        "conv2d twice, strided",
        fn=with_derivatives(_conv2d(stride=2, padding=2)),
        shape=(1, 3, 9, 5),
        shard=2,
        plain=[W3, B5],
        **ONCE,
    ),
    OpCase("conv1d", lambda: nn.Conv1d(3, 4, 5, 2, 2), (2, 3, 13), 2, **FEW),
    OpCase("conv1d unbatched", lambda: nn.Conv1d(3, 4, 4, padding="same"), (3, 11), 1, **FEW),
    OpCase("conv3d", lambda: nn.Conv3d(2, 3, 3, padding=1), (1, 2, 7, 4, 5), 2, mesh2d=(2, 4), **FEW),
    OpCase(
        "conv3d strided",
        lambda: nn.Conv3d(2, 3, (3, 2, 3), (2, 2, 1), (1, 0, 1)),
        (1, 2, 9, 4, 5),
        2,
        mesh2d=(3, 4),
        **FEW,
    ),
    OpCase("conv3d unbatched", lambda: nn.Conv3d(2, 3, 3, padding=1), (2, 4, 7, 4), 2, **ONCE),
    # ------------------------------------------------------------------ transposed
    OpCase(
        "up2d k2 s2", lambda: nn.ConvTranspose2d(3, 4, 2, 2), (2, 3, 9, 5), 2, mesh2d=(2, 3), covers=("conv_transpose",)
    ),
    OpCase(
        "up2d k3 s2 p1 op1",
        lambda: nn.ConvTranspose2d(3, 4, 3, 2, 1, 1),
        (2, 3, 9, 5),
        2,
        mesh2d=(2, 3),
        layouts=("even", "uneven", "tiny", "empty", "empty_first", "empty_last"),
        **FEW,
    ),
    OpCase("up2d k4 s2 p1", lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1, bias=False), (2, 3, 9, 5), 2, **FEW),
    OpCase("up2d k1 s3 op2", lambda: nn.ConvTranspose2d(3, 4, 1, 3, 0, 2), (1, 3, 7, 4), 2, **FEW),
    OpCase("up2d k5 s1 p2", lambda: nn.ConvTranspose2d(3, 4, 5, 1, 2), (1, 3, 7, 4), 2, **FEW),
    OpCase(
        "up2d groups, dilation",
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2, dilation=2),
        (1, 4, 9, 5),
        2,
        **FEW,
    ),
    OpCase("up2d batch", lambda: nn.ConvTranspose2d(3, 4, 3, 2), (5, 3, 4, 3), 0, **FEW),
    OpCase("up2d channels", lambda: nn.ConvTranspose2d(5, 4, 3, 2), (2, 5, 4, 3), 1, **FEW),
    OpCase("up2d unbatched", lambda: nn.ConvTranspose2d(3, 4, 3, 2), (3, 7, 4), 1, **FEW),
    OpCase(
        "up2d output_size", fn=lambda x, w, b: _sized_up(x, w, b), shape=(2, 3, 9, 5), shard=2, plain=[UP3, B4], **ONCE
    ),
    OpCase(
        "up2d sharded weight", fn=lambda x, w: F.conv_transpose2d(x, w), shape=[(2, 3, 9, 5), UP3], shard=[2, 1], **FEW
    ),
    OpCase(
        "up2d keywords",
        fn=lambda x, w, b: torch.conv_transpose2d(input=x, weight=w, bias=b, stride=2, padding=1),
        shape=(2, 3, 9, 5),
        shard=2,
        plain=[UP3, B4],
        **ONCE,
    ),
    OpCase("up2d no samples", lambda: nn.ConvTranspose2d(3, 4, 3, 2), (0, 3, 9, 5), 2, **ONCE),
    OpCase(
        "up2d twice",
        fn=with_derivatives(_up2d(stride=2, padding=1)),
        shape=(1, 3, 7, 4),
        shard=2,
        plain=[UP3, B4],
        mesh2d=(2, 3),
        **FEW,
    ),
    OpCase("up1d", lambda: nn.ConvTranspose1d(3, 4, 4, 3, 1, 1), (2, 3, 9), 2, **FEW),
    OpCase("up3d", lambda: nn.ConvTranspose3d(2, 3, 3, 2, 1, 1), (1, 2, 7, 3, 4), 2, mesh2d=(2, 4), **FEW),
]

test_convolution = op_test(CASES)


def _sized_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    up = nn.ConvTranspose2d(3, 4, 3, 2, 1).double()
    return nn.utils.stateless.functional_call(up, {"weight": w, "bias": b}, (x,), {"output_size": (18, 10)})  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- every window
def _windows() -> Iterator[dict[str, Any]]:
    for kernel, stride, padding, dilation in itertools.product(range(1, 8), (1, 2, 3), (0, 1, 2, 3), (1, 2)):
        if dilation == 1 or kernel in (2, 3):
            yield {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    for kernel, dilation in itertools.product(range(1, 8), (1, 2)):
        yield {"kernel": kernel, "stride": 1, "padding": "same", "dilation": dilation}


def _same_everywhere(
    name: str, fn: Callable[..., Tensor], x: Tensor, weights: list[Tensor], sizes: tuple[int, ...]
) -> None:
    """Output and all gradients of a call on shards and on one device."""
    leaves = [x.clone().requires_grad_(), *(w.clone().requires_grad_() for w in weights)]
    expected = fn(*leaves)
    g = torch.linspace(-1, 2, expected.numel(), dtype=x.dtype).view(expected.shape)
    wanted = [expected, *torch.autograd.grad(expected, leaves, g)]
    cut = plan_cut(x.shape, (len(sizes),), x.ndim - 1, sizes)
    assert cut is not None
    shards = cut_tensor(x, domain_mesh(), cut).requires_grad_()
    out = fn(shards, *leaves[1:])
    found = [out, *torch.autograd.grad(out, [shards, *leaves[1:]], g)]
    for label, a, b in zip(("output", "input", "weight"), wanted, found, strict=True):
        full = b.full_tensor() if isinstance(b, ShardTensor) else b
        assert torch.allclose(a, full, rtol=1e-10, atol=1e-11), f"{name}, {label}, shards {sizes}"


@distributed(ranks=[2, 3], timeout=60)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_window(transposed: bool, ranks: int):
    """All kernels 1..7, strides, paddings, dilations: shards smaller than the window and empty ones."""
    torch.manual_seed(0)
    layouts = {2: [(6, 5), (1, 10), (11, 0)], 3: [(5, 1, 5), (4, 0, 7)]}[ranks]
    x = torch.randn(1, 2, 11, dtype=torch.float64)
    with strict():
        for window in _windows():
            kernel, stride = window.pop("kernel"), window["stride"]
            weight = torch.randn(2, 2, kernel, dtype=torch.float64)
            op: Any = F.conv_transpose1d if transposed else F.conv1d
            reach = window["dilation"] * (kernel - 1) + 1
            options = [dict(window)]
            if transposed:
                if window["padding"] == "same" or 10 * stride + reach <= 2 * window["padding"]:
                    continue
                options = [{**window, "output_padding": n} for n in range(max(stride, window["dilation"]))]
            for chosen in options:
                for sizes in layouts:
                    _same_everywhere(f"k{kernel} {chosen}", lambda x, w: op(x, w, **chosen), x, [weight], sizes)  # noqa: B023


@distributed(ranks=4)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_three_cut_dims(shape: tuple[int, int, int]):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(2, 3, 3, padding=1),
        nn.Conv3d(3, 2, 3, 2, 1),
        nn.ConvTranspose3d(2, 2, 3, 2, 1, 1),
        nn.Conv3d(2, 1, 5, padding=2),
    )
    assert_parity(net, torch.randn(1, 2, 5, 4, 6), (2, 3, 4), ("uneven", "even", "uneven"), mesh=mesh, strict=True)


# ---------------------------------------------------------------------- dtypes, memory formats, modes
KEEPS_FORMAT: dict[str, Callable[[Tensor], Tensor]] = {
    "conv": lambda x: F.conv2d(x, torch.full((4, 3, 3, 3), 0.1), padding=1),
    "up": lambda x: F.conv_transpose2d(x, torch.full((3, 4, 3, 3), 0.1), stride=2),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", KEEPS_FORMAT)
def test_channels_last_is_kept(name: str):
    fn = KEEPS_FORMAT[name]
    x = torch.randn(2, 3, 9, 6).contiguous(memory_format=torch.channels_last)
    mesh = domain_mesh()
    for sizes in [(5, 4), (9, 0), (3, 6)]:
        cut = plan_cut(x.shape, (2,), 2, sizes)
        assert cut is not None
        out = fn(cut_tensor(x, mesh, cut))
        assert out.stride() == fn(x).stride()
        local = out.to_local()
        assert local.stride(1) == 1 or local.numel() == 0
        torch.testing.assert_close(out.full_tensor(), fn(x))


@distributed(ranks=2)
def test_autocast():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2, 2))
    x = torch.randn(1, 3, 9, 6)

    def call(x: Tensor, *rest: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        assert y.dtype is torch.bfloat16
        return y

    assert_parity(call, x, 2, (5, 4), dtype=torch.float32, rtol=2e-2, atol=2e-2, strict=True)


@distributed(ranks=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype):
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, padding=1)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    assert_parity(net, torch.randn(1, 3, 9, 6), 2, (6, 3), dtype=dtype, rtol=tolerance, atol=tolerance * 8, strict=True)


@distributed(ranks=2)
def test_without_grad():
    net, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(1, 3, 9, 6)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    weight = net.weight.detach().clone()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not F.conv2d(sharded, weight).requires_grad
            torch.testing.assert_close(F.conv2d(sharded, weight).full_tensor(), F.conv2d(x, weight))


# ---------------------------------------------------------------------- communication
def _image(rows: tuple[int, int], columns: int = 6) -> ShardTensor:
    x = torch.randn(2, 3, sum(rows), columns, dtype=torch.float64)
    cut = plan_cut(x.shape, (2,), 2, rows)
    assert cut is not None
    return cut_tensor(x, domain_mesh(), cut)


@distributed(ranks=2)
def test_no_exchange_when_windows_fit_the_shards():
    w, x = torch.randn(4, 3, 4, 4, dtype=torch.float64), _image((8, 4))
    with count_collectives() as comm, count_traffic() as traffic:
        F.conv2d(x, w, stride=4)
        F.conv2d(x, torch.randn(4, 3, 1, 3, dtype=torch.float64), padding=(0, 1))
        F.conv_transpose2d(x, torch.randn(3, 4, 2, 2, dtype=torch.float64), stride=2)
    assert comm.calls == 0
    assert (traffic.calls, traffic.nbytes) == (0, 0)


@distributed(ranks=2)
def test_bytes_are_those_of_the_halo():
    row = 2 * 3 * 6 * 8  # batch, channels, columns, bytes
    w = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    x = _image((5, 4)).requires_grad_()
    with count_collectives() as comm, count_traffic() as traffic:
        out = F.conv2d(x, w, padding=1)
    assert comm.calls == traffic.calls == 1
    assert traffic.nbytes == row  # one row to the one neighbour
    with count_traffic() as traffic:
        out.backward(torch.ones_like(out))
    assert traffic.nbytes == row  # its gradient comes home
    x = _image((5, 4))
    with count_traffic() as traffic:
        F.conv2d(x, torch.randn(4, 3, 4, 4, dtype=torch.float64), stride=2, padding=1)
    assert traffic.nbytes == (0, 2 * row)[domain_mesh().get_local_rank()]  # output 2 sees rows 3..6, output 3 rows 5..8


# ---------------------------------------------------------------------- bad input
BAD: dict[str, Callable[[Tensor], Any]] = {
    "kernel wider than the domain": lambda x: F.conv2d(x, torch.ones(4, 3, 10, 1)),
    "dilated kernel wider than the domain": lambda x: F.conv2d(x, torch.ones(4, 3, 4, 1), dilation=3),
    "wrong channels": lambda x: F.conv2d(x, torch.ones(4, 2, 3, 3)),
    "groups that do not divide": lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3), groups=2),
    "bias of another size": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), torch.ones(3)),
    "negative padding": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), padding=-1),
    "stride 0": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), stride=0),
    "dilation 0": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), dilation=0),
    "same with a stride": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), stride=2, padding="same"),
    "unknown padding": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), padding="full"),
    "weight of another rank": lambda x: F.conv2d(x, torch.ones(4, 3, 3)),
    "input of another rank": lambda x: F.conv2d(x[0, 0], torch.ones(4, 3, 3, 3)),
    "other dtype": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3, dtype=torch.float64)),
    "stride of another length": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), stride=(1, 1, 1)),
    "float stride": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), stride=1.5),  # type: ignore[arg-type]
    "empty kernel": lambda x: F.conv2d(x, torch.ones(4, 3, 0, 3)),
    "up: output padding too large": lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 3, 3), stride=2, output_padding=2),
    "up: nothing left": lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 1, 1), padding=5),
    "up: wrong channels": lambda x: F.conv_transpose2d(x, torch.ones(2, 4, 3, 3)),
    "up: other dtype": lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 3, 3, dtype=torch.float64)),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2)
    expect_same_error(BAD[name], torch.randn(1, 3, 9, 6), 2, requires_grad=True)
