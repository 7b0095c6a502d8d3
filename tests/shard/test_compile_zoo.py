"""torch.compile of whole zoo models, a few rows of the table of `python -m tests.compile_matrix`; and inductor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpzoo.testing import distributed
from tests.compile_matrix import faults, row
from tests.shard.compiling import compiled, cut, leaf, same


@pytest.mark.parametrize("name", ["unet_nano", "stormscope_nano"])
@pytest.mark.timeout(300)
@distributed(ranks=2, timeout=280)
def test_model(name):
    assert not faults(row(name, "aot_eager", True, layouts=("uneven", "uneven")))


@pytest.mark.timeout(300)
@distributed(ranks=2, timeout=280)
def test_inductor():
    full, conv = torch.randn(2, 3, 12, dtype=torch.float64), nn.Conv1d(3, 4, 3, padding=1).double()
    call = compiled(lambda t: F.softmax(conv(t).relu(), 2), backend="inductor")
    r = leaf(full)
    want = F.softmax(conv(r).relu(), 2)
    want.sin().sum().backward()
    of_weight = conv.weight.grad.clone()
    for _ in range(2):
        x = cut(full, 2)
        conv.zero_grad()
        y = call(x)
        y.sin().sum().backward()
        same(y, want)
        same(x.grad, r.grad)
        same(conv.weight.grad, of_weight)
    assert call.graphs() == 1
