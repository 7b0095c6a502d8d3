"""Autocast on shards is autocast on the whole: dtypes exactly, values and gradients within the rounding of its casts.

Every row runs on one process under autocast and without, and cut under autocast: the cut run may be off by a few times
what the casts themselves change. `python -m tests.conformance --autocast bf16 [--narrow]` walks torch's own op database
in the same way.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import autocast, scatter
from dpzoo.shard.registry import RULES
from dpzoo.testing import distributed, domain_mesh, layout_sizes

W = torch.linspace(-1, 1, 48)
CLASSES = torch.tensor([[1, 0, 2], [2, 1, 0]])


def weight(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().reshape(shape)


# (call, shape of the input, dim that is cut); a second operand is a function of the first, or a plain weight.
ROWS = {
    # in the low precision
    "linear": (lambda x: F.linear(x, weight(5, 8), weight(5)), (2, 7, 8), 1),
    "linear, cut features": (lambda x: F.linear(x, weight(5, 8), weight(5)), (3, 8), 1),
    "matmul": (lambda x: x @ weight(8, 3), (2, 7, 8), 1),
    "matmul, cut sum": (lambda x: x.mT @ x, (2, 9, 4), 1),
    "bmm": (lambda x: torch.bmm(x, x.mT.sin()), (2, 7, 4), 1),
    "addmm": (lambda x: torch.addmm(weight(3), x, weight(8, 3)), (7, 8), 0),
    "addmm_": (lambda x: (x.float() * 1).addmm_(x.float(), weight(8, 8)), (7, 8), 0),
    "baddbmm": (lambda x: torch.baddbmm(weight(1), x, x.mT), (2, 7, 4), 1),
    "einsum": (lambda x: torch.einsum("bnc,bnd->bcd", x, x.sin()), (2, 9, 4), 1),
    "einsum of one": (lambda x: torch.einsum("bnc->bn", x), (2, 9, 4), 1),
    "conv2d": (lambda x: F.conv2d(x, weight(4, 3, 3, 3), weight(4), padding=1), (2, 3, 9, 5), 2),
    "conv2d, stride": (lambda x: F.conv2d(x, weight(4, 3, 2, 2), stride=2), (1, 3, 12, 4), 2),
    "conv1d": (lambda x: F.conv1d(x, weight(4, 3, 3), padding=2, dilation=2), (2, 3, 11), 2),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, weight(3, 4, 2, 2), stride=2), (1, 3, 9, 3), 2),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos()), (1, 2, 9, 4), 2),
    "prelu": (lambda x: F.prelu(x, weight(3)), (2, 3, 9), 2),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x.sin()), (7, 4), 0),
    # not cast, though made of ops that are
    "dot": (lambda x: torch.tensordot(x, x.sin(), 1), (9,), 0),
    "inner": (lambda x: torch.inner(x, x.sin()), (9,), 0),
    "bilinear": (lambda x: F.bilinear(x.float(), x.float().sin(), weight(3, 4, 4)), (9, 4), 0),
    # in float32
    "mse_loss": (lambda x: F.mse_loss(x, x.sin()), (9, 4), 0),
    "huber_loss": (lambda x: F.huber_loss(x, x.sin(), delta=0.3), (9, 4), 0),
    "l1_loss": (lambda x: F.l1_loss(x, x.sin(), reduction="none"), (9, 4), 0),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), (2, 4, 3), 2),
    "cosine_embedding_loss": (lambda x: F.cosine_embedding_loss(x, x.sin(), torch.ones(9)), (9, 4), 0),
    "triplet_margin_loss": (lambda x: F.triplet_margin_loss(x, x.sin(), x.cos()), (9, 4), 0),
    "reflect": (lambda x: F.pad(x, (2, 1), "reflect"), (1, 2, 9), 2),
    "reflect, 3-D": (lambda x: F.pad(x, (1,) * 6, "reflect"), (1, 2, 9, 3, 3), 2),
    "replicate": (lambda x: F.pad(x, (1, 1, 2, 1), "replicate"), (1, 2, 9, 3), 2),
    "circular": (lambda x: F.pad(x, (2, 1), "circular"), (1, 2, 9), 2),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2, padding=1), (1, 2, 9, 3, 3), 2),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (4, 2, 1)), (1, 2, 9, 3, 3), 2),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (4, 2, 1)), (1, 2, 9, 3, 3), 2),
    "area, 3-D": (lambda x: F.interpolate(x, (4, 2, 3), mode="area"), (1, 2, 9, 3, 3), 2),
    "prod": (lambda x: x.prod(0), (9, 4), 0),
    "trace": (lambda x: x.trace(), (5, 5), 0),
    "cdist": (lambda x: torch.cdist(x, x.sin()), (30, 4), 0),
    # in the widest of the operands
    "cat": (lambda x: torch.cat([x, x.float() * 2], 1), (9, 4), 0),
    "cat, cut": (lambda x: torch.cat([x, x.float() * 2], 0), (9, 4), 0),
    "stack": (lambda x: torch.stack([x, x.float()]), (9, 4), 0),
    "add": (lambda x: x + weight(4), (9, 4), 0),
    # as they come
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, padding=1), (1, 2, 9, 3), 2),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), (1, 2, 9, 3), 2),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (4, 2)), (1, 2, 9, 3), 2),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (1, 2, 9, 3), 2),
    "area, 2-D": (lambda x: F.interpolate(x, (4, 2), mode="area"), (1, 2, 9, 3), 2),
    "layer_norm": (lambda x: F.layer_norm(x, (4,), weight(4), weight(4)), (9, 4), 0),
    "layer_norm, cut": (lambda x: F.layer_norm(x, (9,), weight(9)), (4, 9), 1),
    "rms_norm": (lambda x: F.rms_norm(x, (4,), weight(4)), (9, 4), 0),
    "group_norm": (lambda x: F.group_norm(x, 2, weight(4), weight(4)), (2, 4, 9), 2),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, weight(3), weight(3), training=True), (2, 3, 9), 2),
    "instance_norm": (lambda x: F.instance_norm(x), (2, 3, 9), 2),
    "softmax": (lambda x: x.softmax(1), (9, 4), 0),
    "softmax, cut": (lambda x: x.log_softmax(1), (4, 9), 1),
    "sum": (lambda x: x.sum(0), (9, 4), 0),
    "mean": (lambda x: x.mean(), (9, 4), 0),
    "var": (lambda x: x.var(0), (9, 4), 0),
    "norm": (lambda x: torch.linalg.vector_norm(x, 3.0, 0), (9, 4), 0),
    "logsumexp": (lambda x: x.logsumexp(0), (9, 4), 0),
    "cumsum": (lambda x: x.cumsum(0), (9, 4), 0),
    "gelu, exp, pow": (lambda x: F.gelu(x).exp().pow(2), (9, 4), 0),
    "amax": (lambda x: x.amax(0), (9, 4), 0),
    "gather": (lambda x: x[:, [2, 0]], (9, 4), 0),
}  # fmt: skip


def run(call, x, low):
    """Output and gradient of the input, with the cotangent in the dtype of the output."""
    x = x.requires_grad_()
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = call(x)
        shown = out.full_tensor() if hasattr(out, "full_tensor") else out
    if not x.is_leaf or not out.requires_grad:
        return out, shown.detach(), None
    cotangent = torch.linspace(-1, 2, max(shown.numel(), 1)).cos()[: shown.numel()].reshape(shown.shape)
    (out.float() * cotangent).sum().backward()
    return out, shown.detach(), x.grad


def assert_near(found, expected, exact, low, what):
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, one process has {expected.dtype}"
    wide = [t.detach().double() for t in (found, expected, exact)]
    size, change = wide[2].abs().max(), (wide[1] - wide[2]).abs().max()
    rounding = change > 4e-6 * size
    allowed = torch.maximum(3 * change, 3 * torch.finfo(low).eps * size) if rounding else 1e-5 * size + 1e-6
    error = (wide[0] - wide[1]).abs().max()
    assert error <= allowed, f"{what}: {error:.3g} off where the values reach {size:.3g}, {allowed:.3g} is the rounding"


def walk(low, narrow, ranks):
    torch.manual_seed(0)
    failures = []
    for name, (call, shape, dim) in ROWS.items():
        x = torch.randn(shape)
        x = x.to(low) if narrow else x
        expected, exact = run(call, x.clone(), low), run(call, x.float(), None)
        for layout in ("uneven", "empty"):
            cut = scatter(x.clone(), domain_mesh(), dim=dim, sizes=layout_sizes(shape[dim], ranks, layout))
            found = run(call, cut, low)
            try:
                assert found[0].dtype == expected[0].dtype
                assert_near(found[1], expected[1], exact[1], low, "output")
                if expected[2] is not None:
                    assert found[2].dtype == x.dtype
                    assert_near(found[2].full_tensor(), expected[2], exact[2], low, "gradient")
            except AssertionError as error:
                failures.append(f"{name}, {layout}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "low"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@distributed(ranks=3, timeout=90)
def test_every_kind_of_op(low, narrow, ranks):
    walk(low, narrow, ranks)


@distributed(ranks=[2, 4])
def test_a_sum_over_ranks_is_rounded_once(ranks):
    """Summands that cancel: rounded on each rank, they would leave their own rounding."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 6), torch.randn(64, 5)
    a[32:], b[32:] = a[:32] * 200, -b[:32]
    a[:32] *= 200
    a += torch.randn(64, 6)
    cut = [scatter(t, domain_mesh(), dim=0) for t in (a, b)]
    for call in (
        lambda x, y: x.mT @ y,
        lambda x, y: torch.einsum("nc,nd->cd", x, y),
        lambda x, y: F.linear(x.mT, y.mT),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = call(*cut).full_tensor(), call(a, b)
        exact = call(a.bfloat16().double(), b.bfloat16().double())
        assert found.dtype is expected.dtype is torch.bfloat16
        error = (found.double() - exact).abs().max()
        assert error <= 1.01 * (exact.bfloat16().double() - exact).abs().max() + 1e-3
        low = call(*[t.bfloat16() for t in cut]).full_tensor()  # bfloat16 itself, without autocast
        assert (low.double() - exact).abs().max() <= error + 1e-3


@distributed(ranks=2)
def test_the_gradient_of_a_number_added_to_a_product_is_rounded_once():
    """The ranks' parts of it cancel: rounded each, they would leave their own rounding."""
    torch.manual_seed(0)
    x, cotangent = torch.randn(2, 6, 4), torch.randn(2, 6, 6)
    cotangent[:, 3:] = -cotangent[:, :3] + torch.randn(2, 3, 6) / 32
    cotangent = (cotangent * 8).bfloat16()
    exact = cotangent.double().sum().bfloat16()
    for cast in (True, False):
        given = x if cast else x.bfloat16()
        cut = scatter(given, domain_mesh(), dim=1)
        number = torch.tensor(0.3, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = torch.baddbmm(number, cut, given.mT)
        assert out.dtype is torch.bfloat16
        out.backward(scatter(cotangent, domain_mesh(), dim=1))
        assert torch.equal(number.grad, exact)


@distributed(ranks=3)
def test_a_plan_of_autocast_is_not_one_of_without():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    cut = scatter(x, domain_mesh(), dim=0)
    for _ in range(2):
        for low in (torch.bfloat16, None, torch.float16):
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                for call in (lambda t: t.mT @ t, lambda t: F.linear(t, weight(3, 4)), lambda t: t @ weight(4, 4)):
                    assert call(cut).dtype == call(x).dtype == (low or torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="reduction dim"):
        _ = cut @ weight(5, 3)


@distributed(ranks=2)
def test_backward_under_autocast_and_gradients_of_weights():
    torch.manual_seed(0)
    module, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2)),
        torch.randn(9, 4),
    )
    found = []
    for given in (x.clone(), scatter(x.clone(), domain_mesh(), dim=0, sizes=(6, 3))):
        module.zero_grad()
        given.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            F.mse_loss(module(given), given[:, :2].sin()).backward()
        grad = given.grad.full_tensor() if hasattr(given.grad, "full_tensor") else given.grad
        found.append([grad, *[p.grad.clone() for p in module.parameters()]])
    for expected, ours in zip(*found, strict=True):
        assert ours.dtype is expected.dtype is torch.float32
        torch.testing.assert_close(ours, expected, rtol=0.03, atol=0.03 * expected.abs().max().item())


def test_every_op_that_autocast_may_widen_can_be_asked_for():
    pads = [((None, (1, 1), mode), {}) for mode in ("constant", "reflect", "replicate", "circular")]
    pads += [((None,), {"pad": (1,) * 6, "mode": "replicate"}), ((None, [1, 1, 1, 1]), {"value": 2.0})]
    seen = {}
    with torch.autocast("cpu", torch.bfloat16):
        for name, ask in autocast._ASK.items():
            for func in RULES[name]:
                for args, kwargs in pads if name == "pad" else [((), {})]:
                    out = ask(func, lambda *shape: torch.zeros(shape, dtype=torch.bfloat16), args, kwargs)
                    seen.setdefault(name, set()).add((out if isinstance(out, Tensor) else out[0]).dtype)
    assert seen["trace"] == {torch.float32}  # what torch 2.14 does on CPU
    assert seen["pad"] == seen["avg_pool"] == {torch.float32, torch.bfloat16}
