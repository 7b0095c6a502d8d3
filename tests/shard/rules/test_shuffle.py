"""roll, flip, repeat, triangles and their kind."""

import pytest
import torch

from dpzoo.testing import distributed, op_test
from tests.shard.rules.inputs import raises_like_torch
from tests.shard.rules.rows import SHAPE, case, everywhere


def rolls(x):
    return [
        x.roll(2, 1), x.roll(-3, 1), x.roll(7, 1), x.roll(100, -2), x.roll(0, 1), x.roll((1, -2), (0, 1)),
        x.roll((1, 2), (1, 1)), torch.roll(x, 1, 2),
        torch.roll(input=x, shifts=(3, 1, 2), dims=(1, 0, 2)),
    ]  # fmt: skip


def flips(x):
    return [
        x.flip(1),
        x.flip(0, 1),
        x.flip((1, 2)),
        torch.flip(x, dims=[-2]),
        x.flip(0, 1, 2),
        x.flip(()),
        x.fliplr(),
        torch.flipud(x),
    ]


def repeats(x):
    return [
        x.repeat(1, 3, 1), x.repeat(2, 1, 2), x.repeat((2, 2, 2)), x.repeat(2, 1, 2, 1), x.repeat(1, 1, 1),
        x.tile(2), x.tile((2, 1)), torch.tile(x, (2, 3, 1)),
        x.tile(2, 1, 1, 1), x.repeat_interleave(2, 1), x.repeat_interleave(3, dim=0),
        torch.repeat_interleave(x, 2, dim=-1), x.repeat(1, 0, 1), x.repeat_interleave(0, 1),
    ]  # fmt: skip


CASES = [
    everywhere("roll", rolls, ("roll",)),
    case(
        "as one long vector",
        lambda x: (x.roll(5), torch.roll(x, shifts=-1), x.repeat_interleave(2)),
        ("roll", "repeat_interleave"),
        mesh2d=None,
    ),
    everywhere("flip", flips, ("flip",)),
    everywhere("repeat", repeats, ("repeat", "repeat_interleave")),
    case(
        "repeat_interleave by a list",
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1, 3, 1, 0]), 1),
        ("repeat_interleave",),
        gathers=True,
    ),
    case("rot90", lambda x: [torch.rot90(x, k, (0, 2)) for k in range(-1, 4)], ("rot90",), mesh2d=None),
    case("rot90 of a cut dim", lambda x: [torch.rot90(x, k, (1, 2)) for k in range(4)], ("rot90",), mesh2d=None),
    case(
        "triangles",
        lambda x: [op(x, k) for op in (torch.tril, torch.triu) for k in (-9, -2, 0, 3, 9)],
        ("tril", "triu"),
        mesh2d=(1, 2),
    ),
    case(
        "triangles of another cut dim",
        lambda x: (x.tril(), x.triu(diagonal=1), x.mT.tril(-1)),
        ("tril", "triu"),
        shard=2,
    ),
    case("triangles in place", lambda x: ((x * 1).tril_(1), (x * 2).triu_()), ("tril_", "triu_")),
    case(
        "of integers",
        lambda x: (x.roll(2, 1), x.flip(1), x.repeat(1, 2, 1), x.tril(), (x > 0).triu(), (x > 0).flip(1)),
        ("roll",),
        fill=lambda shape: torch.randint(-2, 3, shape),
        grads=False,
    ),
    case(
        "of nothing",
        lambda x: (x.roll(2, 1), x.flip(1), x.repeat(1, 2, 1), x.tril(), x.roll(1)),
        ("roll",),
        shape=(3, 0, 4),
    ),
    case(
        "second order",
        lambda x: torch.autograd.grad(
            sum((v**3).sum() for v in (x.roll(2, 1), x.flip(1), x.repeat(1, 2, 1), x.tril())), x, create_graph=True
        ),
        ("roll", "flip", "repeat", "tril"),
    ),
    case(
        "shifted windows",
        lambda x: x.roll((-2, -1), (1, 2)).unflatten(1, (2, 4)).mean(2).repeat_interleave(4, 1).roll((2, 1), (1, 2)),
        ("roll",),
        shape=(2, 8, 4),
        mesh2d=(1, 2),
    ),
]

test_shuffle = op_test(CASES)

BAD = {
    "roll without dims of two": lambda x: x.roll((1, 2)),
    "roll no such dim": lambda x: x.roll(1, 3),
    "roll of other lengths": lambda x: x.roll((1, 2), (1,)),
    "flip the same dim twice": lambda x: x.flip(1, -2),
    "flip no such dim": lambda x: x.flip(3),
    "repeat too few": lambda x: x.repeat(2, 2),
    "repeat negative": lambda x: x.repeat(1, -1, 1),
    "repeat_interleave negative": lambda x: x.repeat_interleave(-1, 1),
    "repeat_interleave no such dim": lambda x: x.repeat_interleave(2, 3),
    "tril of a vector": lambda x: x[0, 0].tril(),
    "rot90 of one dim": lambda x: torch.rot90(x, 1, (1, 1)),
}


@distributed(ranks=2)
@pytest.mark.parametrize("what", sorted(BAD))
def test_where_torch_raises_every_rank_raises_the_same(what):
    raises_like_torch(BAD[what], torch.randn(SHAPE))
