"""Neighborhood attention on shards: any window, any cut, NATTEN's own calls, and torch.compile."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from dpzoo.ops import na1d, na2d, na3d
from dpzoo.ops.neighborhood_window import Axis
from dpzoo.shard import MissingShardPatch, Shard, ShardTensor, scatter, scatter_tensor, strict
from dpzoo.shard.partition import own_intervals
from dpzoo.shard.rules.natten_calls import overridable
from dpzoo.shard.rules.neighborhood_halo import halo_of
from dpzoo.testing import OpCase, assert_parity, distributed, domain_mesh, expect_error, expect_same_error, op_test

COVERS = ("neighborhood_attention",)


def attend(function, *window, **options):
    """Of one tensor, used as queries, keys and values with three different factors."""
    return lambda x: function(x, x * 0.7, x.flip(-1), *window, **options)


def separately(*window, **options):
    return lambda q, k, v: na2d(q, k, v, *window, **options)


def biased(q, k, v, table):
    return na2d(q, k, v, (3, 4), 1, (2, 1), rel_pos_bias=table)


GRID = (1, 17, 6, 2, 3)
LONG, WIDE = (1, 61, 4, 2, 3), (1, 4, 61, 2, 3)  # shards with queries that see own keys alone
ALL = ("even", "uneven", "tiny", "empty_first", "empty_last")
CASES = [
    OpCase("na2d on rows", fn=attend(na2d, (5, 3)), shape=GRID, shard=1, mesh2d=(1, 2), covers=COVERS),
    OpCase("na2d on columns", fn=attend(na2d, (3, 5)), shape=(1, 5, 13, 2, 3), shard=2, mesh2d=(2, 1)),
    OpCase(
        "halo over several ranks",
        fn=attend(na2d, (14, 3)),
        shape=GRID,
        shard=1,
        layouts=("even", "uneven", "tiny", "empty", "empty_first", "empty_last"),
        subgroups=False,
    ),
    OpCase("even kernel", fn=attend(na2d, (6, 4)), shape=GRID, shard=1, mesh2d=(1, 2), subgroups=False),
    OpCase(
        "dilation, unaligned",
        fn=attend(na2d, (4, 3), 1, (3, 2)),
        shape=GRID,
        shard=1,
        mesh2d=(1, 2),
        layouts=("even", "uneven", "tiny", "empty_first", "empty_last"),
    ),
    OpCase(
        "stride and dilation",
        fn=attend(na2d, (4, 3), (3, 2), (2, 1)),
        shape=GRID,
        shard=1,
        mesh2d=(1, 2),
        subgroups=False,
    ),
    OpCase(
        "causal",
        fn=attend(na2d, (4, 3), (2, 1), (2, 1), (True, False)),
        shape=GRID,
        shard=1,
        mesh2d=(1, 2),
        subgroups=False,
    ),
    OpCase("window of the whole grid", fn=attend(na2d, (17, 6)), shape=GRID, shard=1, subgroups=False),
    OpCase("na1d", fn=attend(na1d, 5, 1, 2), shape=(2, 19, 2, 4), shard=1, mesh2d=(1, 0)),
    OpCase("na3d", fn=attend(na3d, (3, 2, 3)), shape=(1, 7, 4, 5, 2, 2), shard=1, mesh2d=(1, 3), subgroups=False),
    OpCase("heads", fn=attend(na2d, 3), shape=(1, 5, 4, 5, 2), shard=3, mesh2d=(3, 1), subgroups=False),
    OpCase("batch", fn=attend(na2d, 3), shape=(5, 4, 4, 2, 2), shard=0, mesh2d=(0, 2), subgroups=False),
    OpCase(
        "head dim: the cut moves", fn=attend(na2d, 3), shape=(1, 5, 4, 2, 6), shard=4, mesh2d=(4, 1), subgroups=False
    ),
    OpCase(
        "cut in other places",
        fn=separately((5, 3)),
        shape=[GRID] * 3,
        shard=1,
        mesh2d=(1, 2),
        layouts=("misaligned", "even"),
    ),
    OpCase("cut along other dims", fn=separately((5, 3)), shape=[GRID] * 3, shard=[1, 2, 1], subgroups=False),
    OpCase("whole keys", fn=separately((5, 3)), shape=[GRID] * 3, shard=[1, None, None], subgroups=False),
    OpCase("whole queries", fn=separately((5, 3)), shape=[GRID] * 3, shard=[None, 1, 1], subgroups=False),
    OpCase(
        "grouped heads",
        fn=separately((5, 3), scale=0.4),
        shape=[(1, 9, 6, 4, 3), (1, 9, 6, 2, 3), (1, 9, 6, 2, 5)],
        shard=1,
        mesh2d=(1, 3),
    ),
    OpCase("inner queries", fn=attend(na2d, (5, 3)), shape=LONG, shard=1, mesh2d=(1, 2), layouts=ALL),
    OpCase("inner queries, dilation", fn=attend(na2d, (3, 2), 1, (3, 1)), shape=LONG, shard=1, layouts=ALL),
    OpCase("inner queries, stride", fn=attend(na2d, (5, 3), (3, 1), (2, 1)), shape=LONG, shard=1, layouts=ALL),
    OpCase(
        "inner queries, causal", fn=attend(na2d, (4, 3), (2, 1), 1, (True, False)), shape=LONG, shard=1, layouts=ALL
    ),
    OpCase("inner queries, even kernel, columns", fn=attend(na2d, (3, 4)), shape=WIDE, shard=2, mesh2d=(2, 1)),
    OpCase("inner queries, bias table", fn=biased, shape=[LONG] * 3, shard=1, plain=[(2, 5, 7)], mesh2d=(1, 2)),
    OpCase("bias table", fn=biased, shape=[GRID] * 3, shard=1, plain=[(2, 5, 7)], mesh2d=(1, 2)),
    OpCase("bias table, heads cut", fn=biased, shape=[GRID] * 3, shard=3, plain=[(2, 5, 7)], subgroups=False),
]
test_ops = op_test(CASES)


@distributed(ranks=3)
def test_queries_stay_and_only_near_keys_travel():
    x = torch.randn(1, 24, 4, 1, 2)
    out = na2d(*(scatter(x, domain_mesh(), dim=1, sizes=(5, 13, 6)) for _ in range(3)), (5, 3))
    assert out.placements == (Shard(1),)
    assert out.to_local().shape[1] == (5, 13, 6)[domain_mesh().get_local_rank()]


AXES = [
    Axis(61, *window)
    for window in [(5, 1), (4, 1), (5, 3), (5, 1, 3), (4, 3, 2), (4, 2, 1, True), (3, 2, 5, True), (29, 1, 2)]
]


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("sizes", [(31, 30), (20, 41, 0), (1, 2, 28, 30), (0, 61), (7, 9, 11, 13, 21)])
def test_inner_queries_and_ends(axis, sizes):
    """Every query is in one part; a part is told just the keys that it sees; inner ones are the shard's."""
    for me, (lo, hi) in enumerate(own_intervals(sizes)):
        halo = halo_of(1, sizes, "group", me, (axis, Axis(4, 3)), (sizes[me], 4))
        parts = [*([halo.inner] if halo.inner else []), *halo.ends]
        assert sorted(i for p in parts for i in range(*p.queries)) == list(range(lo, hi))
        for part in halo.ends:
            assert part.keys == axis.reach(*part.queries)
            assert halo.sees[0] <= part.keys[0] and part.keys[1] <= halo.sees[1]
        if halo.inner:
            first, last = axis.reach(*halo.inner.queries)
            assert lo <= first and last <= hi and halo.inner.keys == (lo, hi)
        if sizes[me] > 4 * axis.kernel * axis.dilation * axis.stride:
            assert halo.inner


@distributed(ranks=3)
def test_second_derivative():
    def penalty(x, table):
        out = na2d(x, x * 0.5, x.flip(-1), (3, 2), 1, (2, 1), rel_pos_bias=table)
        (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return g.square().sum()

    x, table = torch.randn(1, 9, 4, 2, 3), torch.randn(2, 5, 3)
    for sizes in ((2, 4, 3), (5, 0, 4)):
        assert_parity(penalty, [x, table], [1, None], [sizes, None])
    assert_parity(penalty, [torch.randn(1, 61, 2, 2, 3), table], [1, None], [(20, 31, 10), None])


@distributed(ranks=2)
@pytest.mark.parametrize(
    "window", [(9, 1, 2), ((3, 3, 3),), (3, 4), (1,)], ids=["too wide", "three dims", "stride", "kernel of one"]
)
def test_same_error_on_every_rank(window):
    expect_same_error(lambda x: na2d(x, x, x, *window), torch.randn(1, 17, 17, 2, 3), 1)


@distributed(ranks=2)
def test_shapes_that_do_not_fit():
    x = scatter(torch.randn(1, 9, 6, 2, 3), domain_mesh(), dim=1)
    y = scatter(torch.randn(1, 8, 6, 2, 3), domain_mesh(), dim=1)
    expect_error(lambda: na2d(x, y, y, 3), ValueError, "must match")


# ---------------------------------------------------------------------- NATTEN's own functions
@distributed(ranks=[2, 3])
@pytest.mark.parametrize("window", [(3, 1, 2, False), ((4, 3), (2, 1), 1, (True, False))])
def test_natten_functions(window, ranks):
    """A model's own call of NATTEN; its CPU backend has no gradient, so the truth is our function on one device."""
    natten = pytest.importorskip("natten")
    x = torch.randn(1, 17, 6, 2, 8)

    def attend(x):
        function = natten.functional.na2d if isinstance(x, ShardTensor) else na2d
        return function(x, x * 0.7, x.flip(-1), *window)

    with strict():
        assert_parity(attend, x, 1, "uneven")


class Block(nn.Module):
    """Written for NATTEN, without a thought of shards."""

    def __init__(self):
        super().__init__()
        from natten import NeighborhoodAttention2D

        self.norm, self.attn = nn.LayerNorm(16), NeighborhoodAttention2D(16, 2, kernel_size=(5, 3), dilation=(2, 1))

    def forward(self, x):
        return x + self.attn(self.norm(x))


@distributed(ranks=[2, 3])
def test_natten_module(ranks):
    """Forward against NATTEN itself, gradients against the module whose attention is ours."""
    pytest.importorskip("natten")
    import natten.modules

    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 13, 6, 16)
    with torch.no_grad():  # NATTEN's CPU backend has no backward
        expected = model(x)
    cut = scatter(x, domain_mesh(), dim=1)
    torch.testing.assert_close(model(cut).full_tensor(), expected, rtol=0, atol=3e-6)

    def ours(q, k, v, **window):
        window.pop("scale")
        return na2d(q, k, v, **window)

    shards = natten.modules.neighborhood_attention_generic
    try:
        natten.modules.neighborhood_attention_generic = lambda q, *a, **o: (
            shards(q, *a, **o) if isinstance(q, ShardTensor) else ours(q, *a, **o)
        )
        with strict():
            assert_parity(model, x, 1, "uneven")
    finally:
        natten.modules.neighborhood_attention_generic = shards


@distributed(ranks=2)
def test_natten_arguments():
    natten = pytest.importorskip("natten")
    x = torch.randn(1, 9, 6, 2, 8)
    cut = scatter(x, domain_mesh(), dim=1, sizes=(6, 3))
    expected, sums = natten.functional.na2d(x, x, x, 3, return_lse=True)
    out, lse = natten.na2d(cut, cut, cut, kernel_size=3, backend="flex-fna", torch_compile=False, return_lse=True)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.full_tensor(), sums, rtol=0, atol=2e-6)
    more = torch.randn(1, 4, 2, 8)
    expect_error(
        lambda: natten.na2d(cut, cut, cut, 3, additional_keys=more, additional_values=more),
        MissingShardPatch,
        "additional_keys",
    )
    needs = cut.detach().requires_grad_(True)
    expect_error(lambda: natten.na2d(needs, cut, cut, 3, return_lse=True), MissingShardPatch, "return_lse")
    expect_error(lambda: natten.na2d(cut, cut, cut, 9), ValueError, "must fit into the grid")
    expect_error(lambda: natten.na1d(cut, cut, cut, 3), ValueError, "na1d")


@distributed(ranks=1)
def test_a_handler_of_the_user_wins_and_plain_tensors_pass():
    def na2d(query, key, value, kernel_size):
        return "the function itself"

    na2d.__module__, na2d.__qualname__ = "natten_like.functional", "na2d"
    function = overridable(na2d)
    x = torch.randn(1, 4, 4, 1, 2)
    assert function(x, x, x, 3) == "the function itself"
    ShardTensor.register_named_function_handler("natten_like.functional.na2d", lambda *call: "the handler")
    cut = scatter(x, domain_mesh(), dim=1)
    assert function(cut, cut, cut, 3) == "the handler"
    assert function(x, x, value=cut, kernel_size=3) == "the handler"


def run_python(*lines):
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, timeout=100).returncode


def test_natten_is_not_imported_for_it():
    assert run_python("import sys, dpzoo.shard", "sys.exit('natten' in sys.modules)") == 0


def test_natten_imported_before():
    """What a module took from NATTEN before still reads the wrapped function; NATTEN's modules hold it, too."""
    pytest.importorskip("natten")
    lines = [
        "from natten.functional import na2d as held",
        "import natten, natten.functional as f, natten.modules as m, dpzoo.shard",
        "marked = lambda g: hasattr(g, '_answers_shard_tensors')",
        "name = 'neighborhood_attention_generic'",
        "assert not marked(held) and marked(held.__globals__[name]) and marked(getattr(m, name))",
        "assert all(marked(getattr(place, n)) for place in (f, natten) for n in ('na1d', 'na2d', 'na3d'))",
    ]
    assert run_python(*lines) == 0


# ---------------------------------------------------------------------- torch.compile
class Mixer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.qkv, self.table, self.function = nn.Linear(8, 24), nn.Parameter(torch.randn(2, 5, 5)), function

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(3, 0, 1, 2, 4, 5).unbind(0)
        return x + self.function(q, k, v, self.table).flatten(-2)


def ours(q, k, v, table):
    return na2d(q, k, v, 3, 1, 2, rel_pos_bias=table)


def nattens(q, k, v, table):
    import natten.functional

    if not isinstance(q, ShardTensor):
        return na2d(q, k, v, 3, 1, 2) + table.sum()
    return natten.functional.na2d(q, k, v, 3, 1, 2) + table.sum()


def results(model, run, x):
    model.zero_grad()
    x = x.detach().requires_grad_(True)
    out = run(x)
    out.square().sum().backward()
    found = {"output": out.detach(), "input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return {name: t.full_tensor() if isinstance(t, ShardTensor) else t for name, t in found.items()}


@distributed(ranks=2, timeout=110)
@pytest.mark.parametrize("function", [ours, nattens])
def test_one_graph(function):
    if function is nattens:
        pytest.importorskip("natten")
    torch.manual_seed(0)
    model, full = Mixer(function).double(), torch.randn(1, 12, 7, 8, dtype=torch.float64)
    wanted = results(model, model, full)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for sizes in ((5, 7), (12, 0)):
        x = scatter_tensor(full, 0, domain_mesh(), [Shard(1)], sizes={0: sizes})
        found = results(model, compiled, x)
        for name, want in wanted.items():
            torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
