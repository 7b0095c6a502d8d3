"""torch.compile: gradients that leave a compiled region are those of eager, of the right kind, for everybody's use."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dpzoo.shard import ShardTensor, grad_sync
from dpzoo.testing import distributed, domain_mesh
from tests.shard.compiling import compiled, cut, leaf, same


def field():
    return torch.randn(2, 12, 8, dtype=torch.float64)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).double()


@distributed(ranks=2, timeout=110)
def test_outputs_that_nothing_was_computed_from():
    full, weight = field(), nn.Parameter(torch.randn(8, dtype=torch.float64))

    def three(t):
        return t.sin() * weight, (t * weight).mean(1), weight * 2

    call = compiled(three)
    for used in range(3):
        x, r = cut(full), leaf(full)
        wanted = torch.autograd.grad(three(r)[used].square().sum(), [r, weight], allow_unused=True)
        weight.grad = None
        call(x)[used].square().sum().backward()
        assert type(weight.grad) is torch.Tensor
        same(weight.grad, wanted[1])
        if wanted[0] is not None:
            assert isinstance(x.grad, ShardTensor)
            same(x.grad, wanted[0])
    assert call.graphs() == 1


@distributed(ranks=2, timeout=110)
def test_eager_code_before_and_after():
    full, linear, kinds = field(), nn.Linear(8, 8).double(), []
    x, r = cut(full), leaf(full)
    before = x.sin()
    after = compiled(linear)(before)
    for t in (before, after):
        t.register_hook(lambda g: kinds.append(type(g)))
    after.relu().flip(1).mean().backward()
    assert kinds == [ShardTensor, ShardTensor]
    found, linear.weight.grad = linear.weight.grad, None
    linear(r.sin()).relu().flip(1).mean().backward()
    same(x.grad, r.grad)
    same(found, linear.weight.grad)


@distributed(ranks=2, timeout=110)
def test_dtensor_operands():
    full, token = field(), torch.randn(8, dtype=torch.float64)
    mask = torch.rand(2, 12, 1) > 0.5
    sharded_mask = cut(mask)
    place = nn.Parameter(distribute_tensor(token, domain_mesh(), [Replicate()]))

    def masked(t, hidden, token):
        return F.layer_norm(torch.where(hidden, token, t), (8,), token) * token

    x, r, plain = cut(full), leaf(full), leaf(token)
    compiled(lambda t: masked(t, sharded_mask, place))(x).sin().sum().backward()
    masked(r, mask, plain).sin().sum().backward()
    same(x.grad, r.grad)
    assert isinstance(place.grad, DTensor)
    same(place.grad, plain.grad)


@distributed(ranks=2, timeout=110)
def test_autograd_grad_of_a_dtensor():
    token = nn.Parameter(distribute_tensor(torch.arange(8.0), domain_mesh(), [Replicate()]))
    x = cut(torch.ones(2, 12, 8))
    of_x, of_token = torch.autograd.grad((x * token).sum(), [x, token])
    assert isinstance(of_token, DTensor)
    same(of_token, torch.full((8,), 24.0))
    same(of_x, torch.arange(8.0).expand(2, 12, 8))


@distributed(ranks=2, timeout=110)
def test_weights_used_in_and_out_of_the_graph():
    full, linear = field(), nn.Linear(8, 8).double()
    for mode in ("bucket", "eager"):
        with grad_sync(mode):
            linear.zero_grad()
            call = compiled(linear)
            for _ in range(2):
                linear(call(cut(full))).sin().sum().backward()
        found = linear.weight.grad.clone()
        linear.zero_grad()
        linear(linear(full)).sin().sum().backward()
        same(found, 2 * linear.weight.grad)


def wrapped(kind, model):
    if kind == "fsdp2":
        fully_shard(model, mesh=domain_mesh())
        return compiled(model, fullgraph=False)
    if kind == "compiled ddp":
        return compiled(DistributedDataParallel(model), fullgraph=False)
    torch._dynamo.reset()
    return DistributedDataParallel(torch.compile(model, backend="aot_eager"))


@distributed(ranks=2, timeout=110)
def test_wrappers():
    full = field()
    for kind in ("fsdp2", "compiled ddp", "ddp of compiled"):
        model = two_layers()
        single = copy.deepcopy(model)
        call = wrapped(kind, model)
        for _ in range(2):
            x = cut(full)
            call(x).sin().sum().backward()
        r = leaf(full)
        single(r).sin().sum().backward()
        same(x.grad, r.grad)
        same(model[0].weight.grad, 2 * single[0].weight.grad)


@distributed(ranks=2, timeout=110)
def test_checkpoints():
    full, linear = field(), nn.Linear(8, 8).double()

    def block(t):
        heads = linear(t)[:, None]
        return F.scaled_dot_product_attention(heads, heads, heads)[:, 0] + F.softmax(linear(t), 1)

    def inside(t):
        return checkpoint(block, t, use_reentrant=False).sin()

    r = leaf(full)
    inside(r).sum().backward()
    wanted = linear.weight.grad.clone()
    call = compiled(block)
    for run in (lambda t: checkpoint(call, t, use_reentrant=False).sin(), compiled(inside)):
        x = cut(full)
        linear.zero_grad()
        run(x).sum().backward()
        same(x.grad, r.grad)
        same(linear.weight.grad, wanted)


@distributed(ranks=2, timeout=110)
def test_a_checkpoint_drops_the_same_elements_again():
    x = cut(torch.ones(2, 12, 80))
    y = compiled(lambda t: checkpoint(lambda t: F.dropout(t * 1, 0.5), t, use_reentrant=False))(x)
    y.sum().backward()
    same(x.grad, y)
    everywhere = [torch.empty_like(x.grad.full_tensor()) for _ in range(2)]
    dist.all_gather(everywhere, y.full_tensor().detach())
    assert torch.equal(*everywhere)
