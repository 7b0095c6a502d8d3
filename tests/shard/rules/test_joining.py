"""cat, stack and their relatives along cut and uncut dims, with parts that are sharded, whole, plain or empty."""

import pytest
import torch

import dpzoo
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test
from tests.shard.rules.inputs import raises_like_torch


def case(name, fn, shape, shard, covers=("cat along a cut dim",), **options):
    options = {"ranks": (2, 3), "subgroups": False, "layouts": ("uneven", "misaligned", "empty")} | options
    return OpCase(name, fn=fn, shape=shape, shard=shard, covers=covers, **options)


def every_dim(op):
    return lambda *xs: [op(xs, dim=d) for d in range(-1, xs[0].ndim)]


def with_pieces(x):
    """A class token before, padding after, pieces of itself between."""
    token = torch.ones(2, 1, 3, dtype=x.dtype)
    return [
        torch.cat((token, x), 1), torch.cat((x, token), 1), torch.cat((token, x, token, x[:, 2:4], token), 1),
        torch.cat((x[:, :0], x), 1),
        torch.cat((x, torch.empty(0)), 1), torch.cat((x[:, 4:], x[:, :4]), dim=1), torch.cat([x], 1),
        torch.concat((x, x), axis=1),
        torch.concatenate((token, token)), torch.cat((x.float(), x), 1), torch.cat((x, x[:, 0, None], x[:, -1:]), -2),
    ]  # fmt: skip


def named_joins(x):
    return [
        torch.hstack((x, x)), torch.vstack((x, x[:1])), torch.dstack((x, x)), torch.row_stack((x, x)),
        torch.column_stack((x, x)),
        torch.hstack((x[0, 0], x[1, 1])), torch.vstack((x[0, 0], x[1, 1])),
        torch.column_stack((x[:, 0, 0], x[:, 1])), torch.hstack([x[:, 1:], x]),
        torch.stack(list(x)), torch.stack(x.unbind(1), 1), torch.stack(x.unbind(-1), dim=-1),
        torch.stack([x[0, 0, 0], x[1, 1, 1]]),
    ]  # fmt: skip


CASES = [
    case(
        "cat", every_dim(torch.cat), [(2, 7, 3), (2, 7, 3)], [1, 1], ranks=(1, 2, 3, 4), subgroups=True, mesh2d=(0, 1)
    ),
    case(
        "cat of three",
        lambda a, b, c: torch.cat((a, b, c), 1),
        [(2, 7, 3), (2, 5, 3), (2, 1, 3)],
        [1, 1, 1],
        mesh2d=(1, 2),
    ),
    case("cat of other layouts", every_dim(torch.cat), [(2, 7, 3), (2, 7, 3)], [1, 2], mesh2d=[(1, 2), (2, 0)]),
    case(
        "cat with a plain weight",
        lambda x, w: (torch.cat((w, x), 1), torch.cat((x, w), 1), torch.cat((x, x.flip(0), w.expand(2, 1, 3)), 1)),
        (2, 7, 3),
        1,
        plain=[(2, 1, 3)],
        mesh2d=(1, 2),
    ),
    case(
        "cat of features with a plain weight",
        lambda x, w: (torch.cat((x, w), -1), torch.cat((w, x), 2)),
        (2, 7, 3),
        1,
        ("cat",),
        plain=[(2, 7, 2)],
        mesh2d=(1, 0),
    ),
    case("pieces", with_pieces, (2, 7, 3), 1, mesh2d=(0, 1)),
    case("named joins", named_joins, (2, 3, 4), 1, ("hstack", "stack"), mesh2d=(0, 1)),
    case(
        "stack",
        every_dim(torch.stack),
        [(2, 7, 3), (2, 7, 3)],
        [1, 1],
        ("stack",),
        ranks=(1, 2, 3, 4),
        subgroups=True,
        mesh2d=(0, 1),
    ),
    case(
        "stack with a plain weight",
        lambda x, w: (torch.stack((x, w), 1), torch.stack([w, x], dim=-1)),
        (2, 7),
        1,
        ("stack",),
        plain=[(2, 7)],
    ),
    case(
        "of integers",
        lambda x: (torch.cat((x, x), 1), torch.stack((x, x)), torch.cat((x, x > 0), 1), torch.hstack((x, x.bool()))),
        (2, 7),
        1,
        fill=lambda shape: torch.randint(-2, 3, shape),
        grads=False,
    ),
    case(
        "of two dtypes",
        lambda x: (torch.cat((x.float(), x), 0), torch.stack((x, x.float())), torch.stack((x.float(), x))),
        (2, 7),
        1,
        ("stack", "cat along a cut dim"),
    ),
    case(
        "of nothing",
        lambda x: (
            torch.cat((x, x), 1),
            torch.cat((x, x), 0),
            torch.stack((x, x)),
            torch.cat((x, x.new_ones(2, 3)), 1),
        ),
        (2, 0),
        1,
    ),
    case(
        "of empty vectors",
        lambda x: (torch.cat((x, x)), torch.cat([x[:0], x]), torch.cat([x[:0]])),
        (0,),
        0,
    ),
    case("of an empty vector with others", lambda x: torch.cat((x, torch.ones(3, 2)), 1), (0,), 0, grads=False),
    case(
        "second order",
        lambda x, y: torch.autograd.grad(
            (torch.cat((x, y), 1) ** 3).sum() + (torch.stack((x, y)) ** 3).sum(), (x, y), create_graph=True
        ),
        [(2, 7), (2, 7)],
        [1, 1],
    ),
    case(
        "results are independent",
        lambda x: torch.cat((x, x * 2), 1).mul_(3) + torch.stack((x, x), 1).add_(1).flatten(1),
        (2, 7),
        1,
    ),
]

test_joining = op_test(CASES)

BAD = {
    "cat of other shapes": lambda x: torch.cat((x, x[:, :, :2]), 1),
    "cat of other ndim": lambda x: torch.cat((x, x[0]), 1),
    "cat of nothing": lambda x: torch.cat([], 0),
    "cat no such dim": lambda x: torch.cat((x, x), 3),
    "stack of other shapes": lambda x: torch.stack((x, x[:, 1:])),
    "stack no such dim": lambda x: torch.stack((x, x), 4),
    "cat of a number": lambda x: torch.cat((x, 1)),
}


@distributed(ranks=2)
@pytest.mark.parametrize("what", sorted(BAD))
def test_where_torch_raises_every_rank_raises_the_same(what):
    raises_like_torch(BAD[what], torch.randn(2, 7, 3))


@distributed(ranks=3)
def test_a_class_token_stays_on_the_first_rank_and_moves_nothing():
    from tests.shard.counting import count_collectives

    x = dpzoo.scatter(torch.randn(2, 9, 4), domain_mesh(), dim=1, sizes=(3, 4, 2))
    token = torch.zeros(2, 1, 4)
    with count_collectives() as seen:
        y, z = torch.cat((token, x), 1), torch.cat((x, token), 1)
        torch.cat((x, x), 2), torch.stack((x, x), 1)
    assert y._spec.sizes == ((4, 4, 2),)
    assert z._spec.sizes == ((3, 4, 3),)
    assert seen.calls == 0
