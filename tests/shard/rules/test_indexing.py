"""Reading and writing by every kind of index."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, nn

from dpzoo.shard import ShardTensor
from dpzoo.testing import OpCase, assert_parity, distributed, expect_error, op_test
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut
from tests.shard.rules.inputs import numbers as _numbers


def _rows(shape: tuple[int, ...]) -> Tensor:
    """Row numbers of a dim of 9."""
    return torch.randint(-9, 9, shape)


def _front(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 4, shape)


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _set(index, value=2.0):
    """Write by an index into a copy; `value` None: the second tensor."""

    def fn(x, *others):
        y = x * 1.5
        y[index(y) if callable(index) else index] = others[0] if value is None else value
        return y * y

    return fn


def _set_case(name, index, values=None, dim=None, shape=(9, 6, 2), shard=0, **options):
    """`values`: the shape of a plain value, or, with `dim`, of one that is cut there."""
    others, dims = ([values], [dim]) if dim is not None else ([], [])
    plain = [values] if values is not None and dim is None else []
    fn = _set(index, 2.0 if values is None else None)
    return OpCase(name, fn=fn, shape=[shape, *others], shard=[shard, *dims], plain=plain, **{**FEW, **options})


BASIC = [
    3, -1, slice(2, 5), slice(None, -4), slice(1, 8, 3), slice(3, 3), slice(20, 30), ..., None, (), (3, 2), (3, 2, 1),
    (slice(None), 3), (..., 1), (None, slice(1, 3)), (slice(1, 8), None, 2, ...), (2, ..., -1), (slice(2, 6, 2),
    slice(4, 1)),
]  # fmt: skip
K, J = torch.tensor([4, 1, 1]), torch.tensor([[0], [2]])

CASES = [
    OpCase("basic", fn=lambda x: [x[i] for i in BASIC], shape=(9, 6, 2), shard=0, mesh2d=(0, 1), covers=("getitem",)),
    OpCase("basic over another dim", fn=lambda x: [x[i] for i in BASIC], shape=(9, 6, 2), shard=1, **FEW),
    OpCase("one index tensor", fn=lambda x: [x[:, K], x[..., K, :], x[:, [5, -1]], x[:, J], x[2:7, K], x[None, :, K,
           1:]],
           shape=(9, 6, 2), shard=0, mesh2d=(0, 2), covers=("take",)),
    OpCase("index tensors side by side", fn=lambda x: [x[:, K, J], x[:, K, [1, 0, 1]], x[:, J, :1]], shape=(9, 6, 3),
           shard=0,
           **FEW),
    OpCase("a cut index", fn=lambda x, i: [x[i], x[i, :2]], shape=[(9, 4), (5, 3)], shard=[1, 0], fill=[_normal,
           _rows], **FEW),
    OpCase("a plain table", fn=lambda i, w: w[i] * 2, shape=(5, 3), shard=0, plain=[(9, 4)], fill=[_rows, _normal],
           mesh2d=(0, 1)),
    OpCase("a plain table with two indices", fn=lambda i, w: w[i, i], shape=(5,), shard=0, plain=[(9, 9)],
           fill=[_rows, _normal], **FEW),
    OpCase("the cut dim by a tensor", fn=lambda x: [x[K], x[[1, -1]], x[K, :, 1], x[J]], shape=(9, 6, 2), shard=0,
           gathers=True),
    OpCase("the only dim by a tensor", fn=lambda x: x[K], shape=(9,), shard=0, gathers=True, **FEW),
    OpCase("apart", fn=lambda x: [x[K, :, torch.tensor([0, 1, 1])], x[2, :, torch.tensor([1, 0])]], shape=(9, 6, 2),
           shard=0,
           gathers=True, **FEW),
    OpCase("masks", fn=lambda x: [x[x > 0], x[x[:, 0, 0] > 0], x[:, torch.tensor([True, False] * 3)], x[True]],
           shape=(9, 6, 2), shard=0, gathers=True, mesh2d=(0, 1)),
    OpCase("nonzero", fn=lambda x: [torch.nonzero(x > 0), *torch.where(x > 0), (x > 0).nonzero(as_tuple=True)],
           shape=(9, 4),
           shard=0, gathers=True, **FEW),
    OpCase("masked_select", fn=lambda x: x.masked_select(x > 0), shape=(9, 4), shard=0, gathers=True, **FEW),
    OpCase("index_select", fn=lambda x: [x.index_select(1, K), torch.index_select(input=x, dim=-2, index=K)],
           shape=(9, 6, 2),
           shard=0, covers=("index_select",), mesh2d=(0, 2)),
    OpCase("index_select over the cut dim", fn=lambda x: x.index_select(0, K), shape=(9, 6), shard=0, **FEW),
    OpCase("gather", fn=lambda x, i: [x.gather(1, i), torch.gather(input=x, dim=-1, index=i)], shape=[(9, 4), (9, 3)],
           shard=[0, 0], fill=[_normal, _front], layouts=("even", "uneven", "empty", "misaligned"), covers=("gather",)),
    OpCase("gather shorter", fn=lambda x: x.gather(1, torch.tensor([[0, 1], [2, 3]])), shape=(9, 4), shard=0,
           gathers=True, **FEW),
    OpCase("take_along_dim", fn=lambda x, i: [torch.take_along_dim(x, i, 1), torch.take_along_dim(x, i[:1] - 4, dim=1),
           torch.take_along_dim(x, i.flatten())], shape=[(9, 4), (9, 3)], shard=[0, 0], fill=[_normal, _front],
           gathers=True,
           covers=("take_along_dim",), **FEW),
    OpCase("take", fn=lambda x: x.take(torch.tensor([3, 20, 3])), shape=(9, 4), shard=0, gathers=True, **FEW),
    OpCase("select", fn=lambda x: [x.select(0, 4), torch.select(x, -1, 1), x.select(dim=1, index=-1)], shape=(9, 6,
           2), shard=0,
           mesh2d=(0, 1), covers=("select",)),
    OpCase("split", fn=lambda x: [*x.split(4), *torch.split(x, [1, 5, 3], dim=0), *x.split(4, dim=1),
           *torch.split(tensor=x, split_size_or_sections=3, dim=1)], shape=(9, 6), shard=0, mesh2d=(0, 1),
           covers=("split",)),
    OpCase("chunk", fn=lambda x: [*x.chunk(4), *torch.chunk(x, 2, dim=-1), *x.tensor_split(4), *x.tensor_split((2, 7),
           dim=0),
           *torch.hsplit(x, 3), *x.vsplit([2, 3]), x.narrow(0, 2, 5), torch.narrow(x, 1, -2, 2),
           *x.split_with_sizes([4, 5])],
           shape=(9, 6), shard=0, covers=("narrow",), **FEW),
    OpCase("unbind", fn=lambda x: [*x.unbind(), *x.unbind(dim=1), *iter(x)], shape=(4, 3), shard=0,
           covers=("unbind",), **FEW),
    OpCase("diagonal", fn=lambda x: [x.diagonal(), torch.diagonal(x, 1, -1, 0), x.diagonal(offset=-2, dim1=0, dim2=1)],
           shape=(9, 6), shard=0, covers=("diagonal",), **FEW),
    OpCase("diagonal of two cut dims", fn=lambda x: x.diagonal(1), shape=(9, 6, 3), shard=2, mesh2d=(0, 1), ranks=(2,),
           gathers=True, covers=("diagonal rule",)),
    # ------------------------------------------------------------------ writing
    *[_set_case(f"set {k}", index) for k, index in enumerate(BASIC)],
    _set_case("set a row", 3, ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1), covers=("setitem",)),
    _set_case("set rows by plain", slice(2, 5), (3, 6, 2), mesh2d=(0, 1), ranks=(1, 2, 3, 4), subgroups=True),
    _set_case("set rows by a plain row", slice(1, 8, 3), (6, 1), mesh2d=(0, 1)),
    _set_case("set a row by plain with leading ones", 3, (1, 1, 6, 2)),
    _set_case("set an element by plain", (3, 2, 1), ()),
    _set_case("set a column by plain", (slice(None), 3), (9, 2)),
    _set_case("set none by plain", slice(3, 3), (1, 6, 2)),
    _set_case("set rows by cut rows", slice(2, 5), (3, 6, 2), 0, layouts=("even", "uneven", "empty", "misaligned")),
    _set_case("set rows, cut across", slice(1, 8, 3), (3, 6, 2), 1),
    _set_case("set a row by a cut row", 4, (6, 2), 0, mesh2d=[(0, 1), (0, 1)]),
    OpCase("set by its own rows", fn=lambda x: _overlapping(x * 2), shape=(9, 6), shard=0, **FEW),
    _set_case("set a mask", lambda y: y > 0, mesh2d=(0, 1)),
    _set_case("set masked rows", lambda y: y[:, 0, 0] > 0),
    _set_case("set masked rows, plain mask", torch.arange(9) % 2 == 0),
    _set_case("set a mask by a plain scalar", lambda y: y.detach() > 0, ()),
    _set_case("set a mask by values", lambda y: torch.arange(9) < 3, (3, 6, 2), gathers=True),
    _set_case("set by an index tensor", (slice(None), K)),
    _set_case("set rows by an index tensor", torch.tensor([4, 1]), (2, 6, 2), gathers=True),
    _set_case("set by index tensors", (torch.tensor([4, 1]), torch.tensor([0, 2])), (2, 2), gathers=True),
    _set_case("set by a list", [4, 1], gathers=True),
    _set_case("set by a list, cut values", [4, 1], (2, 6, 2), 1, gathers=True),
    _set_case("set by a 0-d tensor", torch.tensor(3), gathers=True),
    _set_case("set by True", True, gathers=True),
    # ------------------------------------------------------------------ families without a rule
    OpCase("scatter shorter", fn=lambda x, w: [x.scatter(0, torch.tensor([[1, 2, 3]]), w),
           x.scatter_add(0, torch.tensor([[1, 1, 3]]), w),
           x.scatter_reduce(1, torch.tensor([[1, 1, 3]]), w, "amax"), torch.scatter(x, 0, torch.tensor([[1]]), 2.0)],
           shape=(9, 6), shard=0, plain=[(1, 3)], gathers=True, mesh2d=(0, 1)),
    OpCase("index writes", fn=lambda x, w: [x.index_add(0, K[:2], w, alpha=2), x.index_copy(0, K[:2], w),
           x.index_fill(0, K, 2.0),
           x.index_put((K[:2],), w), x.index_put((K[1:],), w, accumulate=True), torch.index_reduce(x, 0, K[:2], w,
           "mean")],
           shape=(9, 6), shard=0, plain=[(2, 6)], gathers=True, mesh2d=(0, 1)),
    OpCase("slice writes", fn=lambda x, w: [x.slice_scatter(w, 0, 2, 4), x.select_scatter(w[0], 0, 3),
           x.masked_scatter(x > 0, x * 2)],
           shape=(9, 6), shard=0, plain=[(2, 6)], gathers=True, **FEW),
    OpCase("values cut", fn=lambda x, v: x.index_add(0, K[:2], v), shape=[(9, 6), (2, 6)], shard=[0, 1], gathers=True,
           **FEW),
]  # fmt: skip


def _overlapping(y):
    y[0:4] = y[4:8]
    y[5] = y[2] * 2
    y[:, 0], y[:, 1] = y[:, 1].clone(), y[:, 0].clone()
    return y


test_ops = op_test(CASES)


@distributed(ranks=3)
def test_errors_of_torch():
    x = _cut(_numbers(7, 3))
    for index in (7, -8, (0, 3), (slice(None), -4)):
        expect_error(lambda i=index: x[i], IndexError, "out of bounds|out of range")
        expect_error(lambda i=index: operator.setitem(x, i, 1.0), IndexError, "out of bounds|out of range")
    expect_error(lambda: x[0, 0, 0], IndexError, "too many indices")
    expect_error(lambda: x[torch.ones(5, dtype=torch.bool)], IndexError, "mask")
    expect_error(lambda: operator.setitem(x, torch.ones(5, dtype=torch.bool), 1.0), IndexError, "mask")
    expect_error(lambda: operator.setitem(x, slice(2, 5), torch.ones(2, 3)), RuntimeError, "shape|size|match")
    expect_error(lambda: operator.setitem(x, 0, [1, 2, 3]), TypeError, "")
    expect_error(lambda: x[::-1], ValueError, "step must be greater than zero")
    expect_error(lambda: x["a"], (IndexError, TypeError, ValueError), "")


@distributed(ranks=2)
def test_basic_indices_are_views_of_the_shard():
    x = _cut(_numbers(7, 3), sizes=(4, 3)) * 1
    for view in (x[2:5], x[:, 1], x[None], x[..., :2], x[::2]):
        assert view._is_view()
        assert view._local_tensor.untyped_storage()._cdata == x._local_tensor.untyped_storage()._cdata
    assert x[2:5]._spec.sharding_shapes()[0] == ((2, 3), (1, 3))


@distributed(ranks=2)
def test_a_table_with_a_cut_index_gives_a_cut_result():
    table, index = torch.randn(5, 4), _cut(torch.tensor([4, 0, 1, 2, 2]))
    assert isinstance(table[index], ShardTensor)
    assert torch.equal(table[index].full_tensor(), table[index.full_tensor()])
    assert table[index].placements == index.placements


class _ClassToken(nn.Module):
    """What vision models do with indices: a token put before and read off, masked tokens replaced,
    positions looked up."""

    def __init__(self):
        super().__init__()
        self.token, self.mask = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
        self.positions = nn.Embedding(10, 4)

    def forward(self, x, masked):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions.weight[None, : x.shape[1]]
        x = torch.where(masked[..., None], self.mask, x[:, 1:])
        x[:, 0] = x[:, 0] * 2
        return x[:, 0], x[:, 1:].mean(1)


@distributed(ranks=[2, 3])
def test_a_module_that_indexes():
    for sizes in ("even", "uneven", "empty"):
        assert_parity(_ClassToken(), [torch.randn(2, 9, 4), torch.rand(2, 9) > 0.5], [1, 1], sizes, strict=True)
