"""Neighborhood attention against its definition, against NATTEN, and against itself when the queries are a part."""

import math
from typing import Any

import pytest
import torch

from dpzoo.ops import na1d, na2d, na3d, neighborhood_attention, neighborhood_blocks
from dpzoo.ops.neighborhood_patches import alike_patches
from dpzoo.ops.neighborhood_window import Axis, block_widths
from tests.ops.neighborhood_oracle import dense, visible

NA = {1: na1d, 2: na2d, 3: na3d}
# grid, kernel, stride, dilation, causal
CASES: dict[str, tuple[Any, ...]] = {
    "odd": ((9, 7), (3, 5), (1, 1), (1, 1), (False, False)),
    "even": ((9, 8), (4, 6), (1, 1), (1, 1), (False, False)),
    "kernel 2": ((5, 4), (2, 2), (1, 1), (1, 1), (False, False)),
    "as large as the grid": ((5, 6), (5, 6), (1, 1), (1, 1), (False, False)),
    "dilated": ((11, 9), (3, 4), (1, 1), (3, 2), (False, False)),
    "dilated to the brim": ((9, 8), (3, 4), (1, 1), (3, 2), (False, False)),
    "strided": ((11, 9), (5, 4), (3, 2), (1, 1), (False, False)),
    "stride of the kernel": ((10, 9), (4, 3), (4, 3), (1, 1), (False, False)),
    "strided and dilated": ((13, 12), (3, 4), (2, 3), (3, 2), (False, False)),
    "causal": ((8, 7), (3, 4), (1, 1), (1, 1), (True, True)),
    "causal in one dim, dilated": ((9, 8), (3, 3), (1, 1), (2, 2), (True, False)),
    "causal and strided": ((11, 9), (5, 4), (3, 2), (1, 2), (True, True)),
    "line": ((37,), (5,), (1,), (3,), (False,)),
    "causal line": ((37,), (8,), (2,), (2,), (True,)),
    "long line": ((150,), (9,), (1,), (1,), (False,)),
    "volume": ((5, 4, 6), (3, 2, 5), (1, 1, 1), (1, 2, 1), (False, False, False)),
    "volume, mixed": ((4, 5, 6), (2, 3, 4), (2, 1, 3), (2, 1, 1), (True, False, False)),
}
# Small windows, so that there are many blocks with the same mask.
MANY_BLOCKS: dict[str, tuple[Any, ...]] = {
    "plane": ((20, 15), (3, 2), (1, 1), (1, 1), (False, False)),
    "dilated plane": ((23, 14), (2, 3), (1, 1), (3, 1), (False, False)),
    "strided, causal plane": ((18, 17), (2, 3), (2, 1), (1, 2), (False, True)),
    "dilated line": ((190,), (3,), (1,), (4,), (False,)),
    "small volume": ((7, 6, 8), (2, 2, 2), (1, 1, 1), (1, 1, 2), (False, False, False)),
}


def inputs(grid, heads=2, dim=5, batch=2, dtype=torch.float64, kv_heads=None, v_dim=None):
    torch.manual_seed(0)
    q = torch.randn(batch, *grid, heads, dim, dtype=dtype)
    k = torch.randn(batch, *grid, kv_heads or heads, dim, dtype=dtype)
    v = torch.randn(batch, *grid, kv_heads or heads, v_dim or dim, dtype=dtype)
    return [t.requires_grad_(True) for t in (q, k, v)]


def same_with_gradients(found, expected, leaves, **limits):
    torch.testing.assert_close(found, expected, **limits)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad(found, leaves, weight)
    truth = torch.autograd.grad(expected, leaves, weight)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, **limits)


@pytest.mark.parametrize("name", CASES)
def test_definition(name):
    grid, *window = CASES[name]
    leaves = inputs(grid, batch=1 if len(grid) == 3 or grid[0] > 99 else 2)
    same_with_gradients(NA[len(grid)](*leaves, *window), dense(*leaves, *window), leaves)


@pytest.mark.parametrize("name", ["odd", "even", "dilated", "strided", "causal", "line", "volume"])
def test_relative_bias(name):
    grid, *window = CASES[name]
    leaves = inputs(grid, batch=1)
    table = torch.randn(2, *(2 * k - 1 for k in window[0]), dtype=torch.float64, requires_grad=True)
    found = NA[len(grid)](*leaves, *window, rel_pos_bias=table)
    same_with_gradients(found, dense(*leaves, *window, table=table), [*leaves, table])
    fixed = NA[len(grid)](*leaves, *window, rel_pos_bias=table.detach())
    same_with_gradients(fixed, dense(*leaves, *window, table=table.detach()), leaves)


def test_scale_grouped_heads_and_head_dims():
    grid, *window = CASES["odd"]
    leaves = inputs(grid, heads=4, kv_heads=2, dim=3, v_dim=7)
    same_with_gradients(na2d(*leaves, *window, scale=0.3), dense(*leaves, *window, scale=0.3), leaves)


def test_ints_stand_for_every_dim_and_none_for_defaults():
    leaves = inputs((9, 8))
    expected = na2d(*leaves, (3, 3), (2, 2), (2, 2), (True, True))
    torch.testing.assert_close(na2d(*leaves, 3, 2, 2, True), expected, rtol=0, atol=0)
    torch.testing.assert_close(
        neighborhood_attention(2, *leaves, 3, None, None, None), na2d(*leaves, 3), rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype):
    grid, *window = CASES["dilated"]
    exact = inputs(grid, dim=16)
    narrow = [t.detach().to(dtype).requires_grad_(True) for t in exact]
    found, expected = na2d(*narrow, *window), na2d(*exact, *window)
    assert found.dtype is dtype
    limits = {"rtol": 0, "atol": 2e-6 if dtype is torch.float32 else 0.03}
    torch.testing.assert_close(found.double(), expected, **limits)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad(found, narrow, weight.to(dtype))
    truth = torch.autograd.grad(expected, exact, weight)
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype is dtype
        torch.testing.assert_close(a.double(), b, rtol=0, atol=8 * limits["atol"])


def test_autocast_narrows_as_torchs_attention_does():
    q, k, v = inputs((9, 8), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert na2d(q, k.to(torch.bfloat16), v, 3).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["odd", "dilated", "causal and strided"])
def test_derivatives_by_differences(name):
    grid, *window = CASES[name]
    leaves = inputs((5, 6) if name == "odd" else grid, heads=1, dim=2, batch=1)
    table = torch.randn(1, *(2 * k - 1 for k in window[0]), dtype=torch.float64, requires_grad=True)

    def attend(*tensors):
        return na2d(*tensors[:3], *window, rel_pos_bias=tensors[3])

    torch.autograd.gradcheck(attend, [*leaves, table], fast_mode=True)
    torch.autograd.gradgradcheck(attend, [*leaves, table], fast_mode=True)


@pytest.mark.parametrize("order", [1, 2])
def test_inputs_made_of_each_other(order):
    grid, *window = CASES["dilated"]
    x = inputs(grid, heads=1, dim=2, batch=1)[0]

    def value(attention):
        out = attention(x, x, x * 0.5, *window).square().sum()
        if order == 1:
            return out
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        return g.square().sum()

    same_with_gradients(value(na2d), value(dense), [x])


def test_only_some_inputs_need_a_gradient():
    q, k, v = inputs((9, 8))
    window = (3, 1, 2, False)
    (dk,) = torch.autograd.grad(na2d(q.detach(), k, v.detach(), *window).square().sum(), k)
    (expected,) = torch.autograd.grad(na2d(q, k, v, *window).square().sum(), k)
    torch.testing.assert_close(dk, expected, rtol=0, atol=0)


def test_empty_batch():
    leaves = inputs((9, 8), batch=0)
    out = na2d(*leaves, 3)
    assert out.shape == (0, 9, 8, 2, 5)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape for t in leaves)


@pytest.mark.parametrize("name", CASES)
def test_reach_is_the_smallest_interval_that_a_part_sees(name):
    for line in zip(*CASES[name], strict=True):
        n, *window = line
        axis = Axis(*line)
        for lo, hi in [(0, n), (0, 1), (n - 1, n), (n // 3, n // 3 + 2), (n // 2, n)]:
            seen = [t for i in range(lo, hi) for t in range(n) if visible(i, t, n, *window)]
            assert axis.reach(lo, hi) == (min(seen), max(seen) + 1)
        assert axis.reach(2, 2) == (2, 2)


@pytest.mark.parametrize("name", CASES)
def test_a_part_of_the_queries(name):
    """Queries from the middle of the domain, keys and values only where they look: exactly the rows of the whole."""
    grid, *window = CASES[name]
    ndim = len(grid)
    q, k, v = (t.detach() for t in inputs(grid, batch=1))
    whole = NA[ndim](q, k, v, *window)
    lo = [n // 3 for n in grid]
    hi = [min(n, a + 2) for n, a in zip(grid, lo, strict=True)]
    axes = [Axis(*line) for line in zip(grid, *window, strict=True)]
    reach = [axis.reach(a, b) for axis, a, b in zip(axes, lo, hi, strict=True)]
    own = (slice(None), *(slice(a, b) for a, b in zip(lo, hi, strict=True)))
    near = (slice(None), *(slice(*r) for r in reach))
    options = [list(w) for w in window]
    part, _ = torch.ops.dpzoo.neighborhood_attention(
        q[own], k[near], v[near], None, *options, q.shape[-1] ** -0.5, lo, [r[0] for r in reach], list(grid)
    )
    torch.testing.assert_close(part, whole[own])


@pytest.mark.parametrize("room", [1, 60, 2**30])
@pytest.mark.parametrize("name", [*CASES, *MANY_BLOCKS])
def test_blocks_hold_every_query_once_and_parts_no_key_twice(name, room):
    """In whatever pieces the blocks come; the queries are a part of the domain."""
    grid, *window = {**CASES, **MANY_BLOCKS}[name]
    axes = [Axis(*line) for line in zip(grid, *window, strict=True)]
    start, size = [n // 5 for n in grid], [n - n // 5 for n in grid]
    reach = [axis.reach(a, a + n) for axis, a, n in zip(axes, start, size, strict=True)]
    positions = torch.arange(math.prod(grid)).view(1, *grid)
    queries = positions[(slice(None), *(slice(a, None) for a in start))]
    keys = positions[(slice(None), *(slice(*r) for r in reach))]
    held = []
    for patches in alike_patches(tuple(axes), tuple(start), tuple(size), tuple(r[0] for r in reach), room, 2**30):
        for patch in patches:
            held.append(neighborhood_blocks._blocks(queries, patch, "queries").flatten())
            seen = neighborhood_blocks._blocks(keys, patch, "keys")
            assert seen.numel() <= room or math.prod(patch.counts) == 1
            parts = [seen[:, *part].flatten() for part in patch.apart]
            assert all(len(part.unique()) == len(part) for part in parts)
            assert sum(map(len, parts)) == seen.numel()
    assert torch.equal(torch.cat(held).sort().values, queries.flatten())


@pytest.mark.parametrize("elements", [2**8, 2**10, 2**12])
@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_calls_of_any_size(name, elements, monkeypatch):
    grid, *window = MANY_BLOCKS[name]
    monkeypatch.setitem(neighborhood_blocks.STACKED_KEYS, "cpu", elements)
    leaves = inputs(grid, dim=3)
    same_with_gradients(NA[len(grid)](*leaves, *window), dense(*leaves, *window), leaves)


@pytest.mark.parametrize("name", ["as large as the grid", "dilated", "long line"])
def test_channels_that_are_not_neighbours_in_memory(name):
    """As where they come first, in the layout of images."""
    grid, *window = CASES[name]

    def channels_first(t):
        return t.detach().movedim((-2, -1), (1, 2)).contiguous().movedim((1, 2), (-2, -1)).requires_grad_(True)

    leaves = [channels_first(t) for t in inputs(grid, batch=1)]
    found, expected = NA[len(grid)](*leaves, *window), dense(*leaves, *window)
    torch.testing.assert_close(found, expected)
    weight = channels_first(torch.randn(expected.shape, dtype=expected.dtype))
    ours, truth = (torch.autograd.grad(out, leaves, weight) for out in (found, expected))
    torch.testing.assert_close(ours, truth)


def test_scores_are_never_held_whole():
    """Blocks stay small on a long line, and interior blocks share a mask."""
    axes = (Axis(100_000, 101),)
    (width,) = block_widths(axes, (100_000,))
    assert 32 <= width <= 1024
    assert len(alike_patches(axes, (0,), (100_000,), (0,), 2**12, 2**16)) < 10


class TestErrors:
    Q = torch.zeros(1, 9, 8, 2, 4)

    @pytest.mark.parametrize(
        ("arguments", "match"),
        [
            ({"kernel_size": 5, "dilation": 2}, r"\(5, 5\) times dilation \(2, 2\) must fit into the grid \(9, 8\)"),
            ({"kernel_size": 3, "stride": 4}, "stride"),
            ({"kernel_size": 1}, "kernel_size must be an int >= 2"),
            ({"kernel_size": (3, 3, 3)}, "2 of them"),
            ({"kernel_size": 3, "dilation": 0}, "dilation"),
            ({"kernel_size": 3, "is_causal": 1}, "is_causal"),
            ({"kernel_size": 3, "rel_pos_bias": torch.zeros(2, 5, 3)}, r"\(2, 5, 5\)"),
        ],
    )
    def test_arguments(self, arguments, match):
        with pytest.raises(ValueError, match=match):
            na2d(self.Q, self.Q, self.Q, **arguments)

    @pytest.mark.parametrize(
        ("k", "v"),
        [
            (torch.zeros(1, 9, 8, 2, 5), Q),
            (torch.zeros(1, 9, 7, 2, 4), Q),
            (torch.zeros(2, 9, 8, 2, 4), Q),
            (torch.zeros(1, 9, 8, 3, 4), torch.zeros(1, 9, 8, 3, 4)),
            (Q, torch.zeros(1, 9, 8, 1, 4)),
            (Q.double(), Q.double()),
            (Q[0], Q[0]),
        ],
    )
    def test_tensors(self, k, v):
        with pytest.raises(ValueError, match="na2d"):
            na2d(self.Q, k, v, 3)

    def test_rank(self):
        with pytest.raises(ValueError, match="1 spatial dims"):
            na1d(self.Q, self.Q, self.Q, 3)


# ---------------------------------------------------------------------- NATTEN
@pytest.mark.parametrize("name", CASES)
def test_natten(name):
    natten = pytest.importorskip("natten")
    grid, *window = CASES[name]
    q, k, v = (t.detach() for t in inputs(grid, dim=8, dtype=torch.float32))
    expected = getattr(natten.functional, f"na{len(grid)}d")(q, k, v, *window)
    torch.testing.assert_close(NA[len(grid)](q, k, v, *window), expected, rtol=0, atol=2e-6)


def test_same_errors_as_natten():
    natten = pytest.importorskip("natten")
    q = torch.zeros(1, 9, 8, 2, 8)
    for arguments in [(5, 1, 2), (3, 4), (1,), (3, 1, 0), ((3, 3, 3),), (3, 1, 1, 1)]:
        for function in (natten.functional.na2d, na2d):
            with pytest.raises(ValueError):
                function(q, q, q, *arguments)


def test_natten_kernels_with_a_part_of_the_queries(monkeypatch):
    """The path to NATTEN's kernels, on its CPU backend: head dims padded, queries padded to the region of the keys."""
    pytest.importorskip("natten")
    from dpzoo.ops import natten_kernels

    q, k, v = (t.detach() for t in inputs((20, 9), dim=5, dtype=torch.float32, batch=1))
    options = ([3, 4], [1, 1], [2, 1], [False, False], 5**-0.5)
    axes = [Axis(20, 3, 1, 2), Axis(9, 4)]
    for lo, hi in [(0, 7), (5, 11), (12, 20)]:
        first, last = axes[0].reach(lo, hi)
        call = (q[:, lo:hi], k[:, first:last], v[:, first:last], None, *options, [lo, 0], [first, 0], [20, 9])
        monkeypatch.setattr(natten_kernels, "DEVICES", ())
        expected = torch.ops.dpzoo.neighborhood_attention(*call)
        monkeypatch.setattr(natten_kernels, "DEVICES", ("cpu",))
        monkeypatch.setattr(natten_kernels, "_has_kernels", lambda: True)
        served = []
        original = natten_kernels._call
        monkeypatch.setattr(natten_kernels, "_call", lambda *a: served.append(1) or original(*a))  # noqa: B023
        found = torch.ops.dpzoo.neighborhood_attention(*call)
        monkeypatch.setattr(natten_kernels, "_call", original)
        assert served
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


# ---------------------------------------------------------------------- torch.compile and meta
def test_one_node_of_a_graph():
    q, k, v = inputs((9, 8))
    compiled = torch.compile(lambda *t: na2d(*t, 3, 1, 2), backend="aot_eager", fullgraph=True)
    same_with_gradients(compiled(q, k, v), na2d(q, k, v, 3, 1, 2), [q, k, v], rtol=0, atol=0)


def test_meta():
    q = torch.zeros(1, 9, 8, 2, 4, device="meta", requires_grad=True)
    out = na2d(q, q, q, 3)
    assert out.is_meta
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad is not None


def test_schema():
    q, k, v = inputs((5, 4))
    window = ([3, 3], [1, 1], [1, 1], [False, False], 0.5, [0, 0], [0, 0], [5, 4])
    torch.library.opcheck(torch.ops.dpzoo.neighborhood_attention.default, (q, k, v, None, *window))
