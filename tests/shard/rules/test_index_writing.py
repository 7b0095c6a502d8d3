"""Writing at indices of an uncut dim: nothing is gathered, whatever else is cut."""

import torch
from torch import Tensor

from dpzoo.testing import OpCase, distributed, expect_same_error, op_test, with_derivatives
from tests.shard.rules.inputs import FEW

K = torch.tensor([4, 1, 0])
ZEROS = torch.zeros(9, 4, dtype=torch.int64)


def _normal(shape):
    return torch.randn(shape, dtype=torch.float64)


def _columns(shape):
    """Numbers of columns of a dim of 6, no two alike in a row: what a scatter writes twice is not defined."""
    return torch.stack([torch.randperm(6)[: shape[1]] for _ in range(shape[0])])


def _any_column(shape):
    return torch.randint(0, 6, shape)


def _scatter(x, i, s):
    return [x.scatter(1, i, s), torch.scatter(x, -1, index=i, src=s * 2), x.scatter(1, i, 3.0)]


def _added(x, i, s):
    return [x.scatter_add(1, i, s), torch.scatter_add(input=x, dim=1, index=i, src=s)]


def _reduced(x, i, s):
    return [x.scatter_reduce(1, i, s, r, include_self=own) for r in ("sum", "mean", "amax") for own in (True, False)]


def _rows(x, s):
    return [x.index_add(1, K, s, alpha=2), x.index_copy(1, K, s), torch.index_reduce(x, 1, K, s, "amax"),
            x.index_fill(-1, K, 2.0), x.index_fill(1, K - 6, torch.tensor(1.0))]  # fmt: skip


def _in_place(x, i, s):
    y = x * 1.5
    y.scatter_(1, i, s)
    y.scatter_add_(1, i, s * 2).index_add_(1, K, s[:, :3])
    y[:, 1:].index_copy_(1, K, s[:, :3])
    y.index_fill_(1, K[:1], 0.5)
    z = (x * 2).scatter_reduce_(1, i, s, "mean")
    return [y.sin(), z, (x * 3).index_reduce_(1, K, s[:, :3], "amax")]


def _set(*index):
    def fn(x, v):
        y = x * 1.5
        y[index] = v
        z = x * 0.5
        z[:, 1:4][index] = v
        return [y * y, z * z]

    return fn


def _put(x, v):
    """The indexed dims come first: the cut one is turned to the end."""
    t, twice = x.movedim(0, -1), K % 2
    return [
        t.index_put((K,), v),
        torch.index_put(t, (K, K[:1] % 2), v[:, 0]),
        t.index_put((twice,), v, accumulate=True),
    ]


TRIPLE = {"shape": [(9, 6), (9, 4), (9, 4)], "shard": 0, "fill": [_normal, _columns, _normal]}
CASES = [
    OpCase("scatter", fn=_scatter, **TRIPLE, covers=("scatter",)),
    OpCase("scatter_add", fn=_added, **{**TRIPLE, "fill": [_normal, _any_column, _normal]}, covers=("scatter_add",),
           layouts=("even", "uneven", "empty", "misaligned"), mesh2d=(0, None)),
    OpCase("scatter_reduce", fn=_reduced, **TRIPLE, covers=("scatter_reduce",), ranks=(3,), subgroups=False),
    OpCase("second derivatives", fn=with_derivatives(lambda x, s: (x**2).scatter_add(1, ZEROS, s**3)),
           shape=[(9, 6), (9, 4)], shard=0, **FEW),
    OpCase("plain sources", fn=lambda x, s: _added(x, torch.arange(36).view(9, 4) % 6, s), shape=(9, 6), shard=0,
           plain=[(9, 4)], **FEW),
    OpCase("rows", fn=_rows, shape=[(9, 6), (9, 3)], shard=0, mesh2d=(0, None),
           covers=("index_add", "index_copy", "index_reduce", "index_fill")),
    OpCase("rows of two cut dims", fn=lambda x, s: x.index_add(1, K, s), shape=[(5, 6, 4), (5, 3, 4)], shard=0,
           mesh2d=(0, 2), **FEW),
    OpCase("in place", fn=_in_place, **TRIPLE,
           **FEW, covers=tuple(f"{n}_" for n in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy",
                                          "index_reduce", "index_fill"))),
    OpCase("set rows", fn=_set(slice(None), torch.tensor([2, 0])), shape=[(9, 6, 2), (9, 2, 2)], shard=0, **FEW),
    OpCase("set by two tensors", fn=_set(slice(None), torch.tensor([2, 0]), torch.tensor([[1], [0]])),
           shape=[(9, 6, 2), (9, 1, 2)], shard=0, **FEW),
    OpCase("set rows to one value", fn=_set(slice(None), torch.tensor([2, -1])), shape=(9, 6, 2), shard=0,
           plain=[(1, 1, 1, 2)], **FEW),
    OpCase("set behind an ellipsis", fn=_set(..., torch.tensor([1, 0])), shape=(9, 6, 2), shard=0, plain=[(2,)], **FEW),
    OpCase("index_put", fn=_put, shape=[(9, 6, 5), (3, 5, 9)], shard=[0, 2], covers=("index_put",)),
    OpCase("index_put in place", fn=lambda x, v: x.movedim(0, -1).clone().index_put_((K,), v).sin(),
           shape=[(9, 6, 5), (5, 9)], shard=[0, 1], covers=("index_put_",), **FEW),
]  # fmt: skip
test_ops = op_test(CASES)


BAD = {
    "scatter": lambda x: x.scatter(1, torch.full((7, 1), 4), 1.0),
    "scatter_add of a cut index": lambda x: torch.zeros(7, 2).scatter_add(1, (x * 0).long() + _last(x, 2), x),
    "scatter of another dtype": lambda x: x.scatter(1, torch.zeros(7, 1, dtype=torch.int64), torch.ones(7, 1).int()),
    "index_add": lambda x: x.index_add(1, torch.tensor([4]), torch.ones(7, 1)),
    "index_add of other rows": lambda x: x.index_add(1, torch.tensor([0]), torch.ones(7, 2)),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([-1]), torch.ones(7, 1)),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([4]), 1.0),
    "index_put": lambda x: x.t().index_put((torch.tensor([4]),), torch.ones(7)),
    "setitem": lambda x: x.clone().__setitem__((slice(None), torch.tensor([4])), 1.0),
    "setitem of another shape": lambda x: x.clone().__setitem__((slice(None), torch.tensor([1])), torch.ones(3)),
}


def _last(x, value: int) -> Tensor:
    out = torch.zeros(7, 4, dtype=torch.int64)
    out[-1, -1] = value
    return out


@distributed(ranks=2)
def test_every_rank_refuses_what_torch_refuses():
    for call in BAD.values():
        expect_same_error(call, torch.randn(7, 4), 0)
