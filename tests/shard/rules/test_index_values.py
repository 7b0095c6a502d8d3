"""An index value out of range is refused by every rank, also by those whose shard would never use it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import Replicate, Shard, scatter_tensor
from dpzoo.testing import (
    column_mesh,
    distributed,
    domain_mesh,
    expect_error,
    expect_same_error,
    grid_mesh,
    row_mesh,
)
from tests.shard.counting import count_collectives


def _last_row_bad(x: Tensor, value: int) -> Tensor:
    index = torch.zeros(x.shape[0], 2, dtype=torch.int64)
    index[-1, -1] = value
    return index


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda x: torch.gather(x, 1, _last_row_bad(x, x.shape[1])),
    "gather, negative": lambda x: x.gather(1, _last_row_bad(x, -1)),
    "index_select": lambda x: torch.index_select(x, 1, torch.tensor([0, x.shape[1]])),
    "index tensor": lambda x: x[:, torch.tensor([0, -x.shape[1] - 1])],
    "class of a sample": lambda x: F.cross_entropy(x, torch.tensor([*[0, -100] * 3, x.shape[1]])),
    "class of a sample, log likelihood": lambda x: F.nll_loss(x, torch.tensor([*[0] * 6, -1])),
    "embedding of a cut table": lambda x: F.embedding(torch.tensor([0, x.shape[1]]), x.t()),
}


def _one_bad(shape: tuple[int, ...], value: int) -> Tensor:
    """Valid but for the last element, which one rank alone holds."""
    index = torch.zeros(shape, dtype=torch.int64)
    index.view(-1)[-1] = value
    return index


# The index is cut; what it looks up is plain.
CUT: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "embedding": (lambda i: F.embedding(i, torch.ones(4, 2)), _one_bad((7, 2), 4)),
    "embedding, table first": (lambda i: torch.embedding(torch.ones(4, 2), i), _one_bad((7,), -1)),
    "index tensor": (lambda i: torch.ones(4, 2)[i], _one_bad((7,), -5)),
    "two index tensors": (lambda i: torch.ones(4, 5)[i, i], _one_bad((7,), 4)),
    "index_select": (lambda i: torch.ones(4, 2).index_select(0, i), _one_bad((7,), 4)),
    "gather": (lambda i: torch.ones(7, 4).gather(1, i), _one_bad((7, 2), 4)),
    "cross_entropy": (lambda t: F.cross_entropy(torch.ones(7, 4), t), _one_bad((7,), 4)),
    "nll_loss of images": (lambda t: F.nll_loss(torch.ones(7, 4, 2), t), _one_bad((7, 2), -1)),
    "multi_margin_loss": (lambda t: F.multi_margin_loss(torch.ones(7, 4), t), _one_bad((7,), 4)),
    "multilabel_margin_loss": (lambda t: F.multilabel_margin_loss(torch.ones(7, 4), t), _one_bad((7, 4), 4)),
    "one_hot": (lambda i: F.one_hot(i, 4), _one_bad((7,), 4)),
}


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", CUT)
def test_every_rank_refuses_a_value_that_one_of_them_holds(name: str, ranks: int):
    call, index = CUT[name]
    expect_same_error(call, index, 0)


@distributed(ranks=4)
def test_a_value_in_a_later_group_and_on_a_grid():
    table, index = torch.ones(4, 2), _one_bad((6, 4), 9)
    for mesh in (column_mesh(), row_mesh()):
        expect_same_error(lambda i: F.embedding(i, table), index, 0, mesh=mesh)
    cut = scatter_tensor(index, 0, grid_mesh(), [Shard(0), Shard(1)], sizes={0: (6, 0)})
    expect_error(lambda: F.embedding(cut, table), IndexError)


@distributed(ranks=2)
def test_what_the_check_costs():
    """One small reduction for a cut index, nothing for any other."""
    table, index = torch.ones(4, 2), torch.zeros(5, 3, dtype=torch.int64)
    for place, count in ((Shard(0), 1), (Replicate(), 0)):
        cut = scatter_tensor(index, 0, domain_mesh(), [place])
        with count_collectives() as seen:
            F.embedding(cut, table)
        assert seen.calls == count
    padded = scatter_tensor(torch.tensor([0, -100, 1, -100]), 0, domain_mesh(), [Shard(0)])
    assert F.cross_entropy(torch.zeros(4, 2), padded).item() == pytest.approx(0.6931472)


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", BAD)
def test_every_rank_refuses_a_value_out_of_range(name: str, ranks: int):
    torch.manual_seed(0)
    x = torch.randn(7, 4)
    expect_same_error(BAD[name], x, 0)
    expect_same_error(BAD[name], x, 0, requires_grad=True)
