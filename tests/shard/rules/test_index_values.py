"""An index value out of range is refused by every rank, also by those whose shard would never use it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.testing import distributed, expect_same_error


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


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("name", BAD)
def test_every_rank_refuses_a_value_out_of_range(name: str, ranks: int):
    torch.manual_seed(0)
    x = torch.randn(7, 4)
    expect_same_error(BAD[name], x, 0)
    expect_same_error(BAD[name], x, 0, requires_grad=True)
