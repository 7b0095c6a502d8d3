"""Convolution that borrows rows and copies none: the same values and gradients on every path, overlapped or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import ShardTensor, strict
from dpzoo.shard.rules import halo_conv as module
from dpzoo.shard.rules.halo_conv import Halo, halo_of, halo_overlap
from dpzoo.shard.rules.window import forward_windows
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh, with_derivatives
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.counting import count_collectives

PATHS = {"joined": (10**9, False), "seams": (0, False), "overlapped": (0, True)}


@contextmanager
def path(name: str) -> Iterator[None]:
    """Seams on shards of any size, or on none."""
    before = module.ELEMENTS_PER_WEIGHT
    module.ELEMENTS_PER_WEIGHT, overlapped = PATHS[name]
    try:
        with halo_overlap(overlapped), strict():
            yield
    finally:
        module.ELEMENTS_PER_WEIGHT = before


def _halo(sizes: tuple[int, ...], me: int, kernel: int, stride: int, before: int, dilation: int = 1) -> Halo:
    reach = dilation * (kernel - 1) + 1
    n_out = (sum(sizes) + 2 * before - reach) // stride + 1
    return halo_of(
        2, sizes, forward_windows(sizes, n_out, kernel, stride, before, dilation), me, "g", reach, stride
    )  # fmt: skip


def test_halo_of_a_middle_rank():
    halo = _halo((5, 6, 5), 1, 3, 1, 1)
    assert halo.borrowed == (((5, 6),), ((4, 5), (11, 12)), ((10, 11),))
    assert (halo.padding, halo.head, halo.tail, halo.tail_start) == (1, 1, 1, 4)


def test_halo_of_a_shard_that_does_not_fit():
    assert _halo((5, 6, 5), 1, 3, 2, 1).padding is None  # starts at an odd row, and a window ends beyond it
    assert _halo((8, 8), 1, 3, 2, 1).padding == 1
    assert _halo((14, 2), 1, 5, 1, 2).padding is None  # smaller than a window


# ---------------------------------------------------------------------- every window
def _windows() -> Iterator[tuple[int, dict[str, int]]]:
    for kernel, stride, padding, dilation in itertools.product(range(1, 8), (1, 2, 3), (0, 1, 2, 3), (1, 2)):
        if dilation == 1 or kernel in (2, 3):
            yield kernel, {"stride": stride, "padding": padding, "dilation": dilation}


def _gradients(x: Any, w: Tensor, b: Tensor, g: Tensor, options: dict[str, int]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(), w.clone().requires_grad_(), b.clone().requires_grad_()]
    out = F.conv1d(*leaves, **options)
    found = [out, *torch.autograd.grad(out, leaves, g)]
    return [t.full_tensor() if isinstance(t, ShardTensor) else t for t in found]


@distributed(ranks=[2, 3], timeout=90)
@pytest.mark.parametrize("name", ["seams", "overlapped"])
def test_every_window(name: str, ranks: int):
    """All kernels 1..7, strides, paddings, dilations; long, short and empty shards."""
    torch.manual_seed(0)
    layouts = {2: [(12, 11), (16, 7), (23, 0), (1, 22)], 3: [(8, 8, 7), (9, 0, 14), (8, 9, 6)]}[ranks]
    x, mesh, at_seams = torch.randn(1, 2, 23, dtype=torch.float64), domain_mesh(), 0
    for kernel, options in _windows():
        w, b = torch.randn(3, 2, kernel, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        n = F.conv1d(x, w, b, **options).shape[-1]
        g = torch.randn(1, 3, n, dtype=torch.float64)
        wanted = _gradients(x, w, b, g, options)
        for sizes in layouts:
            cut = plan_cut(x.shape, (ranks,), 2, sizes)
            assert cut is not None
            with path(name):
                found = _gradients(cut_tensor(x, mesh, cut), w, b, g, options)
            for what, a, c in zip(("output", "input", "weight", "bias"), wanted, found, strict=True):
                assert torch.allclose(a, c, rtol=1e-10, atol=1e-11), f"{what}, k{kernel} {options}, shards {sizes}"
            seen = [
                _halo(sizes, r, kernel, options["stride"], options["padding"], options["dilation"])
                for r in range(ranks)
            ]
            at_seams += any(h.padding is not None and (h.head or h.tail) for h in seen)
    assert at_seams > 100  # the path under test was taken


NETS: dict[str, Any] = {
    "k3": (lambda: nn.Conv2d(3, 4, 3, padding=1), 2),
    "k7 s2, no bias": (lambda: nn.Conv2d(3, 4, 7, 2, 3, bias=False), 2),
    "k4 s2 p1": (lambda: nn.Conv2d(3, 4, 4, 2, 1), 2),
    "same, even kernel, dilated": (lambda: nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(2, 3)), 2),
    "depthwise": (lambda: nn.Conv2d(3, 6, 5, padding=2, groups=3), 2),
    "circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), 2),
    "volume": (lambda: nn.Conv3d(3, 4, (3, 3, 2), (1, 2, 1), (1, 1, 0)), 3),
}


def _net(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, dims = NETS[name]
    shape = (2, 3, 17, 10) if dims == 2 else (1, 3, 17, 10, 3)
    return make().double(), torch.randn(shape, dtype=torch.float64)


@distributed(ranks=3)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("name", NETS)
def test_uneven_and_empty(name: str, how: str):
    net, x = _net(name)
    with path(how):
        for sizes in ((8, 6, 3), (9, 8, 0), (0, 8, 9)):
            assert_parity(net, x, 2, sizes, strict=True)


@distributed(ranks=4)
@pytest.mark.parametrize("how", PATHS)
@pytest.mark.parametrize("name", NETS)
def test_corners_of_two_cut_dims(name: str, how: str):
    net, x = _net(name)
    with path(how):
        assert_parity(net, x, (2, 3), ((8, 9), (4, 6)), mesh=grid_mesh(), strict=True)
        assert_parity(net, x, (3, 2), ((6, 4), (10, 7)), mesh=grid_mesh(), strict=True)
        assert_parity(net, x, (0, 2), ((1, 1) if len(x) == 2 else (1, 0), (10, 7)), mesh=grid_mesh(), strict=True)
        assert_parity(net, x, 2, (10, 7), mesh=row_mesh(), strict=True)


@distributed(ranks=2)
@pytest.mark.parametrize("how", PATHS)
def test_second_derivatives(how: str):
    torch.manual_seed(0)
    fn = with_derivatives(lambda x, w, b: F.conv2d(x, w, b, padding=1))
    given = [torch.randn(s, dtype=torch.float64) for s in ((1, 2, 9, 4), (3, 2, 3, 3), (3,))]
    with path(how):
        assert_parity(fn, given, [2, None, None], [(5, 4), None, None], strict=True)


@distributed(ranks=2)
@pytest.mark.parametrize("how", PATHS)
def test_only_what_is_asked_for_is_computed_and_sent(how: str):
    x, w = torch.randn(1, 3, 9, 6, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    cut = plan_cut(x.shape, (2,), 2, (5, 4))
    assert cut is not None
    row = 3 * 6 * 8
    with path(how):
        for wants_input, wants_weight in ((True, False), (False, True)):
            shards = cut_tensor(x, domain_mesh(), cut).requires_grad_(wants_input)
            leaf, full = w.clone().requires_grad_(wants_weight), x.clone().requires_grad_(wants_input)
            weight = w.clone().requires_grad_(wants_weight)
            F.conv2d(full, weight, padding=1).square().sum().backward()
            with count_traffic() as traffic:
                out = F.conv2d(shards, leaf, padding=1)
            assert (traffic.calls, traffic.nbytes) == (1, row)
            with count_traffic() as traffic:
                out.backward(2 * out.detach())
            if wants_input:
                assert (traffic.calls, traffic.nbytes) == (1, row)
                assert shards.grad is not None
                torch.testing.assert_close(shards.grad.full_tensor(), full.grad)
            else:
                assert (traffic.calls, traffic.nbytes) == (1, w.nbytes)  # the weight's gradient, no row
                torch.testing.assert_close(leaf.grad, weight.grad)


@distributed(ranks=2)
@pytest.mark.parametrize("how", ["seams", "overlapped"])
def test_the_shard_is_not_copied(how: str):
    """What backward keeps of the input is the shard itself."""
    x = torch.randn(1, 3, 12, 6)
    cut = plan_cut(x.shape, (2,), 2, (6, 6))
    assert cut is not None
    shards, kept = cut_tensor(x, domain_mesh(), cut), []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    weight = torch.randn(4, 3, 3, 3, requires_grad=True)
    with path(how), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        F.conv2d(shards, weight, padding=1)
    inputs = [t for t in kept if t.shape == (1, 3, 6, 6)]
    assert inputs
    assert all(t.data_ptr() == shards.to_local().data_ptr() for t in inputs)


@distributed(ranks=2)
@pytest.mark.parametrize("how", PATHS)
def test_channels_last_is_kept(how: str):
    x = torch.randn(2, 3, 12, 6).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3)
    cut = plan_cut(x.shape, (2,), 2, (7, 5))
    assert cut is not None
    with path(how):
        shards = cut_tensor(x, domain_mesh(), cut).requires_grad_()
        out = F.conv2d(shards, weight, padding=1)
        assert out.to_local().stride(1) == 1
        torch.testing.assert_close(out.full_tensor(), F.conv2d(x, weight, padding=1))
        out.square().sum().backward()
        full = x.clone().requires_grad_()
        F.conv2d(full, weight, padding=1).square().sum().backward()
        assert shards.grad is not None
        torch.testing.assert_close(shards.grad.full_tensor(), full.grad, rtol=1e-4, atol=1e-4)


@distributed(ranks=2)
@pytest.mark.parametrize("how", PATHS)
def test_autocast(how: str):
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(1, 3, 12, 6)
    cut = plan_cut(x.shape, (2,), 2, (7, 5))
    assert cut is not None
    with path(how):
        shards = cut_tensor(x, domain_mesh(), cut).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = net(x), net(shards)
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.full_tensor(), expected)
        found.float().sum().backward()
    assert shards.grad is not None
    assert shards.grad.dtype is torch.float32
    assert net.weight.grad is not None
    mine = net.weight.grad.clone()
    net.zero_grad()
    expected.float().sum().backward()
    torch.testing.assert_close(mine, net.weight.grad, rtol=2e-2, atol=2e-2)


@distributed(ranks=4)
def test_no_exchange_when_windows_fit_the_shards():
    x = torch.randn(1, 3, 16, 16)
    cut = plan_cut(x.shape, (2, 2), (2, 3), ((8, 8), (4, 12)))
    assert cut is not None
    shards = cut_tensor(x, grid_mesh(), cut)
    with path("seams"), count_collectives() as comm:
        F.conv2d(shards, torch.randn(4, 3, 4, 4), stride=4)
    assert comm.calls == 0
