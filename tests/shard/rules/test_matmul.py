"""Products: every operand cut, on any dim, the contracted one included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dpzoo.shard import ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test
from dpzoo.testing import with_derivatives as _second
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.counting import count_collectives
from tests.shard.rules.inputs import FEW


def _complex(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.complex128)


CASES = [
    # ------------------------------------------------------------------ linear
    OpCase("linear tokens", lambda: nn.Linear(6, 5), (2, 9, 6), 1, mesh2d=(0, 1), covers=("linear",)),
    OpCase("linear batch", lambda: nn.Linear(6, 5, bias=False), (9, 6), 0),
    OpCase("linear contraction", lambda: nn.Linear(9, 5), (2, 4, 9), -1, mesh2d=(0, 2)),
    OpCase("linear 1-D input", fn=F.linear, shape=(6,), shard=0, plain=[(5, 6), (5,)], **FEW),
    OpCase("linear 1-D weight", fn=F.linear, shape=(9, 6), shard=0, plain=[(6,)], **FEW),
    OpCase("linear 1-D weight, contraction", fn=F.linear, shape=(4, 9), shard=1, plain=[(9,)], **FEW),
    OpCase("linear bias of one", fn=F.linear, shape=(9, 6), shard=0, plain=[(5, 6), (1,)], **FEW),
    OpCase("linear bias 0-d", fn=F.linear, shape=(9, 6), shard=0, plain=[(5, 6), ()], **FEW),
    OpCase("linear sharded rows of weight", fn=F.linear, shape=[(7, 6), (9, 6), (9,)], shard=[0, 0, 0], **FEW),
    OpCase("linear sharded columns", fn=F.linear, shape=[(7, 9), (5, 9)], shard=[0, 1], **FEW),
    OpCase(
        "linear keywords",
        fn=lambda x, w, b: F.linear(input=x, weight=w, bias=b),
        shape=(3, 9, 6),
        shard=1,
        plain=[(5, 6), (5,)],
        **FEW,
    ),
    OpCase("linear twice", fn=_second(F.linear), shape=(2, 9, 4), shard=1, plain=[(3, 4), (3,)], mesh2d=(0, 1)),
    OpCase("linear twice, contraction", fn=_second(F.linear), shape=(2, 9), shard=1, plain=[(3, 9), (3,)], **FEW),
    OpCase(
        "linear non-contiguous",
        fn=lambda x, w: F.linear(x.transpose(1, 2), w.t()),
        shape=(2, 6, 9),
        shard=2,
        plain=[(6, 4)],
        **FEW,
    ),
    OpCase("linear without channels", fn=F.linear, shape=(2, 9, 0), shard=1, plain=[(5, 0), (5,)], **FEW),
    OpCase("linear of size 0", fn=F.linear, shape=(0, 9, 6), shard=1, plain=[(5, 6), (5,)], **FEW),
    OpCase("linear complex", fn=F.linear, shape=(9, 6), shard=1, plain=[(5, 6), (5,)], fill=_complex, **FEW),
    # ------------------------------------------------------------------ matmul
    OpCase(
        "matmul rows",
        fn=torch.matmul,
        shape=[(7, 5), (5, 4)],
        shard=[0, None],
        mesh2d=[(0, 1), None],
        covers=("matmul",),
    ),
    OpCase(
        "matmul contraction",
        fn=torch.matmul,
        shape=[(4, 9), (9, 5)],
        shard=[1, 0],
        layouts=("even", "misaligned", "empty"),
    ),
    OpCase("matmul columns", fn=torch.matmul, shape=[(4, 6), (6, 9)], shard=[None, 1]),
    OpCase("matmul rows and columns", fn=torch.matmul, shape=[(7, 6), (6, 9)], shard=[0, 1]),
    OpCase(
        "matmul rows and contraction",
        fn=torch.matmul,
        shape=[(7, 8), (8, 9)],
        shard=[0, 0],
        layouts=("misaligned", "empty"),
    ),
    OpCase("matmul batch broadcast", fn=torch.matmul, shape=[(7, 1, 4, 5), (3, 5, 6)], shard=[0, 0], **FEW),
    OpCase("matmul batch against one", fn=torch.matmul, shape=[(7, 4, 5), (1, 5, 6)], shard=[0, None], **FEW),
    OpCase("matmul vector left", fn=torch.matmul, shape=[(9,), (9, 5)], shard=[0, 0], **FEW),
    OpCase("matmul vector right", fn=torch.matmul, shape=[(2, 7, 9), (9,)], shard=[1, 0], **FEW),
    OpCase("matmul of size 0", fn=torch.matmul, shape=[(7, 0), (0, 5)], shard=[0, None], **FEW),
    OpCase(
        "operator @",
        fn=lambda x, y, w: w @ (x @ y),
        shape=[(7, 6), (6, 5)],
        shard=[0, 1],
        plain=[(4, 7)],
        covers=("rmatmul",),
        **FEW,
    ),
    OpCase("matmul complex contraction", fn=torch.matmul, shape=[(4, 9), (9, 5)], shard=[1, 0], fill=_complex, **FEW),
    OpCase("matmul conj", fn=lambda x, y: x.conj() @ y.mH, shape=[(4, 9), (5, 9)], shard=[1, 1], fill=_complex, **FEW),
    OpCase(
        "matmul keywords",
        fn=lambda x, y: torch.matmul(input=x, other=y),
        shape=[(7, 5), (5, 4)],
        shard=[0, None],
        **FEW,
    ),
    OpCase("matmul twice", fn=_second(torch.matmul), shape=[(4, 9), (9, 5)], shard=[1, 0], **FEW),
    OpCase(
        "mm", fn=lambda x, y: (torch.mm(x, y), x.mm(y)), shape=[(7, 9), (9, 4)], shard=[1, 0], covers=("mm",), **FEW
    ),
    OpCase(
        "bmm",
        fn=lambda x, y: (torch.bmm(x, y), x.bmm(mat2=y)),
        shape=[(3, 7, 9), (3, 9, 4)],
        shard=[1, 1],
        covers=("bmm",),
        mesh2d=[(0, 1), (0, 2)],
    ),
    OpCase("mv", fn=torch.mv, shape=[(7, 9), (9,)], shard=[0, 0], covers=("mv",), **FEW),
    OpCase(
        "dot",
        fn=lambda x, y: (torch.dot(x, y), torch.vdot(x, y)),
        shape=[(9,), (9,)],
        shard=0,
        layouts=("even", "misaligned", "empty"),
        covers=("dot", "vdot"),
    ),
    OpCase(
        "vdot complex",
        fn=lambda x, y: (torch.dot(x, y), torch.vdot(x, y)),
        shape=[(9,), (9,)],
        shard=0,
        fill=_complex,
        **FEW,
    ),
    OpCase(
        "linalg.vecdot",
        fn=lambda x, y: torch.linalg.vecdot(x, y, dim=0),
        shape=[(9, 3), (9, 3)],
        shard=0,
        covers=("vecdot",),
        **FEW,
    ),
    OpCase("vecdot complex", fn=torch.linalg.vecdot, shape=[(4, 9), (4, 9)], shard=1, fill=_complex, **FEW),
    OpCase(
        "cross",
        fn=lambda x, y: torch.linalg.cross(x, y, dim=1),
        shape=[(9, 3, 2), (1, 3, 2)],
        shard=[0, None],
        covers=("cross",),
        **FEW,
    ),
    OpCase("cross over the cut dim", fn=lambda x, y: torch.cross(x, y, dim=-1), shape=[(4, 3), (4, 3)], shard=1, **FEW),
    OpCase("cdist", fn=torch.cdist, shape=[(2, 9, 3), (1, 7, 3)], shard=1, covers=("cdist",), **FEW),
    OpCase("cdist channels cut", fn=lambda x, y: torch.cdist(x, y, p=1.0), shape=[(4, 9), (5, 9)], shard=1, **FEW),
    OpCase(
        "multi_dot",
        fn=lambda x, y, w: torch.linalg.multi_dot([x, y, w]),
        shape=[(7, 6), (6, 9)],
        shard=[0, 1],
        plain=[(9, 4)],
        gathers=True,
        **FEW,
    ),
    # ------------------------------------------------------------------ with a sum
    OpCase("addmm", fn=torch.addmm, shape=[(4,), (7, 9), (9, 4)], shard=[0, 1, 0], covers=("addmm",)),
    OpCase(
        "addmm scaled",
        fn=lambda b, x, y: torch.addmm(b, x, y, beta=2, alpha=0.5),
        shape=[(7, 4), (7, 9), (9, 4)],
        shard=[0, 0, None],
        **FEW,
    ),
    OpCase(
        "addmm beta 0",
        fn=lambda b, x, y: torch.addmm(b, x, y, beta=0),
        shape=[(7, 4), (7, 9), (9, 4)],
        shard=[0, 0, None],
        grads=False,
        **FEW,
    ),
    OpCase(
        "addmm plain bias",
        fn=lambda x, y, b: torch.addmm(b, x, y),
        shape=[(7, 9), (9, 4)],
        shard=[0, None],
        plain=[(4,)],
        **FEW,
    ),
    OpCase("addmv", fn=torch.addmv, shape=[(7,), (7, 9), (9,)], shard=[0, 0, None], covers=("addmv",), **FEW),
    OpCase(
        "baddbmm",
        fn=torch.baddbmm,
        shape=[(3, 7, 4), (3, 7, 9), (3, 9, 4)],
        shard=[0, 1, 1],
        covers=("baddbmm",),
        **FEW,
    ),
    OpCase("addbmm", fn=torch.addbmm, shape=[(7, 4), (5, 7, 9), (5, 9, 4)], shard=[0, 0, 0], covers=("addbmm",), **FEW),
    OpCase("addr", fn=torch.addr, shape=[(7, 5), (7,), (5,)], shard=[0, 0, 0], covers=("addr",), **FEW),
    OpCase(
        "in place",
        fn=lambda b, x, y: b.clone().addmm_(x, y, beta=0.5),
        shape=[(7, 4), (7, 9), (9, 4)],
        shard=[0, 1, None],
        covers=("addmm_",),
        **FEW,
    ),
    OpCase(
        "in place, the others",
        fn=lambda b, x, y: (
            b.clone().addbmm_(x, y),
            x.clone().baddbmm_(x, x.mT),
            b[0].clone().addmv_(y[0].mT, y[0, :, 0]),
            b.clone().addr_(b[:, 0], b[0]),
        ),
        shape=[(7, 4), (5, 7, 7), (5, 7, 4)],
        shard=[0, 1, 1],
        covers=("addbmm_", "baddbmm_", "addmv_", "addr_"),
        **FEW,
    ),
    # ------------------------------------------------------------------ outer, inner, einsum, tensordot
    OpCase("outer", fn=torch.outer, shape=[(7,), (9,)], shard=0, covers=("outer",), **FEW),
    OpCase("inner", fn=torch.inner, shape=[(4, 9), (5, 9)], shard=[1, 1], covers=("inner",), **FEW),
    OpCase("inner with 0-d", fn=torch.inner, shape=[(9, 4), ()], shard=[0, None], **FEW),
    OpCase(
        "einsum batch",
        fn=lambda x, y: torch.einsum("bnc,cd->bnd", x, y),
        shape=(2, 9, 6),
        shard=1,
        plain=[(6, 5)],
        mesh2d=(0, 1),
        covers=("einsum",),
    ),
    OpCase(
        "einsum contraction",
        fn=lambda x, y: torch.einsum("bnc,bnd->bcd", x, y),
        shape=[(2, 9, 6), (2, 9, 5)],
        shard=[1, 1],
        layouts=("even", "misaligned", "empty"),
    ),
    OpCase(
        "einsum both ways", fn=lambda x, y: torch.einsum("ij,jk", x, y), shape=[(7, 9), (9, 8)], shard=[0, 1], **FEW
    ),
    OpCase(
        "einsum ellipsis",
        fn=lambda x, y: torch.einsum("...ij, jk -> ...ik", x, y),
        shape=(2, 3, 9, 6),
        shard=2,
        plain=[(6, 5)],
        **FEW,
    ),
    OpCase("einsum sum", fn=lambda x: torch.einsum("ijk->j", x), shape=(4, 9, 3), shard=0, **FEW),
    OpCase("einsum trace", fn=lambda x: torch.einsum("iji->j", x), shape=(7, 9, 7), shard=1, **FEW),
    OpCase("einsum trace over the cut", fn=lambda x: torch.einsum("iij->j", x), shape=(7, 7, 5), shard=0, **FEW),
    OpCase(
        "einsum three",
        fn=lambda x, y, w: torch.einsum("ab,bc,cd->ad", x, y, w),
        shape=[(7, 5), (5, 9)],
        shard=[0, 1],
        plain=[(9, 4)],
        **FEW,
    ),
    OpCase("einsum list", fn=lambda x, y: torch.einsum("ab,ab->", [x, y]), shape=[(7, 5), (7, 5)], shard=[0, 1], **FEW),
    OpCase(
        "einsum broadcast",
        fn=lambda x, y: torch.einsum("ab,ab->ab", x, y),
        shape=[(9, 5), (1, 5)],
        shard=[0, None],
        **FEW,
    ),
    OpCase(
        "einsum complex",
        fn=lambda x, y: torch.einsum("ab,cb->ac", x, y),
        shape=[(4, 9), (5, 9)],
        shard=[1, 1],
        fill=_complex,
        **FEW,
    ),
    OpCase(
        "tensordot",
        fn=lambda x, y: torch.tensordot(x, y, dims=([1, 0], [0, -1])),
        shape=[(4, 9, 3), (9, 5, 4)],
        shard=[1, 0],
        covers=("tensordot",),
        **FEW,
    ),
    OpCase(
        "tensordot by number",
        fn=lambda x, y: torch.tensordot(x, y, dims=1),
        shape=[(7, 9), (9, 5)],
        shard=[0, 0],
        **FEW,
    ),
    OpCase("tensordot dims 0", fn=lambda x, y: torch.tensordot(x, y, dims=0), shape=[(7,), (5,)], shard=[0, 0], **FEW),
    OpCase("bilinear", lambda: nn.Bilinear(3, 4, 2), [(9, 3), (9, 4)], 0, covers=("bilinear",), **FEW),
]

test_products = op_test(CASES)


def _cut(full: Tensor, dim: int) -> ShardTensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, "uneven"))


def _seeded(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


@distributed(ranks=[2, 3])
def test_linear_with_sharded_and_dtensor_weights(ranks):
    x, w, b = _seeded(9, 6), _seeded(5, 6), _seeded(5)
    mesh = domain_mesh()
    expected = F.linear(x, w, b)
    for weight in (
        distribute_tensor(w, mesh, [Shard(0)]),
        distribute_tensor(w, mesh, [Replicate()]),
        _cut(w, 0),
        _cut(w, 1),
    ):
        weight = weight.detach().requires_grad_()
        out = F.linear(_cut(x, 0), weight, b)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.sum().backward()
        assert type(weight.grad) is type(weight) and weight.grad.placements == weight.placements
        torch.testing.assert_close(weight.grad.full_tensor(), x.sum(0).expand(5, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(ranks=[1, 2, 4])
def test_half_precision_error_does_not_grow_with_the_ranks(ranks, dtype):
    x, w = _seeded(5, 256, dtype=dtype), _seeded(3, 256, dtype=dtype)
    exact = x.double() @ w.double().T
    eps = torch.finfo(dtype).eps
    for out in (F.linear(_cut(x, 1), w), _cut(x, 1) @ w.T, F.linear(_cut(x, 0), w)):
        assert out.dtype is dtype
        # Every rank rounds its part once, to an error relative to that part.
        torch.testing.assert_close(out.full_tensor().double(), exact, rtol=eps, atol=eps * 16)


@distributed(ranks=2)
def test_autocast():
    module, x = nn.Linear(8, 5), _seeded(2, 8, dtype=torch.float32)
    for dim in (0, 1):
        s, plain = _cut(x, dim).requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = module(s), module(plain)
            others = [(torch.addmm(module.bias, s, module.weight.T), torch.addmm(module.bias, plain, module.weight.T))]
            others += [(s @ s.mT, plain @ plain.mT), (torch.einsum("ab,cb->ac", s, s), plain @ plain.mT)]
        for a, e in ((out, expected), *others):
            assert a.dtype is e.dtype is torch.bfloat16
            torch.testing.assert_close(a.full_tensor(), e, rtol=2**-6, atol=2**-6)
        out.float().sum().backward()
        expected.float().sum().backward()
        assert s.grad.dtype is torch.float32
        torch.testing.assert_close(s.grad.full_tensor(), plain.grad, rtol=2**-6, atol=2**-6)


@distributed(ranks=3)
def test_integers():
    a, b = torch.arange(18).view(2, 9), torch.arange(27).view(9, 3)
    assert torch.equal((_cut(a, 1) @ _cut(b, 0)).full_tensor(), a @ b)
    assert torch.equal(torch.einsum("ij,jk->k", _cut(a, 1), b).full_tensor(), (a @ b).sum(0))


@distributed(ranks=3)
def test_mistakes_raise_as_in_torch_on_every_rank():
    x, y = _cut(_seeded(9, 6), 0), _cut(_seeded(9, 6), 1)
    calls = [
        lambda: x @ y,
        lambda: torch.mm(x, y.T[:5]),
        lambda: torch.mm(x[None], y.T),
        lambda: torch.bmm(x, y),
        lambda: torch.mv(x, y[0, :5]),
        lambda: torch.dot(x[0], y[0, :4]),
        lambda: x @ y.T.float(),
        lambda: F.linear(x, torch.ones(5, 7, dtype=torch.float64)),
        lambda: F.linear(x, torch.ones(5, 6)),
        lambda: F.linear(x, torch.ones(5, 6, dtype=torch.float64), torch.ones(4, dtype=torch.float64)),
        lambda: torch.addmm(torch.ones(9, 9, 9, dtype=torch.float64), x, y.T),
        lambda: torch.einsum("ab,ab->a", x, y[:8]),
        lambda: torch.einsum("abc->a", x),
        lambda: torch.tensordot(x, y, dims=([0], [1])),
    ]
    for call in calls:
        expect_error(call, RuntimeError)


@distributed(ranks=2)
def test_aligned_shards_need_no_collective():
    x, module = _cut(_seeded(9, 6), 0).requires_grad_(), nn.Linear(6, 6).double()
    with count_collectives() as seen:
        out = module(x) @ module.weight
    assert seen.calls == 0
    with count_collectives() as seen:
        _ = x.detach().mT @ x.detach()
    assert seen.calls == 1
    with count_collectives() as seen:
        out.sum().backward()
    assert seen.calls <= 3  # the sum itself, and the weights together
