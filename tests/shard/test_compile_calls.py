"""torch.compile: what a graph is made of, when another one is made, and what comes out of it."""

import importlib
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dpzoo.ops import neighborhood_attention
from dpzoo.shard import Replicate, Shard, ShardTensor, manual_seed, scatter_tensor
from dpzoo.testing import distributed, domain_mesh
from tests.shard.compiling import compiled, cut, leaf, same

needs_natten = pytest.mark.skipif(importlib.util.find_spec("natten") is None, reason="natten is not installed")


def field(*shape):
    return torch.randn(shape or (2, 12, 8), dtype=torch.float64)


def negative_dims(t):
    first = torch.zeros(2, 1, 8, dtype=torch.long)
    return (
        *(t.select(-2, 3), t.select(-1, -1), t[..., -2], t[:, -1], t.unbind(-1)[2], t.softmax(-2), t.cumsum(-2)),
        *(t.flip(-2), t.transpose(-1, -2), t.unsqueeze(-1).squeeze(-1), torch.stack([t, t], -1), t.roll(1, -2)),
        *(torch.cat([t, t], -2), t.narrow(-2, 2, 7), t.mean(-2), t.amax(-2), t.sum((-1, -2)), t.chunk(2, -2)[1]),
        *(t.split(5, -2)[0], t.unflatten(-1, (2, 4)), t.flatten(-2), t.diff(dim=-2), t.std(-2), t.argmax(-2)),
        *(t.sort(-2)[0], t.index_select(-2, torch.tensor([1, 11])), t.movedim(-1, -2), F.pad(t, (0, 0, 1, 2))),
        *(t.repeat_interleave(2, -2), t.gather(-2, first), t.norm(dim=-2), t.logsumexp(-2), t.topk(2, -2)[0]),
    )


@distributed(ranks=2, timeout=110)
def test_negative_dims():
    full = field()
    x, r = cut(full), leaf(full)
    found, wanted = compiled(negative_dims)(x), negative_dims(r)
    for y, want in zip(found, wanted, strict=True):
        same(y, want)
    for outputs in (found, wanted):
        sum((y * (i + 1)).sin().sum() for i, y in enumerate(outputs) if y.requires_grad).backward()
    same(x.grad, r.grad)


@distributed(ranks=2, timeout=110)
def test_one_graph_per_layout():
    full, linear, seen = field(), nn.Linear(8, 8).double(), []
    call = compiled(lambda t: F.softmax(linear(t), 1), dynamic=True)
    wanted = F.softmax(linear(full), 1)
    for sizes in ((8, 4), (8, 4), (4, 8), (12, 0), (8, 4)):
        same(call(cut(full, sizes=sizes)), wanted)
        seen.append(call.graphs())
    assert seen == [1, 1, 2, 3, 3]


@distributed(ranks=2, timeout=110)
def test_numbers_that_a_graph_leaves_open():
    full = field()
    call = compiled(lambda t, s, n: (t * s).softmax(1) * n, dynamic=True)
    first = 0
    for scale, n in ((0.5, 3), (0.6, 4), (0.7, 5)):
        same(call(cut(full), scale, n), (full * scale).softmax(1) * n)
        first = first or call.graphs()
    assert call.graphs() == first
    norm = compiled(lambda t, eps: F.layer_norm(t, (8,), eps=eps), dynamic=True)
    seen = []
    for eps in (0.1, 0.5, 0.1):  # a rule needs the number: a graph for each
        same(norm(cut(full), eps), F.layer_norm(full, (8,), eps=eps))
        seen.append(norm.graphs())
    assert seen[0] < seen[1] == seen[2]


@distributed(ranks=2, timeout=110)
def test_outputs_are_ordinary():
    full = field()
    x = cut(full)
    call = compiled(lambda t: (t * 2, t.transpose(1, 2), t))
    a, b, c = call(x)
    d, e, _ = call(x)
    assert a._spec is d._spec is x._spec
    assert hash(b._spec) == hash(x.transpose(1, 2)._spec)
    assert b._spec is e._spec is x.transpose(1, 2)._spec
    same(a + d, full * 4)
    same(b.transpose(1, 2) + a + c, full * 4)
    part = ShardTensor.from_local(full / 2, domain_mesh(), [Partial()]).detach().requires_grad_()
    y = compiled(lambda t: t * 2)(part)
    y.sin().sum().backward()
    same(part.grad, 2 * (2 * full).cos())


@distributed(ranks=2, timeout=110)
def test_writing():
    full, norm = field(2, 12, 8), nn.BatchNorm1d(12).double()

    def write(t):
        u = t * 1
        u.add_(1)
        u[:, 3:5].mul_(2)
        u[:, -1] = 0
        return norm(u.relu_())

    x, r = cut(full, 2, (5, 3)), leaf(full)
    y, statistics = compiled(write)(x), norm.running_mean.clone()
    norm.reset_running_stats()
    want = write(r)
    same(y, want)
    same(statistics, norm.running_mean)
    y.sin().sum().backward()
    want.sin().sum().backward()
    same(x.grad, r.grad)
    target = cut(full).detach()
    compiled(lambda t: t.add_(1) * 2)(target)
    same(target, full + 1)


DRAWS = {
    "dropout": lambda t: F.dropout(t, 0.5),
    "channels": lambda t: F.dropout1d(t, 0.5),
    "drop path": lambda t: t * t.new_empty(t.shape[0], 12, 1).bernoulli_(0.5),
    "normal": lambda t: torch.randn_like(t) * t,
    "fill": lambda t: torch.empty_like(t).uniform_(),
    "two": lambda t: torch.rand_like(t) + F.dropout(t, 0.3),
    "attention": lambda t: F.scaled_dot_product_attention(
        *[t[:, None] + torch.arange(12.0)[:, None]] * 3, dropout_p=0.5
    ),
}


@distributed(ranks=2, timeout=110)
def test_draws():
    x = cut(torch.ones(2, 12, 80))

    def twice(draw):
        manual_seed(3)
        return draw(x).full_tensor(), draw(x).full_tensor()

    def every(t):
        return torch.cat([draw(t).flatten() for draw in DRAWS.values()])

    first, second = twice(compiled(every))
    assert not torch.equal(first, second)
    for found, wanted in zip((first, second), twice(every), strict=True):
        same(found, wanted, 1e-5)
    replica = compiled(DRAWS["dropout"])(scatter_tensor(torch.ones(2, 12, 80), 0, domain_mesh(), [Replicate()]))
    same(cut(replica.to_local()), replica)  # the first rank's is everybody's


@distributed(ranks=2, timeout=110)
def test_draws_without_a_rule_are_refused():
    x = cut(torch.ones(2, 12, 8))
    for draw in (lambda t: torch.multinomial(t[:, :, 0], 3), torch._standard_gamma):
        with pytest.raises(Exception, match=r"cannot be compiled|draws random numbers"):
            compiled(draw)(x)


@pytest.mark.parametrize("library", ["dpzoo.ops", pytest.param("natten", marks=needs_natten)])
@distributed(ranks=2, timeout=110)
def test_neighborhoods_fetch_halos(library):
    for grid in ((12,), (12, 9), (12, 5, 4)):
        ndim, full = len(grid), torch.randn(1, *grid, 2, 4)
        attend = getattr(importlib.import_module(library), f"na{ndim}d")
        x, r = cut(full), leaf(full)
        y = compiled(lambda t, f=attend, k=(3,) * ndim: f(t, t * 2, t + 1, kernel_size=k))(x)
        want = neighborhood_attention(ndim, r, r * 2, r + 1, 3)
        assert y.placements == x.placements
        same(y, want, 1e-5)
        y.sin().sum().backward()
        want.sin().sum().backward()
        same(x.grad, r.grad, 1e-4)


@distributed(ranks=2, timeout=110)
def test_user_code_with_a_break():
    full, linear = field(), nn.Linear(8, 8).double()

    def broken(t):
        hidden = linear(t).relu()
        torch._dynamo.graph_break()
        hidden = F.softmax(hidden, 1)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return linear(hidden).flip(1)

    x, r = cut(full), leaf(full)
    compiled(broken, fullgraph=False)(x).sin().sum().backward()
    found = linear.weight.grad.clone()
    linear.zero_grad()
    broken(r).sin().sum().backward()
    same(x.grad, r.grad)
    same(found, linear.weight.grad)


@distributed(ranks=2, timeout=110)
def test_autocast():
    full, linear, conv = torch.randn(2, 12, 8), nn.Linear(8, 8), nn.Conv1d(8, 8, 3, padding=1)

    def model(t):
        with torch.autocast("cpu", torch.bfloat16):
            return F.softmax(conv(linear(t).mT), -1)

    def outside(run):
        def call(t):
            with torch.autocast("cpu", torch.bfloat16):
                return run(t)

        return call

    def plain(t):
        return F.softmax(conv(linear(t).mT), -1)

    for run in (compiled(model), outside(compiled(plain))):
        x, r = cut(full), leaf(full)
        linear.zero_grad()
        y, want = run(x), model(r)
        assert y.dtype is want.dtype
        same(y, want, 2e-2)
        y.float().square().sum().backward()
        found, linear.weight.grad = linear.weight.grad, None
        want.float().square().sum().backward()
        assert found.dtype is torch.float32
        same(found, linear.weight.grad, 5e-2)
        same(x.grad, r.grad, 5e-2)


@distributed(ranks=2)
def test_a_spec_holds_no_symbols():
    spec, found = cut(field())._spec, []
    for full in (torch.ones(2, 12, 8), torch.ones(3, 12, 8), torch.ones(2, 12, 8)):
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            open_sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 3)
            shape = mode.from_tensor(full, symbolic_context=open_sizes).shape
            assert isinstance(shape[0], torch.SymInt)
            found.append(spec.like(shape=shape))
    assert all(type(n) is int for s in found for n in (*s.shape, *s.stride, *s.local_shape))
    assert found[0] is found[2] is spec  # equal sizes of different graphs are one layout, others never are
    assert found[1] is spec.like(shape=(3, 12, 8))


@distributed(ranks=2, timeout=110)
def test_einops_leave_one_graph():
    full = field()
    call = compiled(lambda t: rearrange(t, "b n (h d) -> b h n d", h=2))
    for _ in range(2):
        same(call(cut(full)), rearrange(full, "b n (h d) -> b h n d", h=2))
    assert call.graphs() == 1


@distributed(ranks=2, timeout=110)
def test_a_mesh_of_one():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "domain"))["domain"]
    full, linear = field(), nn.Linear(8, 8).double()
    x, r = scatter_tensor(full, torch.distributed.get_rank(), mesh, [Shard(1)]).requires_grad_(), leaf(full)
    compiled(lambda t: F.softmax(linear(t), 1))(x).sin().sum().backward()
    F.softmax(linear(r), 1).sin().sum().backward()
    same(x.grad, r.grad)


@distributed(ranks=2, timeout=110)
def test_leaving_and_relaying():
    full = field()
    x = cut(full)
    calls = {
        "full": lambda t: t.full_tensor() * 2,
        "local": lambda t: t.to_local() * 2,
        "redistribute": lambda t: t.redistribute(placements=[Shard(2)]) + 1,
        "sizes": lambda t: t.redistribute(sizes={0: (5, 7)}) + 1,
        "item": lambda t: t * t.sum().item() * t.shape[1],
    }
    found = compiled(lambda t: tuple(call(t) for call in calls.values()))(x)
    for y, call in zip(found, calls.values(), strict=True):
        want = call(x)
        assert getattr(y, "_spec", None) is getattr(want, "_spec", None)
        torch.testing.assert_close(getattr(y, "_local_tensor", y), getattr(want, "_local_tensor", want))


def written_and_read(a, b):
    a.add_(1)
    return b * 2


@distributed(ranks=2)
def test_a_graph_that_writes_one_of_two_names_of_a_tensor_is_refused():
    """torch would have to know in the graph that both are one; it does of plain tensors alone."""
    x = cut(field()).detach()
    with pytest.raises(Exception, match="aliased inputs that are mutated"):
        torch.compile(written_and_read, backend="aot_eager", fullgraph=True)(x.transpose(0, 2), x)
    run = torch.compile(written_and_read, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x.clone(), x).full_tensor(), 2 * x.full_tensor())
