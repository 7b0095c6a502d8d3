"""The arithmetic under sharded attention, on one process: blocks, their joining, dropout by global index."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpzoo.shard.kernels import attention_block, attention_fused
from dpzoo.shard.kernels.attention_block import Scoring, block_backward, block_forward
from dpzoo.shard.kernels.attention_dropout import Dropout
from dpzoo.shard.kernels.attention_parts import Backward, Forward, Rules, parts
from dpzoo.shard.kernels.zigzag import contiguous, zigzag
from dpzoo.shard.rules.attention_fold import as_kernels_leave_it, folded, folded_mask, in_token_order, unfolded_mask

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False):
    """Output and log-sum-exp, written down once more."""
    times = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(times, 1).mT * scale
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else s + mask
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = s.logsumexp(-1)
    weights = (s - lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp()
    return weights @ v.repeat_interleave(times, 1), lse


def bools(*shape: int) -> Tensor:
    mask = torch.rand(shape) < 0.6
    mask[..., 0, :] = False
    return mask


MASKS = {
    "none": lambda: None,
    "full": lambda: draw(2, 4, 6, 5),
    "rows and columns": lambda: draw(6, 5)[None, None],
    "columns": lambda: draw(2, 1, 1, 5),
    "rows": lambda: draw(1, 4, 6, 1),
    "bool": lambda: bools(2, 1, 6, 5),
}


@pytest.mark.parametrize("way", ["fused", "written out", "in chunks"])
@pytest.mark.parametrize("mask_name", list(MASKS))
@pytest.mark.parametrize(("key_heads", "head_dim", "value_dim"), [(4, 4, 4), (2, 4, 4), (4, 3, 7), (1, 5, 2)])
def test_a_block(way, mask_name, key_heads, head_dim, value_dim, monkeypatch):
    torch.manual_seed(0)
    if way == "in chunks":
        monkeypatch.setattr(attention_block, "CHUNK_BYTES", 2 * 4 * 5 * 8 * 2)  # two queries at a time
    q, k, v = draw(2, 4, 6, head_dim), draw(2, key_heads, 5, head_dim), draw(2, key_heads, 5, value_dim)
    mask, g = MASKS[mask_name](), draw(2, 4, 6, value_dim)
    needs = [t.requires_grad_() for t in (q, k, v)]
    if mask is not None and mask.is_floating_point():
        needs.append(mask.requires_grad_())
    wanted, wanted_lse = reference(q, k, v, mask, 0.4)
    wanted_grads = torch.autograd.grad(wanted, needs, g)
    scoring = Scoring(0.4, mask)
    with torch.no_grad(), sdpa_kernel([SDPBackend.FLASH_ATTENTION] if way == "fused" else [SDPBackend.MATH]):
        assert (attention_fused.find(q, k, v, mask) is not None) == (way == "fused")
        out, lse = block_forward(q, k, v, scoring)
        grads = block_backward(g, q, k, v, out, lse, scoring, mask_grad=len(needs) > 3)
    torch.testing.assert_close(out, wanted.detach(), **EXACT)
    torch.testing.assert_close(lse, wanted_lse.detach(), **EXACT)
    for found, want in zip(grads, wanted_grads, strict=False):
        torch.testing.assert_close(found, want, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_cpu_kernels_are_trusted(dtype, masked):
    q = draw(1, 2, 5, 4, dtype=dtype)
    assert attention_fused.find(q, q, q, draw(5, 5, dtype=dtype) if masked else None) is not None


def test_a_kernel_with_another_log_sum_exp_is_not_trusted():
    class InBits(attention_fused._Cpu):
        def forward(self, *call):
            out, lse = super().forward(*call)
            return out, lse / math.log(2.0)

    class Fails(attention_fused._Cpu):
        def backward(self, *call):
            raise RuntimeError("no kernel")

    q = draw(1, 2, 5, 4)
    assert attention_fused._reproduces(attention_fused._Cpu(), q, 4, False, False)
    assert attention_fused._reproduces(attention_fused._Cpu(), q, 7, True, True)
    assert not attention_fused._reproduces(InBits(), q, 4, False, False)
    assert not attention_fused._reproduces(Fails(), q, 4, False, False)


# ---------------------------------------------------------------------- parts
CUTS = [[(0, 9)], [(0, 3), (3, 3), (3, 9)], [(0, 1), (8, 9)], [(4, 6)], [(6, 9)]]


@pytest.mark.parametrize("rows", CUTS)
@pytest.mark.parametrize("columns", CUTS)
def test_parts_cover_what_is_seen_once(rows, columns):
    row_at = [i for lo, hi in rows for i in range(lo, hi)]
    column_at = [j for lo, hi in columns for j in range(lo, hi)]
    for causal in (False, True):
        covered = torch.zeros(len(row_at), len(column_at), dtype=torch.int64)
        for part in parts(rows, columns, causal):
            block = torch.ones_like(covered[part.rows, part.columns])
            assert block.numel() > 0
            assert (row_at[part.rows.start], column_at[part.columns.start]) == (part.row_at, part.column_at)
            if part.diagonal:
                assert block.shape[0] == block.shape[1] and part.row_at == part.column_at
                block = block.tril()
            covered[part.rows, part.columns] += block
        seen = torch.tensor([[int(not causal or j <= i) for j in column_at] for i in row_at])
        assert torch.equal(covered, seen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [2, 1])
@pytest.mark.parametrize("dropped", [False, True])
def test_blocks_join_to_the_whole(causal, key_heads, dropped):
    torch.manual_seed(1)
    n, m = 9, 7
    q, k, v, g = draw(2, 2, n, 3), draw(2, key_heads, m, 3), draw(2, key_heads, m, 4), draw(2, 2, n, 4)
    mask = None if causal else bools(2, 1, n, m)
    lead = torch.arange(4).view(2, 2)
    dropout = Dropout(11, 0.4, lead, n, m) if dropped else None
    needs = [t.requires_grad_() for t in (q, k, v)]
    s = q @ k.repeat_interleave(2 // key_heads, 1).mT * 0.7
    hidden = torch.ones(n, m, dtype=torch.bool).triu(1) if causal else ~mask
    weights = s.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0.0)
    if dropout is not None:
        weights = weights * dropout.factors((0, n), (0, m), q)
    wanted = weights @ v.repeat_interleave(2 // key_heads, 1)
    wanted_grads = torch.autograd.grad(wanted, needs, g)
    rules, rows = Rules(0.7, causal, dropout), [(0, 2), (2, n)]
    blocks = [[(5, 7)], [(0, 1), (3, 5)], [(2, 2)], [(1, 3)]]
    with torch.no_grad():
        forward = Forward(q, rows, rules, mask)
        for columns in blocks:
            at = [j for lo, hi in columns for j in range(lo, hi)]
            forward.add(k[..., at, :], v[..., at, :], columns)
        out, lse = forward.result(4)
        backward = Backward(g, q, out, lse, rows, rules, mask)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for columns in blocks:
            at = [j for lo, hi in columns for j in range(lo, hi)]
            dk[..., at, :], dv[..., at, :] = backward.block(k[..., at, :], v[..., at, :], columns)
    torch.testing.assert_close(out, wanted.detach(), **EXACT)
    for found, want in zip((backward.dq, dk, dv), wanted_grads, strict=True):
        torch.testing.assert_close(found, want, **EXACT)


def test_dropped_weights_have_the_probability_and_their_place():
    lead = torch.arange(6).view(2, 3)
    drop = Dropout(5, 0.25, lead, 40, 30)
    like = torch.zeros((), dtype=torch.float64)
    whole = drop.factors((0, 40), (0, 30), like)
    assert set(whole.unique().tolist()) == {0.0, 1.0 / 0.75}
    assert abs((whole == 0).double().mean().item() - 0.25) < 0.03
    assert torch.equal(drop.factors((7, 20), (3, 9), like), whole[:, :, 7:20, 3:9])
    assert torch.equal(drop.of_heads(1, 1, 2).factors((0, 40), (0, 30), like), whole[:, 1:])
    assert not torch.equal(whole[0, 0], whole[0, 1])
    assert not Dropout(5, 1.0, lead, 4, 3).factors((0, 4), (0, 3), like).any()


# ---------------------------------------------------------------------- shapes
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 40])
def test_zigzag_is_a_cut_of_equal_work(total, ranks):
    held = zigzag(total, ranks)
    assert sorted(i for intervals in held for lo, hi in intervals for i in range(lo, hi)) == list(range(total))
    work = [sum(i + 1 for lo, hi in intervals for i in range(lo, hi)) for intervals in held]
    assert max(work) - min(work) <= 2 * total
    assert contiguous((2, 0, 5)) == (((0, 2),), ((2, 2),), ((2, 7),))


@pytest.mark.parametrize(
    ("shape", "query", "grouped"),
    [
        ((6, 5), (2, 3, 6, 4), False),
        ((3, 1, 5), (2, 3, 6, 4), False),
        ((2, 1, 3, 6, 1), (2, 2, 3, 6, 4), False),
        ((1, 2, 1, 6, 5), (2, 2, 3, 6, 4), False),
        ((6, 5), (3, 6, 4), False),
        ((2, 1, 1, 6, 5), (2, 3, 2, 6, 4), True),
        ((1, 3, 2, 1, 5), (2, 3, 2, 6, 4), True),
        ((3, 1, 6, 5), (3, 2, 6, 4), True),
    ],
)
def test_folding_a_mask_and_back(shape, query, grouped):
    mask, g = draw(*shape).requires_grad_(), draw(*query[:-1], 5)
    whole = mask.expand(*query[:-1], 5)
    four = folded_mask(mask, query, grouped)
    q4 = folded(torch.zeros(query), grouped, query=True)
    flat = folded(whole[..., :5], grouped, query=True)
    assert torch.equal(four.expand(*q4.shape[:-1], 5), flat)
    (wanted,) = torch.autograd.grad(whole, mask, g)
    g4 = folded(g, grouped, query=True).sum_to_size(four.shape)
    torch.testing.assert_close(unfolded_mask(g4, shape, query, grouped), wanted)


def test_memory_order():
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert as_kernels_leave_it(out).data_ptr() == out.data_ptr()
    assert in_token_order(dq).data_ptr() == dq.data_ptr()
    other = in_token_order(out)
    assert torch.equal(other, out) and other.stride() == dq.stride()
    row = torch.randn(2, 1, 3, 4).transpose(1, 2)  # one token: both orders at once
    assert as_kernels_leave_it(row).stride() == (12, 4, 4, 1) and in_token_order(row).stride() == (12, 4, 12, 1)
