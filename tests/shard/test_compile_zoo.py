"""torch.compile of whole zoo models, a few rows of the table of `python -m tests.compile_matrix`; and inductor."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dpzoo.shard import tracing
from dpzoo.testing import distributed
from tests.compile_matrix import faults, row
from tests.shard.compiling import compiled, cut, leaf, same


@pytest.mark.parametrize("name", ["unet_nano"])
@pytest.mark.timeout(300)
@distributed(ranks=2, timeout=280)
def test_model(name):
    assert not faults(row(name, "aot_eager", True, layouts=("uneven", "uneven")))


class Stack(nn.Module):
    """A halo, three residual blocks whose weight gradients make many collectives of several sizes, a cut softmax."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv1d(3, 8, 3, padding=1), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16 + i), nn.GELU(), nn.Linear(16 + i, 8)) for i in range(3)
        )

    def forward(self, x):
        x = self.conv(x).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).softmax(1)


@contextmanager
def noted_collectives():
    """The collectives that graphs make inside, in order, without the sizes that differ from rank to rank."""
    calls, noted = dict(tracing._CALLS), []

    def note(name, call):
        def run(t, *args):
            noted.append((name, tuple(t.shape) if name == "all_reduce" else None))
            return call(t, *args)

        return run

    tracing._CALLS.update({name: note(name, call) for name, call in calls.items()})
    try:
        yield noted
    finally:
        tracing._CALLS.update(calls)


@pytest.mark.timeout(300)
@distributed(ranks=2, timeout=280)
def test_inductor():
    """The values of eager, and collectives in the order of the program, whatever the sizes of a rank suggest."""
    torch.manual_seed(0)
    full, model = torch.randn(2, 3, 12, dtype=torch.float64), Stack().double()
    r = leaf(full)
    want = model(r)
    want.sin().sum().backward()
    weights = {name: p.grad.clone() for name, p in model.named_parameters()}
    orders = {}
    for backend in ("aot_eager", "inductor"):
        call = compiled(model, backend=backend)
        for _ in range(2):
            x = cut(full, 2, (4, 8))
            model.zero_grad()
            with noted_collectives() as orders[backend]:
                y = call(x)
                y.sin().sum().backward()
            same(y, want)
            same(x.grad, r.grad)
            for name, p in model.named_parameters():
                same(p.grad, weights[name])
        assert call.graphs() == 1
    assert orders["inductor"] == orders["aot_eager"] and len(orders["inductor"]) > 15
