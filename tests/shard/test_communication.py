"""How often the ranks talk: not at all in a forward on aligned shards, once in a backward for the weights."""

import pytest
import torch
from torch import nn

from dpzoo.shard import Replicate, Shard, gradient_buckets, manual_seed, scatter_tensor
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import distributed, domain_mesh, grid_mesh
from tests.shard.counting import count_collectives

SIZES = {1: (9,), 2: (7, 2), 3: (5, 0, 4)}


def cut(*shape, dim=1, mesh=None, **more):
    mesh = mesh or domain_mesh()
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    first = mesh.mesh.flatten()[0].item()
    return scatter_tensor(full, first, mesh, [Shard(dim)], sizes={0: SIZES[mesh.size()]}, **more)


def count(call):
    with count_collectives() as sent:
        out = call()
    return sent.calls, out


class Block(nn.Module):
    """A pre-norm MLP with what models do around it."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gate, self.place = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(1, 9, 8))

    def forward(self, x):
        x = x + self.place
        h = nn.functional.gelu(self.up(self.norm(x)))
        h = nn.functional.dropout(self.down(h), 0.1, self.training)
        return x + self.gate * h


LOCAL = {
    "pointwise": lambda x: (x * 2 + x.sigmoid()).clamp(-1, 1).where(x > 0, -x) / (1 + x * x),
    "norm": lambda x: nn.functional.layer_norm(x, (8,)) + nn.functional.rms_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(-1) + x.cumsum(-1),
    "views": lambda x: (
        x.reshape(2, 9, 2, 4).permute(2, 0, 1, 3).flatten(0, 1).unflatten(0, (2, 2)).transpose(-1, -2).contiguous()
    ),
    "pieces": lambda x: torch.cat([*x.chunk(2, -1), x[..., :3], x.select(0, 1).unsqueeze(0).expand(2, 9, 8)], -1),
    "stack": lambda x: torch.stack(x.unbind(-1)) + x.movedim(-1, 0),
    "reduce": lambda x: x.sum(-1) + x.mean(0, keepdim=True).sum(-1) + x.amax((0, 2)) + x.std(-1) + x.norm(dim=-1),
    "matmul": lambda x: x @ torch.ones(8, 3) + torch.einsum("bnc,cd->bnd", x, torch.ones(8, 3)),
    "heads": lambda x: torch.einsum("bnc,bnc->bn", x, x).unsqueeze(-1) * torch.bmm(x, torch.ones(2, 8, 4)),
    "fill": lambda x: torch.zeros_like(x).masked_fill(x > 0, 1.0) + torch.ones_like(x),
    "cast": lambda x: x.double().float().to(torch.bfloat16).float(),
    "inplace": lambda x: x.clone().add_(1).mul_(x).relu_(),
}


@pytest.mark.parametrize("name", list(LOCAL))
@distributed(ranks=[2, 3])
def test_no_rank_speaks_in_a_forward(name):
    x = cut(2, 9, 8)
    number, _ = count(lambda: LOCAL[name](x))
    assert number == 0


@pytest.mark.parametrize("name", [n for n in LOCAL if n != "fill"])
@distributed(ranks=[2, 3])
def test_nor_in_the_backward_when_there_are_no_weights(name):
    x = cut(2, 9, 8, requires_grad=True)
    y = LOCAL[name](x)
    number, _ = count(lambda: y.backward(torch.ones_like(y)))
    assert number == 0


@distributed(ranks=[1, 2, 3])
def test_weights_travel_together(ranks):
    manual_seed(0)  # without it the first dropout asks the first rank for a seed
    block, x = nn.Sequential(Block(), Block()), cut(2, 9, 8, requires_grad=True)
    number, y = count(lambda: block(x))
    assert number == 0
    g = torch.ones_like(y)
    number, _ = count(lambda: y.backward(g))
    # One sum of all weights; those that are cut like the tokens are gathered each, since a rank has only its rows.
    whole_weights, cut_weights = int(ranks > 1), 2 * int(ranks > 1)
    assert number <= whole_weights + cut_weights


@distributed(ranks=[1, 2, 3])
def test_one_sum_for_an_mlp(ranks):
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    y = net(cut(2, 9, 8))
    number, _ = count(lambda: y.backward(torch.ones_like(y)))
    assert number == int(ranks > 1)
    loss = net(cut(2, 9, 8)).sum()
    number, _ = count(loss.backward)
    assert number == int(ranks > 1)


@distributed(ranks=2)
def test_large_weights_start_early():
    """Each full bucket is sent while backward goes on."""
    net = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    before, gradient_buckets.BUCKET_BYTES = gradient_buckets.BUCKET_BYTES, 2 * 8 * 8 * 4
    try:
        loss = net(cut(2, 9, 8)).sum()
        number, _ = count(loss.backward)
    finally:
        gradient_buckets.BUCKET_BYTES = before
    assert number == 2


class Modulated(nn.Module):
    """Two branches, each scaled before and after by numbers that other weights compute."""

    def __init__(self):
        super().__init__()
        self.modulation, self.first, self.second = nn.Linear(3, 32), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, condition):
        modulations = self.modulation(condition).unsqueeze(1).chunk(4, 2)
        for branch, scale, gate in ((self.first, *modulations[:2]), (self.second, *modulations[2:])):
            x = x + gate * branch(nn.functional.layer_norm(x, (8,)) * (1 + scale))
        return x


@pytest.mark.parametrize("whole", [False, True])
@distributed(ranks=2)
def test_one_sum_for_all_that_a_layer_computes_from_a_condition(whole):
    """And one for the weights: not one for each of the four modulations, plain or ShardTensors."""
    net, condition = Modulated(), torch.randn(2, 3)
    if whole:
        condition = scatter_tensor(condition, 0, cut(2, 9, 8).device_mesh, [Replicate()])
    loss = net(cut(2, 9, 8), condition).sum()
    number, _ = count(loss.backward)
    assert number == 2


@distributed(ranks=4)
def test_one_sum_for_all_weights_inside_ddp():
    mesh = grid_mesh()
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    wrapped = nn.parallel.DistributedDataParallel(net, process_group=mesh["ddp"].get_group())
    loss = wrapped(cut(2, 9, 8, mesh=mesh["domain"])).sum()
    with count_traffic() as sent:  # without what DDP itself sends
        loss.backward()
    assert sent.calls == 1


@distributed(ranks=2)
def test_frozen_weights_are_silent():
    net = nn.Linear(8, 8).requires_grad_(False)
    y = net(cut(2, 9, 8, requires_grad=True))
    number, _ = count(lambda: y.backward(torch.ones_like(y)))
    assert number == 0


@distributed(ranks=2)
def test_a_full_reduction_is_one_small_sum():
    x = cut(2, 9, 8, requires_grad=True)
    number, loss = count(lambda: (x * x).mean())
    assert number == 1
    number, _ = count(lambda: loss.item())
    assert number == 0
    number, _ = count(loss.backward)
    assert number == 0


@distributed(ranks=4)
def test_a_grid_sums_over_both_axes():
    mesh = grid_mesh()
    x = scatter_tensor(torch.ones(4, 4, 8), 0, mesh, [Shard(0), Shard(1)])
    y = nn.Linear(8, 8)(x)
    number, _ = count(lambda: y.backward(torch.ones_like(y)))
    assert number == 2
    x = scatter_tensor(torch.ones(4, 4, 8), 0, mesh, [Replicate(), Shard(1)])
    y = nn.Linear(8, 8)(x)
    number, _ = count(lambda: y.backward(torch.ones_like(y)))
    assert number == 1


@distributed(ranks=2)
def test_moving_between_layouts_is_one_exchange():
    x = cut(2, 9, 8)
    for place, sizes, wanted in (([Replicate()], None, 1), ([Shard(2)], None, 1), ([Shard(1)], {0: (4, 5)}, 1)):
        number, _ = count(lambda p=place, s=sizes: x.redistribute(placements=p, sizes=s))
        assert number == wanted
    whole = x.redistribute(placements=[Replicate()])
    number, _ = count(lambda: whole.redistribute(placements=[Shard(0)]))
    assert number == 0
