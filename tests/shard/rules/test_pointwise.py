"""Elementwise ops: every op on aligned shards, every kind of operand mix on a few, spellings, dtypes, exceptions."""

from __future__ import annotations

import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import dpzoo
from dpzoo.shard import LayoutError, PromotionWarning, ShardError, ShardTensor, TensorPromotionMode
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test, with_derivatives
from dpzoo.testing.meshes import grid_mesh
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut
from tests.shard.rules.inputs import numbers as _numbers


def _unit(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def _positive(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(1, 9, shape)


def _truths(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape) > 0.5


def _complex(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128)


def _words(text: str) -> list[str]:
    return text.split()


UNARY = _words("""
    abs absolute acos arccos asin angle asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
    fix floor frac i0 isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit
    nan_to_num neg negative positive rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt
    square tan tanh trunc
""")
SPECIAL = _words("entr erfcx expit gammaln i0e i1 i1e log_ndtr ndtr ndtri psi")
ACTIVATIONS = _words("""
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu softplus
    softshrink softsign tanhshrink
""")
BINARY = _words("""
    add sub mul div true_divide multiply subtract divide fmod pow float_power atan2 arctan2 maximum minimum fmax fmin
    hypot copysign eq ne lt le gt ge greater less not_equal logaddexp logaddexp2 xlogy logical_and logical_or
    logical_xor isclose rsub
""")
OPERATORS = [getattr(operator, name) for name in _words("add sub mul truediv pow lt le gt ge eq ne")]
WHOLE = [getattr(operator, name) for name in _words("add sub mul floordiv mod and_ or_ xor lshift rshift")]
WHOLE += [torch.gcd, torch.lcm, torch.bitwise_and, torch.bitwise_left_shift, torch.floor_divide, torch.remainder]


def _each(place, names):
    functions = [getattr(place, name) for name in names]
    return lambda x: [f(x) for f in functions]


def _binary(x, y):
    return [getattr(torch, name)(x, y) for name in BINARY] + [op(x, y) for op in OPERATORS]


def _with_scalars(x):
    out = [op(x, 2) for op in OPERATORS] + [op(2.5, x) for op in OPERATORS]
    return [*out, x.detach() // 2, x % 0.7, 3 // x.detach(), x * np.float64(2), x + True, torch.pow(2, x)]


def _binary_case(name, first, second, dims, plain=(), **options):
    """All binary ops on one pair of operands; a plain second operand is given by `plain`."""
    shapes = [first] if second is None else [first, second]
    return OpCase(
        name, fn=options.pop("fn", _binary), shape=shapes, shard=list(dims), plain=plain, fill=_positive,
        layouts=("uneven", "empty", "misaligned"), **options,
    )  # fmt: skip


CASES = [
    OpCase("unary", fn=_each(torch, UNARY), shape=(5, 9), shard=1, fill=_unit, mesh2d=(0, 1), **FEW),
    OpCase("special", fn=_each(torch.special, SPECIAL), shape=(5, 9), shard=1, fill=_unit, **FEW),
    OpCase("activations", fn=_each(F, ACTIVATIONS), shape=(5, 9), shard=1, mesh2d=(0, 1), **FEW),
    OpCase(
        "parameters",
        fn=lambda x: [
            F.gelu(x, approximate="tanh"), F.threshold(x, 0.1, 2.0), F.leaky_relu(x, negative_slope=0.3),
            F.celu(x, 0.4), F.hardtanh(x, min_val=-0.2, max_val=0.2), F.softplus(x, beta=2, threshold=3),
            torch.clamp(input=x, min=-0.5, max=0.5), x.clip(-1), x.clamp_max(0.3), torch.round(x, decimals=1),
            torch.nan_to_num(x, nan=1.0), torch.mvlgamma(x.abs() + 3, 2), torch.polygamma(1, x.abs() + 1),
            x.abs().add(1).polygamma(2), torch.special.multigammaln(x.abs() + 3, 2), torch.logit(x, 0.3),
        ],
        shape=(5, 9), shard=1, **FEW,
    ),
    OpCase("frexp", fn=lambda x: torch.frexp(x), shape=(5, 9), shard=1, grads=False, **FEW),
    OpCase(
        "complex",
        fn=lambda x: [
            x.conj() * 2, x.real, x.imag, x.angle(), x.abs(), torch.view_as_real(x), x * x.conj(), x.conj(), x.sgn(),
        ],
        shape=(5, 9), shard=1, fill=_complex, **FEW,
    ),
    OpCase("complex of two", fn=lambda a, b: [torch.complex(a, b), torch.polar(a.abs(), b)], shape=[(5, 9), (5, 9)],
           shard=[1, 0], **FEW),
    OpCase("prelu", fn=F.prelu, shape=(2, 5, 9), shard=2, plain=[(5,)], mesh2d=(0, 2), covers=("prelu",)),
    OpCase("prelu on the channel cut", fn=F.prelu, shape=(2, 5, 3), shard=1, plain=[(5,)], **FEW),
    OpCase("prelu one slope", fn=F.prelu, shape=(2, 5, 3), shard=1, plain=[(1,)], **FEW),
    # ------------------------------------------------------------------ operand mixes
    _binary_case("aligned", (5, 9), (5, 9), (1, 1), mesh2d=[(0, 1), (0, 1)], subgroups=False),
    _binary_case("cut across", (5, 9), (5, 9), (1, 0), mesh2d=[(0, 1), (1, 0)], ranks=(2, 3)),
    _binary_case("row cut alike", (5, 9), (9,), (1, 0), **FEW),
    _binary_case("row against another cut", (5, 9), (9,), (0, 0), **FEW),
    _binary_case("outer", (5, 1), (1, 9), (0, 1), **FEW),
    _binary_case("second has more dims", (9,), (3, 5, 9), (0, 1), **FEW),
    _binary_case("a cut dim of size 1", (5, 1), (5, 9), (1, 1), **FEW),
    _binary_case("plain row", (5, 9), None, (1,), plain=[(9,)], mesh2d=(0, 1), subgroups=False),
    _binary_case("plain column first", (5, 9), None, (1,), plain=[(5, 1)], fn=lambda x, w: _binary(w, x), **FEW),
    _binary_case("plain with more dims", (9,), None, (0,), plain=[(3, 2, 9)], **FEW),
    _binary_case("plain of the size of one shard", (4, 3), None, (1,), plain=[(4, 1)], **FEW),
    _binary_case("plain 0-d", (5, 9), None, (1,), plain=[()], **FEW),
    OpCase("scalars", fn=_with_scalars, shape=(5, 9), shard=1, fill=_positive, **FEW),
    OpCase("whole numbers", fn=lambda x, y: [op(x, y) for op in WHOLE], shape=[(5, 9), (9,)], shard=[1, 0], fill=_whole,
           **FEW),
    OpCase("whole with scalars", fn=lambda x: [x // 2, 7 // x, 2 << x, x >> 1, 5 & x, x | 2, ~x, x / 2, x + 0.5],
           shape=(5, 9), shard=1, fill=_whole, **FEW),
    OpCase("truths", fn=lambda x, y: [x & y, x | y, x ^ y, ~x, x == y, x + y, x.logical_not()], shape=[(5, 9), (9,)],
           shard=[1, 0], fill=_truths, **FEW),
    OpCase("dtypes meet",
           fn=lambda x, y: [x + y * 0.5, x.half() * 2.0, x.bfloat16() + x.half(), x.float() * torch.ones(()).double()],
           shape=[(5, 9), (9,)], shard=[1, 0], fill=_whole, **FEW),
    OpCase(
        "three operands",
        fn=lambda x, y, w: [
            torch.where(x > 0, x, y), torch.where(x > y, w, 0.0), x.where(x > y, y), torch.lerp(x, y, 0.3),
            torch.lerp(x, y, w), torch.addcmul(x, y, w, value=0.5), x.addcmul(tensor1=y, tensor2=y),
            torch.addcdiv(x, y, w.abs() + 1),
            x.masked_fill(y > 0, -1.0), y.masked_fill(x > 0, 0.0), x.masked_fill(w.detach() > 0, y.sum()),
            torch.clamp(x, min=-y.abs(), max=y.abs() + w.abs()), torch.where(condition=x > 0, input=x, other=y),
        ],
        shape=[(5, 9), (9,)], shard=[1, 0], plain=[(5, 1)], layouts=("uneven", "empty", "misaligned"),
        mesh2d=[(0, 1), (None, 0)],
    ),
    OpCase(
        "keywords",
        fn=lambda x, y, w: [
            torch.add(x, w, alpha=3), x.sub(y, alpha=2), torch.add(input=x, other=y),
            torch.div(x, w, rounding_mode="floor"),
            torch.div(x, y, rounding_mode="trunc"), torch.rsub(x, w, alpha=2), torch.isclose(x, y, rtol=0.3),
            torch.mul(other=x, input=y), torch.maximum(input=w, other=x),
        ],
        shape=[(5, 9), (9,)], shard=[1, 0], plain=[(5, 1)], fill=_positive, **FEW,
    ),
    OpCase("no gradient formula",
           fn=lambda x, y: [torch.nextafter(x, y), torch.heaviside(x, y), torch.special.zeta(x + 2, y),
           torch.special.gammainc(x, y), torch.floor_divide(x, y), torch.ldexp(x, y), x // y, x % y],
           shape=[(5, 9), (9,)], shard=[1, 0], fill=_positive, grads=False, **FEW),
    OpCase("sum of itself", fn=lambda x: x * x.sum() + x / x.norm() - x.mean(0), shape=(5, 9), shard=1, **FEW),
    OpCase("no elements", fn=lambda x: x * 2 + x, shape=(0, 9), shard=1, **FEW),
    OpCase("no rows", fn=lambda x: x.exp() + x, shape=(4, 0), shard=1, **FEW),
    OpCase("second derivative", fn=with_derivatives(lambda x, y: (x * y.sin()).tanh() / (x * x + 1)),
           shape=[(5, 9), (9,)], shard=[1, 0], layouts=("uneven", "misaligned"), **FEW),
    OpCase("second derivative, plain", fn=with_derivatives(lambda x, w: (x * w).sigmoid() * w), shape=(5, 9), shard=1,
           plain=[(9,)], **FEW),
    OpCase("second derivative, activations",
           fn=with_derivatives(lambda x: F.gelu(x) + F.silu(x) * F.elu(x) + F.softplus(x)),
           shape=(5, 9), shard=1, **FEW),
]  # fmt: skip

test_ops = op_test(CASES)


@distributed(ranks=2)
def test_out_argument():
    full = _numbers(5, 3)
    x, cut = _cut(full), _cut(torch.zeros_like(full), dim=1)
    plain, short = torch.empty_like(full), torch.empty(4, 3, dtype=torch.float64)
    assert torch.add(x, full, out=plain) is plain
    assert torch.equal(plain, full * 2)
    assert torch.mul(x, 2, out=cut) is cut
    assert torch.equal(cut.full_tensor(), full * 2)
    assert torch.equal(torch.exp(x, out=torch.empty(0, dtype=torch.float64)), full.exp())
    expect_error(lambda: torch.add(x, x, out=short), ShardError, r"out has shape \(4, 3\)")
    expect_error(lambda: torch.add(x, x, out=torch.empty(5, 3, dtype=torch.int64)), RuntimeError, "can't be cast")
    x.requires_grad_()
    expect_error(lambda: torch.add(x, x, out=plain), RuntimeError, "don't support automatic differentiation")


@distributed(ranks=2)
def test_no_grad_and_inference_mode():
    full = _numbers(5, 3)
    x = _cut(full, requires_grad=True)
    with torch.no_grad():
        y = x * 2 + full
    assert not y.requires_grad
    assert torch.equal(y.full_tensor(), full * 3)
    with torch.inference_mode():
        y = torch.where(x > 3, x, full[0])
    assert torch.equal(y.full_tensor(), torch.where(full > 3, full, full[0]))


@distributed(ranks=2)
def test_autocast_takes_the_dtype_of_torch():
    full = torch.linspace(-1, 1, 12).reshape(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = _cut(full).half() * full + 1, full.half() * full + 1
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.full_tensor(), theirs)


# ---------------------------------------------------------------------- errors
@distributed(ranks=3)
def test_shapes_that_do_not_broadcast():
    x, y = _cut(_numbers(7, 3)), _cut(_numbers(5, 3))
    for call in (lambda: x + y, lambda: x * torch.ones(2), lambda: torch.where(x > 0, x, y)):
        expect_error(call, RuntimeError, "match|broadcast|Shape mismatch")
    expect_error(lambda: x.add_(torch.ones(2, 7, 3)), RuntimeError, "doesn't match the broadcast shape")
    expect_error(lambda: _cut(_numbers(1, 3), sizes=(0, 1, 0)).mul_(_numbers(2, 3)), RuntimeError, "broadcast shape")


@distributed(ranks=4)
def test_different_meshes():
    x = _cut(_numbers(8, 3))
    y = dpzoo.scatter(_numbers(8, 3), grid_mesh()["domain"], dim=0)
    for call in (lambda: x + y, lambda: y.mul_(x), lambda: torch.where(x > 0, x, y)):
        expect_error(call, LayoutError, "different meshes")


def _raises(error):
    def handler(func, types, args, kwargs):
        raise error

    return handler


@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError, KeyError, ShardError])
@distributed(ranks=1)
def test_an_exception_inside_an_operator_arrives_as_itself(kind):
    from dpzoo.shard.tensor import FUNCTIONS

    x, changed = _cut(_numbers(4, 2)), [Tensor.add, Tensor.__rsub__, Tensor.__rpow__, Tensor.matmul]
    before = {f: FUNCTIONS.get(f) for f in changed}
    try:
        for f in changed:
            ShardTensor.register_function_handler(f, _raises(kind("the cause")))
        for call in (lambda: x + x, lambda: x + 1, lambda: 1 - x, lambda: 2**x, lambda: x @ x):
            with pytest.raises(kind, match="the cause"):
                call()
    finally:
        for f, handler in before.items():
            FUNCTIONS.pop(f)
            if handler is not None:
                FUNCTIONS[f] = handler


# ---------------------------------------------------------------------- promotion and DTensor
@distributed(ranks=2)
def test_promotion_modes():
    full = _numbers(5, 3)
    x, weight = _cut(full), torch.nn.Parameter(full[0].clone())
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    (x * full).sum()  # a call whose plan is known is no exception
    calls = (
        lambda: x * full,
        lambda: full * x,
        lambda: x.clone().add_(full),
        lambda: torch.where(x > 0, x, full),
        lambda: torch.cat([x, full]),
        lambda: torch.stack([full, x]),
    )
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        for call in calls:
            expect_error(call, ShardError, "promotion is disabled")
        assert torch.equal((x * weight * torch.tensor(2.0) * 3).full_tensor(), full * full[0] * 6)
    with ShardTensor.promotion_mode(TensorPromotionMode.WARN):
        for call in calls:
            with pytest.warns(PromotionWarning, match=r"plain torch.float64 tensor of shape \(5, 3\) meets"):
                call()
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    for call in calls:
        call()


@distributed(ranks=2)
def test_dtensor_operands():
    from torch.distributed.tensor import distribute_tensor

    full, mesh = _numbers(5, 3), domain_mesh()
    x = _cut(full, sizes=(1, 4))
    for placement in (Shard(0), Shard(1), Replicate()):
        d = distribute_tensor(full, mesh, [placement])
        assert isinstance(d, DTensor)
        for ours in (x * d, d * x, torch.where(x > 4, d, x) * x, x.clone().mul_(d), torch.lerp(x, d, d) * 0 + x * d):
            assert isinstance(ours, ShardTensor)
            assert torch.equal(ours.full_tensor(), full * full)
        assert torch.equal(torch.matmul(x, d.t()).full_tensor(), full @ full.t())
        assert torch.equal(torch.cat([x, d]).full_tensor(), torch.cat([full, full]))
