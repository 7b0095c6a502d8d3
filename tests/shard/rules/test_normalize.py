"""Softmax, norms, scans and sorts along every dim, the cut one included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test, with_derivatives
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.rules.inputs import FEW


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-4, 5, shape)


def _masked(shape: tuple[int, ...]) -> Tensor:
    """Scores with -inf in places and in one whole row."""
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.3] = float("-inf")
    x.select(-1, 0).fill_(float("-inf"))
    return x


def _layer_norm(*dims: int):
    return lambda x, w, b: F.layer_norm(x, dims, w, b)


CASES = [
    # ------------------------------------------------------------------ softmax
    OpCase(
        "softmax over the cut dim",
        fn=lambda x: x.softmax(1),
        shape=(3, 9, 2),
        shard=1,
        mesh2d=(0, 1),
        covers=("softmax over a cut dim",),
    ),
    OpCase(
        "softmax over another dim",
        fn=lambda x: F.softmax(x, dim=-1),
        shape=(3, 9, 4),
        shard=1,
        covers=("softmax",),
        **FEW,
    ),
    OpCase("softmax keywords", fn=lambda x: torch.softmax(input=x, dim=-2), shape=(3, 9, 2), shard=1, **FEW),
    OpCase(
        "softmax dtype",
        fn=lambda x: torch.softmax(x, 0, dtype=torch.float64),
        shape=(9, 2),
        shard=0,
        fill=_whole,
        **FEW,
    ),
    OpCase("softmax 0-d", fn=lambda x: x.sum().softmax(0), shape=(9,), shard=0, **FEW),
    OpCase("softmax of size 0", fn=lambda x: x.softmax(1), shape=(0, 9), shard=1, **FEW),
    OpCase("softmax twice", fn=with_derivatives(lambda x: x.softmax(1)), shape=(3, 9), shard=1, mesh2d=(0, 1), **FEW),
    OpCase("softmax of -inf", fn=lambda x: x.softmax(1), shape=(3, 9), shard=1, fill=_masked, grads=False, **FEW),
    OpCase("softmax of a -inf row", fn=lambda x: x.softmax(0), shape=(9, 3), shard=0, fill=_masked, grads=False, **FEW),
    OpCase(
        "log_softmax of -inf", fn=lambda x: x.log_softmax(0), shape=(9, 3), shard=0, fill=_masked, grads=False, **FEW
    ),
    OpCase(
        "log_softmax over the cut dim",
        fn=lambda x: x.log_softmax(1),
        shape=(3, 9, 2),
        shard=1,
        covers=("log_softmax over a cut dim",),
    ),
    OpCase(
        "log_softmax over another dim",
        fn=lambda x: F.log_softmax(x, -1),
        shape=(3, 9, 4),
        shard=1,
        covers=("log_softmax",),
        **FEW,
    ),
    OpCase("log_softmax twice", fn=with_derivatives(lambda x: x.log_softmax(1)), shape=(3, 9), shard=1, **FEW),
    OpCase("softmin", fn=lambda x: F.softmin(x, dim=1), shape=(3, 9), shard=1, covers=("softmin",), **FEW),
    OpCase("Softmax2d", lambda: nn.Softmax2d(), (2, 3, 9, 2), 1, **FEW),
    # ------------------------------------------------------------------ norms
    OpCase(
        "layer_norm tokens", lambda: nn.LayerNorm(6), (2, 9, 6), 1, mesh2d=(0, 1), covers=("layer_norm as one node",)
    ),
    OpCase("layer_norm plain", fn=lambda x: F.layer_norm(x, [6]), shape=(9, 6), shard=0, covers=("layer_norm",), **FEW),
    OpCase("layer_norm without bias", lambda: nn.LayerNorm(6, bias=False), (2, 9, 6), 1, **FEW),
    OpCase("layer_norm sharded affine", fn=_layer_norm(6), shape=[(9, 6), (6,), (6,)], shard=[0, 0, 0], **FEW),
    OpCase(
        "layer_norm over the cut dim", fn=_layer_norm(9), shape=(2, 4, 9), shard=2, plain=[(9,), (9,)], mesh2d=(1, 2)
    ),
    OpCase(
        "layer_norm over cut and more",
        fn=_layer_norm(9, 3),
        shape=(2, 9, 3),
        shard=1,
        plain=[(9, 3), (9, 3)],
        mesh2d=(1, 2),
    ),
    OpCase("layer_norm over all", fn=_layer_norm(9, 3), shape=(9, 3), shard=0, plain=[(9, 3), (9, 3)], **FEW),
    OpCase(
        "layer_norm all cut, all sharded", fn=_layer_norm(9, 3), shape=[(9, 3), (9, 3), (9, 3)], shard=[0, 0, 1], **FEW
    ),
    OpCase(
        "layer_norm twice", fn=with_derivatives(_layer_norm(6)), shape=(2, 9, 6), shard=1, plain=[(6,), (6,)], **FEW
    ),
    OpCase(
        "layer_norm twice, cut", fn=with_derivatives(_layer_norm(9)), shape=(3, 9), shard=1, plain=[(9,), (9,)], **FEW
    ),
    OpCase(
        "layer_norm keywords",
        fn=lambda x, w: F.layer_norm(input=x, normalized_shape=(6,), weight=w, eps=0.1),
        shape=(9, 6),
        shard=0,
        plain=[(6,)],
        **FEW,
    ),
    OpCase(
        "layer_norm non-contiguous",
        fn=lambda x, w, b: F.layer_norm(x.transpose(1, 2), (6,), w, b),
        shape=(2, 6, 9),
        shard=2,
        plain=[(6,), (6,)],
        **FEW,
    ),
    OpCase("rms_norm tokens", lambda: nn.RMSNorm(6), (2, 9, 6), 1, covers=("rms_norm",)),
    OpCase(
        "rms_norm over the cut dim",
        fn=lambda x, w: F.rms_norm(x, (9,), w),
        shape=(4, 9),
        shard=1,
        plain=[(9,)],
        mesh2d=(0, 1),
        covers=("rms_norm over a cut dim",),
    ),
    OpCase(
        "rms_norm over all", fn=lambda x, w: F.rms_norm(x, (9, 3), w, 0.1), shape=(9, 3), shard=0, plain=[(9, 3)], **FEW
    ),
    OpCase("rms_norm plain", fn=lambda x: F.rms_norm(x, (9, 3)), shape=(2, 9, 3), shard=1, **FEW),
    OpCase(
        "rms_norm twice",
        fn=with_derivatives(lambda x, w: F.rms_norm(x, (9,), w)),
        shape=(3, 9),
        shard=1,
        plain=[(9,)],
        **FEW,
    ),
    OpCase("normalize", fn=lambda x: F.normalize(x, dim=1), shape=(3, 9), shard=1, **FEW),
]

test_softmax_and_norms = op_test(CASES)


def _cut(full: Tensor, dim: int) -> ShardTensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, "uneven"))


OPS = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (64,), torch.linspace(0.5, 2, 64).to(x.dtype)),
    "rms_norm": lambda x: F.rms_norm(x, (64,)),
    "cumsum": lambda x: x.cumsum(1),
}


@pytest.mark.parametrize("name", OPS)
@distributed(ranks=[1, 4])
def test_half_precision_error_does_not_grow_with_the_ranks(ranks, name):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    out, exact = OPS[name](_cut(x, 1)), OPS[name](x.double())
    assert out.dtype is torch.bfloat16
    # One rounding of the result, which passes through float32 (two for the norms: their weight is applied after).
    torch.testing.assert_close(out.full_tensor().double(), exact, rtol=2**-7, atol=2**-12)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", OPS)
@distributed(ranks=2)
def test_autocast_decides_the_dtype(name, dim):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))
    for dtype in (torch.float32, torch.bfloat16):
        plain = x.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = OPS[name](_cut(plain, dim)), OPS[name](plain)
        assert out.dtype is expected.dtype
        torch.testing.assert_close(out.full_tensor(), expected, rtol=2**-6, atol=2**-6)


@distributed(ranks=3)
def test_mistakes_raise_as_in_torch_on_every_rank():
    x = _cut(torch.randn(4, 9), 1)
    expect_error(lambda: x.softmax(2), IndexError)
    expect_error(lambda: F.layer_norm(x, (8,)), RuntimeError)
    expect_error(lambda: F.layer_norm(x, (9,), torch.ones(8)), RuntimeError)
    expect_error(lambda: F.layer_norm(x, ()), RuntimeError)
    expect_error(lambda: F.rms_norm(x, (9,), torch.ones(3)), RuntimeError)
    expect_error(lambda: x.cumsum(-3), IndexError)
    expect_error(lambda: x.topk(10, 1), RuntimeError)
    expect_error(lambda: x.sort(5), IndexError)
