"""Reductions of sharded tensors against torch on one device: values, gradients, dtypes, errors."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from dpzoo.shard import ShardTensor
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, layout_sizes, op_test
from tests.shard.rules.inputs import raises_like_torch
from tests.shard.rules.rows import SHAPE, case, everywhere

DIMS = (None, (), 0, 1, -1, (0, 1), (1, 2), (0, -1), (2, 1, 0))
SOME_DIMS = (0, 1, -1, (0, 1), (1, 2), (0, -1), (2, 1, 0))  # without "all": some ops take () literally
ONE_DIM = (0, 1, -1)


def over(op, dims=DIMS, keepdims=(False, True), **options):
    """`op` over each of `dims`, kept and not."""
    calls = list(itertools.product(dims, keepdims))
    return lambda x: [op(x, dim, keepdim=keep, **options) for dim, keep in calls]


def second_order(*ops):
    """Gradients as differentiable outputs: their own gradients are second derivatives."""

    def run(x):
        outs = [out for op in ops for out in torch.utils._pytree.tree_leaves(op(x))]
        return torch.autograd.grad(sum((out**3).sum() for out in outs), x, create_graph=True)

    return run


def ties(shape):
    return torch.randint(0, 3, shape).double()


def positive(shape):
    return torch.rand(shape).double() + 0.1


def holes(shape):
    """NaN in places, one row all NaN."""
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.2] = math.nan
    x[0, :, 0] = math.nan
    return x


def infinities(shape):
    """inf and -inf in places, one row all -inf."""
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.1] = math.inf
    x[torch.rand(shape) < 0.1] = -math.inf
    x[0, :, 0] = -math.inf
    return x


def zeros_inside(shape):
    x = torch.randn(shape, dtype=torch.float64)
    x[torch.rand(shape) < 0.3] = 0
    return x


def spelled(x):
    """Every spelling of the same call."""
    return [
        x.sum(1), x.sum(dim=1), x.sum(axis=1), torch.sum(x, 1), torch.sum(input=x, dim=(1,)), x.sum([0, 1], True),
        x.sum(1, keepdims=True), x.mean(axis=(0, 2)), torch.mean(input=x), torch.std(input=x, dim=1, unbiased=False),
        x.std(False), x.var(1, False, True), x.var(dim=1, correction=0), x.var(correction=2), x.max(dim=1)[0],
        torch.max(input=x, dim=1, keepdim=True)[0], x.amax(), x.amax(axis=1), x.norm(), x.norm(1), x.norm(2, 1),
        x.norm(p=3, dim=1, keepdim=True), x.norm(dim=(0, 1)), torch.norm(x, "fro", (0, 1)), x.prod(1), x.logsumexp(-1),
    ]  # fmt: skip


def elementwise_max(x):
    return torch.max(x, x.flip(2)), x.min(x.flip(2)), torch.max(input=x, other=x * 2), x.amax(1).max(x.amin(1))


P_NORMS = (0, 0.5, 1, 2, 3, math.inf, -math.inf, -1, -2)

CASES = [
    everywhere("sum", over(torch.sum), ("sum",)),
    everywhere("mean", over(torch.mean), ("mean",)),
    everywhere("amax of ties", over(torch.amax, DIMS[1:]), ("amax",), fill=ties),
    everywhere("var", over(torch.var, SOME_DIMS), ("var",)),
    case("spellings", spelled, ("sum", "mean", "norm")),
    case("nansum", over(torch.nansum, (None, *SOME_DIMS)), ("nansum",), fill=holes),
    case("nanmean", over(torch.nanmean, (None, *SOME_DIMS)), ("nanmean",), fill=holes),
    case("amin of ties", over(torch.amin, DIMS[1:]), ("amin",), fill=ties),
    case("full max and min of ties", lambda x: (x.max(), x.min(), torch.max(x)), ("max", "min"), fill=ties),
    case("full max of NaN", lambda x: (x.max(), x.min()), ("max", "min"), fill=holes),
    case("max along", over(torch.max, ONE_DIM), ("max",), fill=ties),
    case("min along", over(torch.min, ONE_DIM), ("min",), fill=ties),
    case("max along with NaN", over(torch.max, ONE_DIM), ("max",), fill=holes),
    case("min along with inf", over(torch.min, ONE_DIM), ("min",), fill=infinities),
    case("max of two", elementwise_max, ("max", "min")),
    case("aminmax", lambda x: [torch.aminmax(x, dim=d) for d in (None, 0, 1, 2)], ("aminmax",), fill=ties),
    case("argmax", over(torch.argmax, (None, 0, 1, -1)), ("argmax",), fill=ties, grads=False),
    case("argmin", over(torch.argmin, (None, 0, 1, -1)), ("argmin",), fill=ties, grads=False),
    case("argmax with NaN", over(torch.argmax, (None, 0, 1, -1)), ("argmax",), fill=holes, grads=False),
    case("argmin of -inf alone", over(torch.argmax, (None, 0, 1)), ("argmax",), fill=infinities, grads=False),
    case("std", over(torch.std, SOME_DIMS), ("std",)),
    case("std of equal values", over(torch.std, (0, 1, (0, 1))), ("std",), fill=torch.ones),
    case("var without correction", over(torch.var, SOME_DIMS, correction=0), ("var",)),
    case("var of too few", over(torch.var, (1, (0, 1)), correction=99), ("var",)),
    case("var_mean", over(torch.var_mean, SOME_DIMS), ("var_mean",)),
    case("std_mean", over(torch.std_mean, SOME_DIMS), ("std_mean",)),
    case("prod", over(torch.prod, ONE_DIM), ("prod",)),
    case("prod of all", torch.prod, ("prod",), shape=(3, 5), shard=1),
    case("prod with zeros", lambda x: (x.prod(1), x.prod()), ("prod",), fill=zeros_inside),
    case("logsumexp", over(torch.logsumexp, SOME_DIMS), ("logsumexp",)),
    case("logsumexp of inf", over(torch.logsumexp, (0, 1)), ("logsumexp",), fill=infinities, grads=False),
    case(
        "count_nonzero",
        lambda x: [x.count_nonzero(d) for d in (None, 0, 1, (1, 2))],
        ("count_nonzero",),
        fill=zeros_inside,
        grads=False,
    ),
    case(
        "any, all",
        lambda x: [
            f(x > 0.5, d, keepdim=k) for f in (torch.any, torch.all) for d in (0, 1, (0, 1), ()) for k in (False, True)
        ],
        ("any", "all"),
        grads=False,
    ),
    case(
        "any, all of everything", lambda x: ((x > 9).any(), (x > -9).all(), torch.any(x)), ("any", "all"), grads=False
    ),
    case(
        "vector norms",
        lambda x: [torch.linalg.vector_norm(x, p, d) for p in P_NORMS for d in (0, 1, (1, 2), None)],
        ("vector_norm",),
    ),
    case(
        "vector norms at zero",
        lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3, math.inf)],
        ("vector_norm",),
        fill=torch.zeros,
    ),
    case(
        "linalg.norm",
        lambda x: [
            torch.linalg.norm(x),
            torch.linalg.norm(x, 3, 1),
            torch.linalg.norm(x, "fro", (0, 1)),
            torch.linalg.norm(x, dim=(1, 2), keepdim=True),
        ],
        ("linalg.norm", "norm"),
    ),
    case(
        "matrix norms",
        lambda x: (torch.linalg.norm(x, 1, (0, 1)), torch.norm(x[0], "nuc")),
        ("linalg.norm", "norm"),
        gathers=True,
    ),
    case("normalize", lambda x: [F.normalize(x, p, d) for p in (1.0, 2.0) for d in (0, 1, -1)], ("normalize",)),
    case("normalize zeros", lambda x: F.normalize(x, dim=1), ("normalize",), fill=torch.zeros, grads=False),
    case("dist", lambda x: [torch.dist(x, x.flip(2), p) for p in (1, 2, math.inf)], ("dist",)),
    case("trace", lambda x: (x.trace(), x.t().trace()), ("trace",), shape=(7, 5), shard=0, mesh2d=None),
    case(
        "sum_to_size",
        lambda x: (x.sum_to_size(7, 4), x.sum_to_size((3, 1, 4)), x.sum_to_size(1), x.sum_to_size(3, 7, 4)),
        ("sum_to_size",),
    ),
    case(
        "sum dtype",
        lambda x: (x.float().sum(dtype=torch.float64), x.float().mean(1, dtype=torch.float64)),
        ("sum", "mean"),
    ),
    case(
        "of integers",
        lambda x: (
            x.sum(),
            x.sum(1),
            x.amax(1),
            x.max(1),
            x.prod(1),
            x.float().mean(1),
            x.any(1),
            x.sum(dtype=torch.int32),
            x.argmax(1),
            x.count_nonzero(),
        ),
        ("sum",),
        fill=lambda shape: torch.randint(-3, 4, shape),
        grads=False,
    ),
    case(
        "of booleans",
        lambda x: (x.sum(), x.sum(1), x.any(1), x.all(), x.amax(1), x.max(1), x.amin(0)),
        ("sum",),
        fill=lambda shape: torch.rand(shape) > 0.5,
        grads=False,
    ),
    case(
        "of complex values",
        lambda x: (x.sum(1), x.mean(), x.prod(1), torch.linalg.vector_norm(x, 2, 1)),
        ("sum", "mean"),
        fill=lambda shape: torch.randn(shape, dtype=torch.complex128),
    ),
    case(
        "of nothing",
        lambda x: (x.sum(), x.sum(1), x.mean(1), x.prod(1), x.any(1), x.all(1), x.logsumexp(1), x.norm()),
        ("sum", "mean"),
        shape=(3, 0, 4),
        grads=False,
    ),
    case(
        "no dim of size 0 reduced",
        lambda x: (x.amax(1), x.var(1), x.argmax(1), x.max(1)),
        ("amax", "var"),
        shape=(0, 7, 4),
    ),
    case(
        "second order of sums",
        second_order(lambda x: x.sum(1), lambda x: x.mean((0, 2)), lambda x: x.mean()),
        ("sum", "mean"),
    ),
    case("second order of extrema", second_order(lambda x: x.amax(1), lambda x: x.max(1)[0]), ("amax", "max")),
    case("second order of logsumexp", second_order(lambda x: x.logsumexp(1)), ("logsumexp",)),
    case("second order of prod", second_order(lambda x: x.prod(1)), ("prod",)),
    case(
        "second order of moments",
        second_order(lambda x: x.var(1), lambda x: x.std((0, 1)), lambda x: torch.var_mean(x, 1)),
        ("var", "std"),
    ),
    case("second order of norms", second_order(lambda x: x.norm(dim=1), torch.linalg.norm), ("norm",)),
    case("chained", lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True) * x.sum(), ("mean", "std")),
    case(
        "no_grad", torch.no_grad()(lambda x: (x.sum(1), x.mean(), x.var(1), x.amax(1), x.norm())), ("sum",), grads=False
    ),
    case(
        "of a 1-D tensor",
        lambda x: (x.sum(), x.mean(0), x.amax(-1, True), x.argmax(), x.var(0), x.norm(), x.max(0)),
        ("sum",),
        shape=(7,),
        shard=0,
        mesh2d=None,
    ),
    case(
        "of one value",
        lambda x: (
            [f(x.sum()) for f in (torch.sum, torch.mean, torch.amax, torch.argmax, torch.prod)]
            + [
                x.sum().sum(0),
                x.sum().mean(-1, True),
                x.sum().amax(0),
                x.sum().max(0),
                x.sum().norm(),
                x.sum().logsumexp(0),
            ]
        ),
        ("sum",),
    ),
]

TWO = [
    OpCase(
        "cosine_similarity",
        fn=lambda x, y: [F.cosine_similarity(x, y, d) for d in (0, 1, -1)],
        shape=[SHAPE, SHAPE],
        shard=[1, 1],
        layouts=("uneven", "misaligned", "empty"),
        ranks=(2, 3),
        mesh2d=(0, 1),
        covers=("cosine_similarity",),
    ),
    OpCase(
        "cosine_similarity of broadcast shapes",
        fn=lambda x, y: [F.cosine_similarity(x, y, d) for d in (1, 2)],
        shape=[SHAPE, (7, 1)],
        shard=[1, 0],
        ranks=(2, 3),
        subgroups=False,
        covers=("cosine_similarity",),
    ),
    OpCase(
        "cosine_similarity with a plain tensor",
        fn=lambda x, y: F.cosine_similarity(x, y),
        shape=SHAPE,
        shard=1,
        plain=[(1, 7, 4)],
        ranks=(2, 3),
        subgroups=False,
        covers=("cosine_similarity",),
    ),
    OpCase(
        "pairwise_distance",
        fn=lambda x, y: [F.pairwise_distance(x, y, p) for p in (1.0, 2.0)],
        shape=[SHAPE, SHAPE],
        shard=[1, 2],
        ranks=(2, 3),
        subgroups=False,
        covers=("pairwise_distance",),
    ),
    OpCase(
        "equal, allclose",
        shape=[SHAPE, SHAPE],
        shard=[1, 2],
        ranks=(2, 3),
        grads=False,
        covers=("equal", "allclose"),
        fn=lambda x, y: (torch.equal(x, y), x.equal(x * 1), torch.allclose(x, y), x.allclose(x + 1e-9), x.equal(x[:2])),
    ),
]

test_reductions = op_test(CASES)
test_two_operands = op_test(TWO)


def sharded(full, dim=1, layout="uneven"):
    """`full` cut over the ranks of the task."""
    import dpzoo

    mesh = domain_mesh()
    return dpzoo.scatter(full, mesh, dim=dim, sizes=layout_sizes(full.shape[dim], mesh.size(), layout))


@distributed(ranks=3)
def test_variance_of_a_large_mean_keeps_its_digits():
    full = torch.randn(4, 999) + 1000
    exact = full.double().var(1)
    found = sharded(full).var(1).full_tensor().double()
    assert ((found - exact).abs() / exact).max() < 1e-5
    assert sharded(full).std().dtype is torch.float32


@distributed(ranks=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    full = torch.rand(4, 600).to(dtype)
    x = sharded(full)
    for op in (torch.sum, torch.mean, torch.nanmean, torch.var, torch.std, torch.linalg.vector_norm, torch.logsumexp):
        found, exact = op(x, dim=1).full_tensor(), op(full.double(), dim=1)
        assert found.dtype is dtype
        torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


@distributed(ranks=2)
def test_mean_of_half_precision_does_not_overflow():
    full = torch.full((2, 40), 30000.0, dtype=torch.float16)
    assert sharded(full).mean().item() == 30000.0


@distributed(ranks=2)
def test_autocast_gives_the_dtype_of_torch():
    full = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for op in (torch.sum, torch.mean, torch.var, torch.amax, torch.logsumexp, torch.prod, torch.linalg.vector_norm):
            for x in (full, full.bfloat16()):
                assert op(sharded(x), dim=1).dtype is op(x, dim=1).dtype, op


@distributed(ranks=2)
def test_out_receives_the_result():
    full = torch.randn(3, 8)
    out = torch.empty(3)
    assert torch.sum(sharded(full), 1, out=out) is out
    torch.testing.assert_close(out, full.sum(1))
    values, indices = torch.empty(8), torch.empty(8, dtype=torch.int64)
    torch.max(sharded(full), 0, out=(values, indices))
    assert torch.equal(values, full.max(0)[0])
    assert torch.equal(indices, full.max(0)[1])


BAD = {
    "no such dim": lambda x: x.sum(3),
    "the same dim twice": lambda x: x.mean((1, -2)),
    "mean of integers": lambda x: x.long().mean(),
    "extreme of nothing": lambda x: x[:, :0].amax(1),
    "full max of nothing": lambda x: x[:, :0].max(),
    "argmax of nothing": lambda x: x[:, :0].argmax(1),
    "max over two dims": lambda x: x.max((0, 1)),
    "prod over two dims": lambda x: x.prod((0, 1)),
    "unknown keyword": lambda x: x.sum(dimension=1),
    "var of integers": lambda x: x.long().var(),
    "out of another dtype": lambda x: torch.amax(x, 1, out=torch.empty(3, 4, dtype=torch.int64)),
    "not a size to sum to": lambda x: x.sum_to_size(2, 4),
    "trace of a cube": lambda x: x.trace(),
}


@distributed(ranks=2)
@pytest.mark.parametrize("what", sorted(BAD))
def test_where_torch_raises_every_rank_raises_the_same(what):
    raises_like_torch(BAD[what], torch.randn(SHAPE))


@distributed(ranks=3)
def test_reductions_of_partial_values():
    from dpzoo.shard import Partial

    mesh = domain_mesh()
    x = ShardTensor.from_local(torch.full((2, 3), float(mesh.get_local_rank() - 1)), mesh, [Partial()])
    assert x.sum().item() == 0
    assert x.abs().amax().item() == 0
    assert x.var().item() == 0


@distributed(ranks=2)
def test_one_all_reduce_for_a_sum_and_nothing_for_its_gradient():
    from tests.shard.counting import count_collectives

    x = sharded(torch.randn(3, 8, 4)).requires_grad_()
    with count_collectives() as seen:
        loss = x.sum(1).mean()
    assert seen.calls == 1
    with count_collectives() as seen:
        loss.backward()
        x.sum((0, 2)), x.amax(2), x.var(-1), x.norm(dim=0)
    assert seen.calls == 0


@distributed(ranks=2)
def test_inference_mode():
    full = torch.randn(3, 8)
    with torch.inference_mode():
        assert_parity(lambda x: (x.sum(1), x.var(1), x.max(1), x.norm()), full, 1, grads=False)
