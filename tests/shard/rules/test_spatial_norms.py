"""group_norm, instance_norm, batch_norm, local_response_norm: statistics of the domain, not of the shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import Shard, ShardTensor, scatter_tensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_same_error, op_test
from dpzoo.testing import with_derivatives as _second
from tests.shard.rules.inputs import FEW

ONCE: dict[str, Any] = {"ranks": (3,), "subgroups": False}
IMAGE: dict[str, Any] = {"shape": (2, 4, 9, 6), "shard": 2, "mesh2d": (2, 3)}
HARD = ("even", "uneven", "tiny", "empty", "empty_first", "empty_last")


def _trained(norm: nn.Module, steps: int = 2) -> Callable[[], nn.Module]:
    """A module that forwards several times: the buffers that the test compares have then moved twice."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm
            with torch.no_grad():
                for p in norm.parameters():
                    p.add_(torch.linspace(-0.5, 1.0, p.numel()))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(steps):
                y = self.norm(x)
                x = x + y
            return y

    return Repeated


def _evaluated(norm: nn.Module) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.no_grad():
            for name, p in (*norm.named_parameters(), *norm.named_buffers()):
                if p.is_floating_point():
                    p.copy_(torch.linspace(0.5, 1.5, p.numel()) + len(name) / 10)
        return norm.eval()

    return build


W4 = [(4,), (4,)]

CASES = [
    # ------------------------------------------------------------------ group
    OpCase("group", _trained(nn.GroupNorm(2, 4)), layouts=HARD, covers=("group_norm",), **IMAGE),
    OpCase("group of all", _trained(nn.GroupNorm(1, 4)), **IMAGE, **FEW),
    OpCase("group of one, no affine", lambda: nn.GroupNorm(4, 4, affine=False), **IMAGE, **FEW),
    OpCase("group, weight only", fn=lambda x, w: F.group_norm(x, 2, w), plain=[(4,)], **IMAGE, **ONCE),
    OpCase("group, bias only", fn=lambda x, b: torch.group_norm(x, 2, None, b, 0.1), plain=[(4,)], **IMAGE, **ONCE),
    OpCase("group, batch", _trained(nn.GroupNorm(2, 4)), (5, 4, 3, 2), 0, mesh2d=(0, 2), **FEW),
    OpCase("group, channels", _trained(nn.GroupNorm(2, 4)), (2, 4, 3, 2), 1, mesh2d=(1, 2), **FEW),
    OpCase("group, no positions", _trained(nn.GroupNorm(2, 4)), (9, 4), 0, **FEW),
    OpCase("group, a vector per rank", _trained(nn.GroupNorm(1, 6)), (3, 6), 0, **FEW),
    OpCase("group, nothing varies", lambda: nn.GroupNorm(2, 4), (2, 4, 9, 2), 2, fill=torch.ones, **ONCE),
    OpCase("group, sequence", _trained(nn.GroupNorm(2, 4)), (2, 4, 11), -1, **FEW),
    OpCase("group, volume", _trained(nn.GroupNorm(2, 4)), (1, 4, 7, 3, 4), 2, mesh2d=(2, 4), **FEW),
    OpCase(
        "group, sharded affine",
        fn=lambda x, w, b: F.group_norm(x, 2, w, b),
        shape=[(2, 4, 9, 3), (4,), (4,)],
        shard=[2, 0, None],
        **ONCE,
    ),
    OpCase(
        "group, keywords",
        fn=lambda x, w, b: F.group_norm(input=x, num_groups=2, weight=w, bias=b, eps=0.1),
        plain=W4,
        **IMAGE,
        **ONCE,
    ),
    OpCase("group, twice", fn=_second(lambda x, w, b: F.group_norm(x, 2, w, b)), plain=W4, **IMAGE, **ONCE),
    OpCase("group, no samples", lambda: nn.GroupNorm(2, 4), (0, 4, 9, 3), 2, **ONCE),
    # ------------------------------------------------------------------ batch
    OpCase("batch, training", _trained(nn.BatchNorm2d(4)), layouts=HARD, covers=("batch_norm",), **IMAGE),
    OpCase("batch, cumulative average", _trained(nn.BatchNorm2d(4, momentum=None)), **IMAGE, **FEW),
    OpCase(
        "batch, no affine, no buffers",
        lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False),
        **IMAGE,
        **FEW,
    ),
    OpCase(
        "batch, evaluation", _evaluated(nn.BatchNorm2d(4)), covers=("batch_norm by running statistics",), **IMAGE, **FEW
    ),
    OpCase("batch, evaluation of channels", _evaluated(nn.BatchNorm2d(5)), (2, 5, 3, 4), 1, mesh2d=(1, 2), **FEW),
    OpCase("batch, cut batch", _trained(nn.BatchNorm2d(4)), (5, 4, 3, 2), 0, mesh2d=(0, 2), **FEW),
    OpCase("batch, cut channels", _trained(nn.BatchNorm2d(5)), (2, 5, 3, 2), 1, mesh2d=(1, 2), **FEW),
    OpCase("batch of vectors", _trained(nn.BatchNorm1d(4)), (9, 4), 0, mesh2d=(0, 1), **FEW),
    OpCase("batch of sequences", _trained(nn.BatchNorm1d(4)), (2, 4, 11), -1, **FEW),
    OpCase("batch of volumes", _trained(nn.BatchNorm3d(4)), (2, 4, 7, 3, 2), 2, mesh2d=(2, 3), **FEW),
    OpCase(
        "batch, keywords",
        fn=lambda x, w, b: F.batch_norm(input=x, running_mean=None, running_var=None, weight=w, bias=b, training=True),
        plain=W4,
        **IMAGE,
        **ONCE,
    ),
    OpCase(
        "batch, twice",
        fn=_second(lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
        plain=W4,
        **IMAGE,
        **ONCE,
    ),
    OpCase(
        "batch, evaluation twice",
        fn=_second(lambda x, w, b: F.batch_norm(x, torch.zeros_like(w).detach(), torch.ones_like(w).detach(), w, b)),
        plain=W4,
        **IMAGE,
        **ONCE,
    ),
    OpCase("batch, synchronised", lambda: nn.SyncBatchNorm(4).eval(), **IMAGE, **ONCE),
    # ------------------------------------------------------------------ instance
    OpCase(
        "instance", _trained(nn.InstanceNorm2d(4, affine=True)), layouts=HARD, covers=("instance_norm",), **IMAGE, **FEW
    ),
    OpCase(
        "instance with buffers", _trained(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), **IMAGE, **FEW
    ),
    OpCase(
        "instance, evaluation", _evaluated(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), **IMAGE, **ONCE
    ),
    OpCase(
        "instance, batch",
        _trained(nn.InstanceNorm2d(4, track_running_stats=True)),
        (5, 4, 3, 2),
        0,
        mesh2d=(0, 2),
        **FEW,
    ),
    OpCase(
        "instance, channels",
        _trained(nn.InstanceNorm2d(5, affine=True, track_running_stats=True)),
        (2, 5, 3, 2),
        1,
        mesh2d=(1, 2),
        **FEW,
    ),
    OpCase("instance, sequence", _trained(nn.InstanceNorm1d(4)), (2, 4, 11), 2, **ONCE),
    OpCase("instance, unbatched", lambda: nn.InstanceNorm2d(4), (4, 9, 6), 1, **FEW),
    OpCase("instance, volume", _trained(nn.InstanceNorm3d(4)), (1, 4, 7, 3, 4), 2, **ONCE),
    OpCase("instance, twice", fn=_second(lambda x, w: F.instance_norm(x, weight=w)), plain=[(4,)], **IMAGE, **ONCE),
    # ------------------------------------------------------------------ local response, layer
    OpCase(
        "local response",
        lambda: nn.LocalResponseNorm(3, 0.5, 0.7, 2.0),
        covers=("local_response_norm",),
        **IMAGE,
        **FEW,
    ),
    OpCase("local response, even size", lambda: nn.LocalResponseNorm(4, 0.5), (2, 7, 5), 2, **FEW),
    OpCase("local response, channels", lambda: nn.LocalResponseNorm(3, 0.5), (2, 7, 5, 4), 1, mesh2d=(1, 2), **FEW),
    OpCase("local response, volume", lambda: nn.LocalResponseNorm(2, 0.5), (2, 3, 7, 2, 3), 2, **ONCE),
    OpCase("layer over the domain", lambda: nn.LayerNorm((4, 9, 6)), **IMAGE, **FEW),
    OpCase("layer over rows and columns", lambda: nn.LayerNorm((9, 6)), **IMAGE, **FEW),
]

test_norms = op_test(CASES)

NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "group": lambda x: F.group_norm(x, 2),
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance": lambda x: F.instance_norm(x),
    "layer": lambda x: F.layer_norm(x, tuple(x.shape[1:])),
}


@distributed(ranks=3)
@pytest.mark.parametrize("name", NORMS)
def test_large_mean(name: str):
    """float32, mean 1000, deviation 1: close to what float64 says, and the shards' means differ."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 33, 16, dtype=torch.float64) + 1000 + torch.linspace(-2, 2, 33, dtype=torch.float64)[:, None]
    x = x.float()
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)]).requires_grad_()
    truth_of = x.double().requires_grad_()
    out, truth = NORMS[name](sharded), NORMS[name](truth_of)
    g = torch.randn(out.shape, dtype=torch.float64)
    out.backward(g.float())
    truth.backward(g)
    torch.testing.assert_close(out.full_tensor().double(), truth, rtol=0, atol=2e-4)
    assert sharded.grad is not None
    torch.testing.assert_close(sharded.grad.full_tensor().double(), truth_of.grad, rtol=0, atol=2e-4)


@distributed(ranks=2)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    x = torch.randn(2, 4, 9, 6)
    assert_parity(NORMS[name], x, 2, (3, 6), dtype=dtype, rtol=tolerance, atol=tolerance, strict=True)


@distributed(ranks=2)
def test_half_inputs_and_float_weights():
    """What a convolution under autocast hands to a norm."""
    torch.manual_seed(0)
    x, net = torch.randn(2, 4, 9, 6).bfloat16(), nn.Sequential(nn.BatchNorm2d(4))
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    expected = net(x)
    found = net(sharded)
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-2, atol=1e-2)
    found.sum().backward()
    assert net[0].weight.grad.dtype is torch.float32


@distributed(ranks=4)
def test_buffers_are_equal_on_all_ranks():
    torch.manual_seed(0)
    x, norm = torch.randn(2, 3, 10, 5), nn.BatchNorm2d(3)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)])
    norm(sharded)
    for buffer in (norm.running_mean, norm.running_var):
        assert buffer is not None
        assert not isinstance(buffer, ShardTensor)
        everyone = [torch.empty_like(buffer) for _ in range(4)]
        torch.distributed.all_gather(everyone, buffer)
        assert all(torch.equal(buffer, other) for other in everyone)


@distributed(ranks=2)
def test_communication():
    x = scatter_tensor(torch.randn(2, 4, 12, 6), 0, domain_mesh(), [Shard(2)])
    for name, rows in (("batch", 4), ("group", 4), ("instance", 8)):
        x = x.detach().requires_grad_()
        with count_traffic() as traffic:
            out = NORMS[name](x)
        assert (traffic.calls, traffic.nbytes) == (1, 3 * rows * 8)  # mean, deviation, count
        with count_traffic() as traffic:
            out.backward(torch.ones_like(out))
        assert (traffic.calls, traffic.nbytes) == (1, 2 * rows * 8)
    batch = scatter_tensor(torch.randn(4, 4, 3, 6), 0, domain_mesh(), [Shard(0)])
    with count_traffic() as traffic:
        F.group_norm(batch, 2)
        F.batch_norm(x, torch.zeros(4), torch.ones(4))
    assert traffic.calls == 0


@distributed(ranks=2)
def test_channels_last_is_kept():
    x = torch.randn(2, 4, 9, 6).contiguous(memory_format=torch.channels_last)
    sharded = scatter_tensor(x, 0, domain_mesh(), [Shard(2)]).contiguous(memory_format=torch.channels_last)
    for name in ("batch", "group"):
        out = NORMS[name](sharded)
        assert out.stride() == sharded.stride()
        torch.testing.assert_close(out.full_tensor(), NORMS[name](x))


BAD: dict[str, Callable[[Tensor], Any]] = {
    "groups that do not divide": lambda x: F.group_norm(x, 3),
    "group weight of another size": lambda x: F.group_norm(x, 2, torch.ones(3)),
    "group of a vector": lambda x: F.group_norm(x[0, 0, :, 0], 1),
    "batch weight of another size": lambda x: F.batch_norm(x, None, None, torch.ones(3), training=True),
    "buffer of another size": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
    "one value per channel": lambda x: F.batch_norm(x[:1, :, :1, :1], None, None, training=True),
    "one buffer alone": lambda x: F.batch_norm(x, torch.zeros(4), None, training=True),
    "evaluation without statistics": lambda x: F.batch_norm(x, None, None),
    "instance of one value": lambda x: F.instance_norm(x[:, :, :1, :1]),
    "instance, weight of another size": lambda x: F.instance_norm(x, weight=torch.ones(3)),
    "local response of a matrix": lambda x: F.local_response_norm(x[0, 0], 2),
    "whole numbers": lambda x: F.group_norm(x.long(), 2),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_raises_what_torch_raises(name: str):
    expect_same_error(BAD[name], torch.randn(1, 4, 9, 6), 2)
