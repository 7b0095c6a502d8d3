"""Indices along the dim that is cut: only what is asked travels; index plain, or cut in any way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpzoo.shard import scatter, strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import (
    OpCase,
    assert_parity,
    distributed,
    domain_mesh,
    expect_error,
    expect_same_error,
    grid_mesh,
    op_test,
)
from dpzoo.testing.derivatives import with_derivatives
from tests.shard.rules.inputs import FEW

ALL = ("even", "uneven", "empty", "misaligned")
K = torch.tensor([4, 1, 16, 1, 8])
GRID = torch.tensor([[0, 16], [3, 3], [9, 12]])
COLUMNS = torch.tensor([[4, 0, 16], [1, 1, 2]])


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _rows(shape: tuple[int, ...]) -> Tensor:
    """Row numbers of a dim of 17."""
    return torch.randint(0, 17, shape)


def _signed(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-17, 17, shape)


def _distinct(shape: tuple[int, ...]) -> Tensor:
    return torch.randperm(17)[: shape[0]]


def _distinct_columns(shape: tuple[int, ...]) -> Tensor:
    return torch.stack([torch.randperm(17)[: shape[0]] for _ in range(shape[1])], 1)


def _reduced(how: str):
    def fn(x, i, s):
        return [
            x.scatter_reduce(0, i, s, how),
            x.scatter_reduce(0, i, s, how, include_self=False),
            (x * 2).scatter_reduce_(0, i, s, how),
        ]

    return fn


def _case(name, fn, shape, shard, fill=None, **options):
    return OpCase(name, fn=fn, shape=shape, shard=shard, fill=fill, **{**FEW, **options})


READ, WRITE, ADD = [_normal, _rows], [_normal, _rows, _normal], "index_add along a cut dim"
CASES = [
    # ------------------------------------------------------------------ reading
    _case("index_select, plain index", lambda x: [x.index_select(0, K), torch.index_select(x, dim=-2, index=K)],
          (17, 6), 0, ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1)),
    _case("index_select, cut index", lambda x, i: x.index_select(0, i), [(17, 6), (9,)], 0, READ, layouts=ALL,
          ranks=(1, 2, 3, 4), subgroups=True, mesh2d=[(0, 1), (0, None)], covers=("index_select along a cut dim",)),
    _case("index_select, index cut by the other axis", lambda x, i: x.index_select(0, i), [(17, 6), (9,)], 0, READ,
          ranks=(), mesh2d=[(0, None), (None, 0)]),
    _case("index_select of a later dim", lambda x, i: x.index_select(1, i), [(2, 17, 3), (9,)], [1, 0], READ,
          mesh2d=[(1, 2), (0, None)]),
    _case("index_select of a vector, of nothing", lambda x: [x.index_select(0, K), x.index_select(0, K[:0])], (17,), 0),
    _case("x[i], cut index of two dims", lambda x, i: [x[i], x[i, :2]], [(17, 4), (9, 3)], 0, [_normal, _signed],
          layouts=ALL, mesh2d=[(0, 1), (0, None)], covers=("take along a cut dim",)),
    _case("x[i], index cut in its second dim", lambda x, i: x[i], [(17, 4), (3, 9)], [0, 1], [_normal, _signed]),
    _case("x[i], plain index", lambda x: [x[GRID], x[K - 17], x[:, K[:2] - 5], x[3:, [0, -1]]], (17, 6), 0,
          ranks=(1, 2, 3, 4)),
    _case("x[:, i]", lambda x, i: x[:, i], [(2, 17, 3), (9, 2)], [1, 0], [_normal, _signed]),
    _case("gather, cut index", lambda x, i: x.gather(0, i), [(17, 4), (9, 4)], 0, READ, layouts=ALL,
          ranks=(1, 2, 3, 4), subgroups=True, mesh2d=[(0, 1), (0, 1)], covers=("gather along a cut dim",)),
    _case("gather, plain index", lambda x: [x.gather(0, COLUMNS), torch.gather(input=x, dim=0, index=K[:, None])],
          (17, 4), 0),
    _case("gather, index cut in another dim", lambda x, i: x.gather(0, i), [(17, 6), (5, 6)], [0, 1], READ),
    _case("gather of a later dim", lambda x, i: x.gather(1, i), [(2, 17, 3), (2, 9, 3)], 1, READ,
          mesh2d=[(1, 2), (1, 2)]),
    _case("gather, shorter index", lambda x, i: x.gather(1, i), [(3, 17, 3), (2, 9, 2)], 1, READ),
    _case("gather by a number", lambda x: x.gather(0, torch.tensor(3)), (17,), 0, gathers=True),
    _case("take_along_dim", lambda x: torch.take_along_dim(x, x.detach().argsort(0), 0), (17, 6), 0),
    # ------------------------------------------------------------------ writing
    _case("index_add", lambda x, i, s: [x.index_add(0, i, s), x.index_add(0, i, s, alpha=2)],
          [(17, 4), (9,), (9, 4)], 0, WRITE, layouts=ALL, ranks=(1, 2, 3, 4), subgroups=True,
          mesh2d=[(0, 1), (0, None), (0, 1)], covers=(ADD,)),
    _case("index_add, plain index and source", lambda x, s: x.index_add(0, K, s), (17, 4), 0, plain=[(5, 4)]),
    _case("index_add, source cut elsewhere", lambda x, i, s: x.index_add(0, i, s), [(17, 6), (9,), (9, 6)], [0, 0, 1],
          WRITE),
    _case("index_add, plain index, cut source", lambda x, s: x.index_add(0, K, s), [(17, 4), (5, 4)], 0),
    _case("index_add of a later dim", lambda x, i, s: x.index_add(1, i, s), [(2, 17, 3), (9,), (2, 9, 3)], [1, 0, 1],
          WRITE, mesh2d=[(1, 2), (0, None), (1, 2)]),
    _case("index_add in place", lambda x, i, s: (x * 2).index_add_(0, i, s) ** 2, [(17, 4), (9,), (9, 4)], 0, WRITE,
          covers=("index_add_ along a cut dim",)),
    _case("index_copy", lambda x, i, s: [x.index_copy(0, i, s), (x * 2).index_copy_(0, i, s)],
          [(17, 4), (9,), (9, 4)], 0, [_normal, _distinct, _normal], layouts=ALL,
          covers=("index_copy along a cut dim", "index_copy_ along a cut dim")),
    _case("scatter_add", lambda x, i, s: [x.scatter_add(0, i, s), (x * 2).scatter_add_(0, i, s)],
          [(17, 4), (9, 4), (9, 4)], 0, WRITE, layouts=ALL, ranks=(1, 2, 3, 4), subgroups=True,
          mesh2d=[(0, 1), (0, 1), (0, 1)], covers=("scatter_add along a cut dim", "scatter_add_ along a cut dim")),
    _case("scatter_add, longer source", lambda x, i, s: x.scatter_add(0, i, s), [(17, 4), (8, 3), (9, 4)], 0, WRITE,
          grads=False),  # torch cannot differentiate it
    _case("scatter_add of a vector", lambda x, s: x.scatter_add(0, K, s), [(17,), (5,)], 0),
    *[_case(f"scatter_reduce {how}", _reduced(how), [(17, 3), (9, 3), (9, 3)], 0, WRITE, layouts=ALL,
            covers=("scatter_reduce along a cut dim", "scatter_reduce_ along a cut dim"))
      for how in ("sum", "mean", "amax", "amin", "prod")],
    _case("scatter", lambda x, i, s: [x.scatter(0, i, s), x.scatter(0, i, 3.0), x.scatter(0, i, value=2.0),
          (x * 2).scatter_(0, i, s)], [(17, 3), (9, 3), (9, 3)], 0, [_normal, _distinct_columns, _normal],
          covers=("scatter along a cut dim", "scatter_ along a cut dim")),
    # ------------------------------------------------------------------ sums over cut rows
    _case("segment sums", lambda i, s: torch.zeros(4, 3).double().index_add(0, i % 4, s), [(17,), (17, 3)], 0,
          [_rows, _normal], layouts=ALL, ranks=(1, 2, 3, 4), mesh2d=[(0, None), (0, 1)],
          covers=("index_add of parts",)),
    _case("segment sums into a plain weight", lambda s, w: w.index_add(0, torch.arange(17) % 4, s, alpha=3), (17, 3), 0,
          plain=[(4, 3)]),
    _case("segment sums of elements", lambda i, s: torch.zeros(4, 3).double().scatter_add(0, i % 4, s),
          [(17, 3), (17, 3)], 0, [_rows, _normal], mesh2d=[(0, 1), (0, 1)], covers=("scatter_add of parts",)),
    _case("mean over segments", lambda i, s: torch.zeros(4, 3).double().index_add(0, i % 4, s)
          / torch.zeros(4, 1).double().index_add(0, i % 4, torch.ones_like(s[:, :1])), [(17,), (17, 3)], 0,
          [_rows, _normal]),
]  # fmt: skip

test_ops = op_test(CASES)


@distributed(ranks=[3])
def test_second_derivatives():
    index = torch.randint(0, 17, (9,))
    x, s = torch.randn(17, 3).double(), torch.randn(9, 3).double()
    assert_parity(with_derivatives(lambda x: x.index_select(0, index) ** 3), [x], [0], ["uneven"], strict=True)
    assert_parity(
        with_derivatives(lambda x, s: x.index_add(0, index, s) ** 3), [x, s], [0, 0], ["uneven", "empty"], strict=True
    )
    assert_parity(with_derivatives(lambda x: x.gather(0, COLUMNS) ** 3), [x], [0], ["uneven"], strict=True)


@distributed(ranks=[3])
def test_only_what_is_asked_travels():
    mesh = domain_mesh()
    x = scatter(torch.randn(999, 5), mesh, 0)
    asked = torch.tensor([0, 500, 998, 1, 2, 3])
    with strict(), count_traffic() as known:
        x[asked]
    assert known.calls == 1
    assert known.nbytes <= 4 * 5 * 4  # at most 4 of the 6 rows lie on one rank
    index = scatter(asked, mesh, 0)
    with strict(), count_traffic() as asking:
        x[index]
    assert asking.calls == 3  # counts, requests, rows
    assert asking.nbytes <= 3 * 3 * 8 + 2 * 8 + 4 * 5 * 4


@distributed(ranks=[1, 2, 3])
def test_an_empty_rank_stays_in_the_graph():
    mesh = domain_mesh()
    x = scatter(torch.randn(2, 3), mesh, 0, requires_grad=True)
    x.index_select(0, torch.tensor([1])).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.tensor([[0.0] * 3, [1.0] * 3]))


@distributed(ranks=[1, 2, 3])
def test_an_index_out_of_range_is_an_error_on_every_rank(ranks: int):
    x = torch.randn(17, 3)
    bad = torch.tensor([0, 17, 3])
    for call in (
        lambda t: t.index_select(0, bad),
        lambda t: t.index_select(0, -1 - bad),
        lambda t: t.gather(0, bad[:, None]),
        lambda t: t[bad],
        lambda t: t[-1 - bad],
        lambda t: t.index_add(0, bad, torch.ones(3, 3)),
        lambda t: t[:, 0].index_add(0, bad, torch.ones(3)),
        lambda t: t.index_copy(0, bad, torch.ones(3, 3)),
        lambda t: t.scatter_add(0, bad[:, None], torch.ones(3, 3)),
    ):
        expect_same_error(call, x, 0)
    if ranks == 1:
        return
    sharded, index = scatter(x, domain_mesh(), 0), scatter(torch.tensor([0, 1, 2, 3, -99]), domain_mesh(), 0)
    expect_error(lambda: sharded.index_select(0, index), IndexError)
    expect_error(lambda: sharded[index], IndexError, "out of bounds")
    expect_error(lambda: sharded.gather(0, index[:, None]), RuntimeError, "out of bounds")


@distributed(ranks=[4])
def test_an_index_out_of_range_on_a_grid_of_ranks():
    mesh = grid_mesh()
    x = scatter(torch.randn(17, 3), mesh, (0, None))
    index = scatter(torch.tensor([0, 1, 2, 3, 4, 99]), mesh, (None, 0))
    expect_error(lambda: x.index_select(0, index), IndexError, mesh=mesh)


@pytest.mark.parametrize("name", ["index_select", "gather", "index_add", "scatter_add"])
@distributed(ranks=[2])
def test_shapes_that_do_not_fit(name: str):
    bad = {
        "index_select": lambda t: t.index_select(0, K[:4].view(2, 2)),
        "gather": lambda t: t.gather(0, K),
        "index_add": lambda t: t.index_add(0, K, torch.ones(4, 3)),
        "scatter_add": lambda t: t.scatter_add(0, torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4)),
    }[name]
    expect_same_error(bad, torch.randn(17, 3), 0)
