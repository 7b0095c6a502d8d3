"""Scans and sorts along every dim, the cut one included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.testing import OpCase, op_test, with_derivatives
from tests.shard.rules.inputs import FEW


def _distinct(shape: tuple[int, ...]) -> Tensor:
    n = torch.Size(shape).numel()
    return torch.randperm(n).reshape(shape).double() / n


def _ties(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 3, shape).double()


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-4, 5, shape)


CASES = [
    # ------------------------------------------------------------------ scans
    OpCase(
        "cumsum over the cut dim",
        fn=lambda x: x.cumsum(1),
        shape=(2, 9, 3),
        shard=1,
        mesh2d=(0, 1),
        covers=("cumsum over a cut dim",),
    ),
    OpCase("cumsum alone", fn=lambda x: x.cumsum(0), shape=(9,), shard=0),
    OpCase("cumsum axis", fn=lambda x: torch.cumsum(x, axis=-2), shape=(2, 9, 3), shard=1, **FEW),
    OpCase("cumsum dtype", fn=lambda x: x.cumsum(0, dtype=torch.float64), shape=(9, 4), shard=0, fill=_whole, **FEW),
    OpCase("cumsum twice", fn=with_derivatives(lambda x: x.cumsum(0)), shape=(9, 3), shard=0, **FEW),
    OpCase("cumsum over another dim", fn=lambda x: x.cumsum(-1), shape=(9, 3), shard=0, covers=("cumsum",), **FEW),
    OpCase("cumprod", fn=lambda x: torch.cumprod(x, dim=1), shape=(2, 9, 3), shard=1, covers=("cumprod",), **FEW),
    OpCase(
        "in place",
        fn=lambda x: (x.clone().cumsum_(0), x.clone().cumprod_(dim=1)),
        shape=(9, 3),
        shard=0,
        covers=("cumsum_", "cumprod_"),
        **FEW,
    ),
    OpCase(
        "logcumsumexp", fn=lambda x: torch.logcumsumexp(x, 1), shape=(2, 9, 3), shard=1, covers=("logcumsumexp",), **FEW
    ),
    OpCase("cummax", fn=lambda x: x.cummax(dim=1), shape=(2, 9, 3), shard=1, fill=_ties, covers=("cummax",), **FEW),
    OpCase("cummin", fn=lambda x: tuple(x.cummin(1)), shape=(2, 9, 3), shard=1, fill=_ties, covers=("cummin",), **FEW),
    OpCase(
        "diff",
        fn=lambda x: (x.diff(dim=1), torch.diff(x, n=2, dim=1), x.diff()),
        shape=(4, 9, 3),
        shard=1,
        covers=("diff",),
        **FEW,
    ),
    OpCase(
        "diff prepend",
        fn=lambda x: x.diff(dim=0, prepend=x[:1], append=x[-2:]),
        shape=(9, 3),
        shard=0,
        covers=("diff with more rows",),
        **FEW,
    ),
    OpCase("glu", fn=lambda x: (F.glu(x, 1), F.glu(x)), shape=(3, 8, 4), shard=1, covers=("glu",)),
    # ------------------------------------------------------------------ sorts
    OpCase(
        "sort",
        fn=lambda x: (x.sort(1), torch.sort(x, 1, True), torch.sort(x)),
        shape=(4, 9, 3),
        shard=1,
        fill=_distinct,
        covers=("sort",),
    ),
    OpCase(
        "sort axis", fn=lambda x: torch.sort(x, axis=0, descending=True), shape=(9, 4), shard=0, fill=_distinct, **FEW
    ),
    OpCase("sort stable", fn=lambda x: torch.sort(x, dim=0, stable=True), shape=(9, 4), shard=0, fill=_ties, **FEW),
    OpCase(
        "argsort",
        fn=lambda x: (x.argsort(1), torch.argsort(x, dim=-1, stable=True)),
        shape=(4, 9),
        shard=1,
        fill=_distinct,
        covers=("argsort",),
        **FEW,
    ),
    OpCase("msort", fn=torch.msort, shape=(9, 4), shard=0, fill=_distinct, covers=("msort",), **FEW),
    OpCase(
        "topk",
        fn=lambda x: (x.topk(2, 1), torch.topk(x, k=3, dim=0, largest=False), x.topk(1)),
        shape=(4, 9, 3),
        shard=1,
        fill=_distinct,
        covers=("topk",),
    ),
    OpCase(
        "median",
        fn=lambda x: (x.median(1), x.median(dim=-1, keepdim=True), torch.median(x, 1, True)),
        shape=(4, 9, 3),
        shard=1,
        fill=_distinct,
        covers=("median",),
        **FEW,
    ),
    OpCase(
        "nanmedian",
        fn=lambda x: torch.nanmedian(x, 1, keepdim=True),
        shape=(4, 9),
        shard=1,
        fill=_distinct,
        covers=("nanmedian",),
        **FEW,
    ),
    OpCase(
        "median of all",
        fn=lambda x: (x.median(), x.nanmedian()),
        shape=(9, 3),
        shard=0,
        fill=_distinct,
        gathers=True,
        **FEW,
    ),
    OpCase(
        "mode",
        fn=lambda x: (torch.mode(x, 1), x.mode(keepdim=True)),
        shape=(4, 9, 3),
        shard=1,
        fill=_ties,
        covers=("mode",),
        **FEW,
    ),
    OpCase(
        "kthvalue",
        fn=lambda x: (x.kthvalue(2, 1), torch.kthvalue(x, k=1, dim=1, keepdim=True), x.kthvalue(3)),
        shape=(4, 9, 3),
        shard=1,
        fill=_distinct,
        covers=("kthvalue",),
        **FEW,
    ),
]

test_along_a_dim = op_test(CASES)
