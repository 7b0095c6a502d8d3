"""Reshapes of sharded tensors: merges and splits of cut dims, with borders that fit and borders that do not."""

import pytest
import torch
from torch import nn

import dpzoo
from dpzoo.shard import MissingShardPatch, Replicate, Shard, ShardTensor, reset_warnings, strict
from dpzoo.testing import OpCase, distributed, domain_mesh, grid_mesh, op_test
from tests.shard.counting import count_collectives


def case(name, fn, shape, shard, covers=("reshape",), **options):
    options = {"ranks": (2, 3, 4), "subgroups": False, "layouts": ("even", "uneven", "empty")} | options
    return OpCase(name, fn=fn, shape=shape, shard=shard, covers=covers, **options)


def there_and_back(size):
    """To another shape, something that depends on the place, and back."""

    def run(x):
        y = x.reshape(size)
        weight = torch.arange(y.numel(), dtype=torch.float64).reshape(y.shape)
        return y, (y * weight).reshape(x.shape)

    return run


def spelled(x):
    return [
        x.view(2, 12, 5), x.view((24, 5)), x.view(-1, 5), x.view(size=(2, 60)), x.reshape(24, 5),
        torch.reshape(x, (8, -1)),
        torch.reshape(input=x, shape=(120,)), x.flatten(), x.flatten(1), torch.flatten(x, start_dim=0, end_dim=1),
        x.ravel(), x.flatten(-2, -1),
        x.unflatten(1, (3, 4)), torch.unflatten(x, 1, (-1, 2)), x.unflatten(-1, (5, 1)), x.view_as(x.reshape(4, 30)),
        x.reshape_as(x[:, :, :, None]),
        nn.Flatten()(x), nn.Unflatten(1, (2, 6))(x), x.view(2, 1, 12, 1, 5), x.reshape(2, 12, 5),
    ]  # fmt: skip


def of_other_orders(x):
    """Reshapes of tensors that are not contiguous."""
    return [
        x.transpose(1, 2).reshape(2, -1), x.permute(2, 0, 1).reshape(10, 12), x.mT.flatten(),
        x[:, 1:9].reshape(-1, 5), x[:, ::2].reshape(2, 30),
        x[..., 1:4].flatten(1), x.transpose(0, 1).reshape(12, 10), x.expand(3, 2, 12, 5).reshape(6, 12, 5),
        x.transpose(0, 1).contiguous().view(12, 10),
    ]  # fmt: skip


CASES = [
    case(
        "spellings",
        spelled,
        (2, 12, 5),
        1,
        ("reshape", "reshape_as", "flatten", "unflatten"),
        ranks=(1, 2, 3, 4),
        subgroups=True,
    ),
    case("of other orders", of_other_orders, (2, 12, 5), 1),
    case("batch merges with a cut dim", there_and_back((24, 5)), (2, 12, 5), 1),
    case("large batch merges with a cut dim", there_and_back((60, 2)), (5, 12, 2), 1),
    case("batch of one", there_and_back((12, 5)), (1, 12, 5), 1),
    case("all dims", there_and_back((120,)), (2, 12, 5), 1),
    case("all dims, first cut", there_and_back((120,)), (12, 2, 5), 0),
    case(
        "split at borders that do not fit",
        there_and_back((2, 4, 3, 5)),
        (2, 12, 5),
        1,
        layouts=("uneven", (5, 7), (1, 4, 7), (5, 1, 0, 6)),
    ),
    case("split into few", there_and_back((2, 2, 6, 5)), (2, 12, 5), 1),
    case("regroup", there_and_back((9, 4)), (4, 9), 0),
    case("regroup around", there_and_back((3, 8, 2)), (3, 4, 4), 1),
    case("split of a last dim", there_and_back((2, 5, 4, 3)), (2, 5, 12), 2),
    case(
        "heads",
        lambda x: x.view(2, 6, 4, 3).transpose(1, 2).reshape(8, 6, 3).view(2, 4, 6, 3).transpose(1, 2).flatten(2),
        (2, 6, 12),
        1,
    ),
    case("sizes of zero", lambda x: (x.reshape(0, 3), x.reshape(4, 0), x.flatten(), x.view(2, 0, 6)), (2, 0, 6), 1),
    case("sizes of one", lambda x: (x.reshape(1, 1), x.flatten(), x.reshape(()), x.reshape(1, 1, 1, 1)), (1, 1, 1), 1),
    case(
        "second order",
        lambda x: torch.autograd.grad(
            (x.reshape(24, 5) ** 3).sum() + (x.unflatten(1, (4, 3)) ** 3).sum(), x, create_graph=True
        ),
        (2, 12, 5),
        1,
    ),
    case(
        "two dims cut, not merged",
        lambda x: (x.view(2, 6, 2, 2, 4, 3), x.flatten(0, 0), x.unflatten(1, (6, 2))),
        (2, 12, 8, 3),
        1,
        ranks=(),
        mesh2d=(1, 2),
    ),
    case("two cut dims merged", there_and_back((2, 96, 3)), (2, 12, 8, 3), 1, ranks=(), mesh2d=(1, 2)),
    case("two cut dims and the batch merged", there_and_back((192, 3)), (2, 12, 8, 3), 1, ranks=(), mesh2d=(1, 2)),
    case("all merged", lambda x: x.flatten(), (2, 12, 8), 1, ranks=(), mesh2d=(1, 2), gathers=True),
]

test_reshape = op_test(CASES)


@distributed(ranks=4)
def test_a_merge_that_fits_moves_nothing():
    x = dpzoo.scatter(torch.randn(12, 4, 3), domain_mesh(), dim=0, sizes=(2, 5, 0, 5)).requires_grad_()
    with count_collectives() as seen:
        y = x.flatten(0, 1).view(12, 2, 2, 3).flatten(1).unflatten(1, (4, 3))
        y.backward(torch.ones_like(y))
    assert seen.calls == 0
    assert x.flatten(0, 1)._spec.sizes == ((8, 20, 0, 20),)


@distributed(ranks=4)
def test_a_small_batch_does_not_leave_ranks_idle():
    """Two samples over four ranks: merging batch and rows cuts another dim, and every rank keeps a share."""
    x = dpzoo.scatter(torch.randn(2, 12, 8), domain_mesh(), dim=1)
    y = x.reshape(24, 8)
    assert y.placements == (Shard(1),)
    assert y._spec.sizes == ((2, 2, 2, 2),)


@distributed(ranks=4)
def test_a_reshape_that_must_gather_says_so():
    mesh = grid_mesh()
    x = dpzoo.scatter(torch.randn(12, 8), mesh, dim=(0, 1))
    with strict(), pytest.raises(MissingShardPatch, match=r"reshape.*\(12, 8\)"):
        x.reshape(96)
    reset_warnings()
    with pytest.warns(UserWarning, match="gathering 384 bytes"):
        y = x.reshape(96)
    assert y.placements == (Shard(0), Replicate())


@distributed(ranks=3)
def test_reshape_of_a_partial_value():
    from dpzoo.shard import Partial

    mesh = domain_mesh()
    x = ShardTensor.from_local(torch.full((2, 6), float(mesh.get_local_rank())), mesh, [Partial()])
    for y in (x.view(12), x.reshape(3, 4), x.squeeze(), x.expand(2, 6), x.flatten(), x.t()):
        assert torch.equal(y.full_tensor(), torch.full(tuple(y.shape), 3.0))
