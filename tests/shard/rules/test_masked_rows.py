"""Boolean masks along a cut dim: results of uneven shards whose sizes every rank knows."""

from __future__ import annotations

import torch

from dpzoo.shard import scatter, strict
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_same_error, op_test
from tests.shard.rules.inputs import FEW

ALL = ("even", "uneven", "empty", "empty_last", "misaligned")
EVERY_THIRD = torch.arange(17) % 3 == 0


def _case(name, fn, shape, shard=0, **options):
    return OpCase(name, fn=fn, shape=shape, shard=shard, **{**FEW, "layouts": ALL, **options})


CASES = [
    _case("x[rows]", lambda x: [x[x[:, 0] > 0], x[x.sum(1) > 100], x[(x[:, 1] > 0,)]], (17, 4), ranks=(1, 2, 3, 4),
          subgroups=True, mesh2d=(0, 1), covers=("getitem by a mask",)),
    _case("x[rows], plain mask", lambda x: x[EVERY_THIRD], (17, 4), mesh2d=(0, 1)),
    _case("plain[rows]", lambda m, w: w[m > 0], (17,), plain=[(17, 4)]),
    _case("x[rows], mask cut elsewhere", lambda x, m: x[m > 0], [(17, 4), (17,)]),
    _case("x[elements]", lambda x: [x[x > 0], x.masked_select(x > 0), torch.masked_select(input=x, mask=x < 0)],
          (17, 4), covers=("masked_select",)),
    _case("x[elements of two dims]", lambda x: x[x.sum(2) > 0], (17, 2, 3), mesh2d=(0, 2)),
    _case("nonzero", lambda x: [torch.nonzero(x > 0), (x > 0).nonzero(), (x[:, 0] > 0).nonzero()], (17, 4),
          covers=("nonzero",)),
    _case("nonzero as a tuple", lambda x: [*torch.nonzero(x > 0, as_tuple=True), *torch.where(x > 0)], (17, 4),
          covers=("where of a condition",)),
    _case("select, then work", lambda x: (x[x[:, 0] > 0] * 2).sum(0) + x[x[:, 0] > 0].mean(), (17, 4)),
    _case("a mask of later dims is gathered", lambda x: [x[:, x[0] > 0], x[x > 0]], (4, 17), 1, gathers=True),
]  # fmt: skip

test_ops = op_test(CASES)


@distributed(ranks=[2, 3])
def test_one_number_per_rank_travels():
    x = scatter(torch.randn(100, 3), domain_mesh(), 0)
    mask = x[:, 0] > 0
    with strict(), count_traffic() as traffic:
        chosen = x[mask]
    assert (traffic.calls, traffic.nbytes) == (1, 8)
    assert chosen.shape[0] == int(mask.sum())


@distributed(ranks=[2])
def test_a_mask_of_another_length():
    expect_same_error(lambda t: t[torch.zeros(16, dtype=torch.bool)], torch.randn(17, 3), 0)
