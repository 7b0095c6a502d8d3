"""One tensor given twice, then two tensors of the same layout: the first call's plan must not answer the second."""

import pytest
import torch
import torch.nn.functional as F

from dpzoo.ops import na1d
from dpzoo.shard import scatter
from dpzoo.testing import distributed, domain_mesh

CALLS = {
    "matmul": torch.matmul,
    "linear": F.linear,
    "mse": F.mse_loss,
    "cdist": torch.cdist,
    "stack": lambda x, y: torch.stack([x, y]),
    "add by keyword": lambda x, y: torch.add(other=y, input=x, alpha=2),
    "neighborhood attention": lambda x, y: na1d(x[None, :, None], y[None, :, None], y[None, :, None], 3),
}


@distributed(ranks=2)
@pytest.mark.parametrize("name", CALLS)
def test_repeated_operand(name: str):
    call = CALLS[name]
    x, y = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5, dtype=torch.float64)
    a, b = (scatter(t, domain_mesh(), dim=0) for t in (x, y))
    for left, right, expected in [(a, a, call(x, x)), (a, b, call(x, y)), (b, a, call(y, x)), (b, b, call(y, y))]:
        torch.testing.assert_close(call(left, right).full_tensor(), expected)
