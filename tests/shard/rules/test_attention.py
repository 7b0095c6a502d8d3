"""Attention: every operand and mask cut on every dim, gathered and around the ring."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpzoo.shard import attention_mode, manual_seed
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut

FEW = {"ranks": (2, 3), "subgroups": False}
sdpa = F.scaled_dot_product_attention


def _ring(**options):
    def call(q, k, v, *rest):
        with attention_mode("ring"):
            return sdpa(q, k, v, *rest, **options)

    return call


def _gather(**options):
    def call(q, k, v, *rest):
        with attention_mode("gather"):
            return sdpa(q, k, v, *rest, **options)

    return call


def _bools(shape: tuple[int, ...]) -> Tensor:
    """True where a query may look; the first query of every mask sees nothing."""
    mask = torch.rand(shape) < 0.7
    if shape[-2] > 1:
        mask.select(-2, 0).fill_(False)
    return mask


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _second(fn, *tensors):
    """The first derivatives, to be differentiated again; torch's fused kernels cannot."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.grad(fn(*tensors).square().sum(), tensors, create_graph=True)


MASKED = [_normal, _normal, _normal, _bools]
QKV = [(2, 3, 9, 4)] * 3
CROSS = [(2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 5)]


def _masked(name: str, shape: tuple[int, ...], shard: int | None, *, bools: bool) -> OpCase:
    """A mask of a shape, plain (None) or cut, of either kind."""
    kind = "bool" if bools else "additive"
    return OpCase(f"{kind} mask {name}", fn=lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), shape=[*CROSS, shape],
                  shard=[2, 2, 2, shard], fill=MASKED if bools else _normal, **FEW)  # fmt: skip


CASES = [
    OpCase(
        "gather",
        fn=_gather(),
        shape=QKV,
        shard=2,
        mesh2d=(1, 2),
        layouts=("even", "misaligned", "empty"),
        covers=("sdpa",),
    ),
    OpCase("ring", fn=_ring(), shape=QKV, shard=2, mesh2d=(1, 2), layouts=("even", "uneven", "empty")),
    OpCase("ring of a grid", fn=_ring(), shape=QKV, shard=2, mesh2d=(0, 2), ranks=(), subgroups=False),
    OpCase("gather causal", fn=_gather(is_causal=True), shape=QKV, shard=2, **FEW),
    OpCase("ring causal", fn=_ring(is_causal=True), shape=QKV, shard=2),
    OpCase("gather cross", fn=_gather(), shape=CROSS, shard=2, layouts=("even", "misaligned", "empty"), **FEW),
    OpCase("ring cross", fn=_ring(), shape=CROSS, shard=2, layouts=("even", "misaligned", "empty"), **FEW),
    OpCase("ring cross causal", fn=_ring(is_causal=True), shape=CROSS, shard=2, **FEW),
    OpCase("gather cross causal", fn=_gather(is_causal=True), shape=CROSS, shard=2, **FEW),
    OpCase("queries cut", fn=sdpa, shape=CROSS, shard=[2, None, None], **FEW),
    OpCase("keys cut", fn=sdpa, shape=CROSS, shard=[None, 2, 2], **FEW),
    OpCase("keys cut, values whole", fn=sdpa, shape=CROSS, shard=[2, 2, None], **FEW),
    OpCase("latent queries", fn=lambda k, v, q: sdpa(q, k, v), shape=CROSS[1:], shard=2, plain=[(1, 3, 5, 4)], **FEW),
    OpCase(
        "class token",
        fn=lambda x, t: sdpa(*[torch.cat((t.expand(2, 3, 1, 4), x), 2)] * 3),
        shape=(2, 3, 9, 4),
        shard=2,
        plain=[(1, 3, 1, 4)],
        **FEW,
    ),
    OpCase("heads cut", fn=sdpa, shape=[(1, 5, 7, 4)] * 3, shard=1, **FEW),
    OpCase("batch cut", fn=sdpa, shape=[(5, 2, 7, 4)] * 3, shard=0, **FEW),
    OpCase("channels cut", fn=sdpa, shape=[(2, 3, 9, 4)] * 3, shard=3, **FEW),
    OpCase("value channels cut", fn=sdpa, shape=CROSS, shard=[None, None, 3], **FEW),
    OpCase("three dims", fn=_ring(), shape=[(2, 9, 4)] * 3, shard=1, **FEW),
    OpCase("two dims", fn=sdpa, shape=[(9, 4), (7, 4), (7, 4)], shard=0, **FEW),
    OpCase("keywords", fn=lambda q, k, v: sdpa(query=q, key=k, value=v, scale=0.3), shape=QKV, shard=2, **FEW),
    OpCase("ring scale", fn=_ring(scale=2.0), shape=QKV, shard=2, **FEW),
    OpCase("broadcast batch", fn=sdpa, shape=[(2, 3, 9, 4), (1, 3, 7, 4), (1, 1, 7, 5)], shard=2, **FEW),
    OpCase("zero values", fn=lambda q, k: sdpa(q, k, torch.zeros_like(k)), shape=[(2, 3, 9, 4)] * 2, shard=2, **FEW),
    OpCase(
        "grouped queries",
        fn=lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        shape=[(2, 6, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4)],
        shard=2,
        **FEW,
    ),
    OpCase(
        "grouped queries, heads cut",
        fn=lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
        shape=[(2, 6, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4)],
        shard=[1, None, None],
        gathers=True,
        **FEW,
    ),
    OpCase(
        "grouped queries, ring",
        fn=_ring(enable_gqa=True),
        shape=[(2, 6, 9, 4), (2, 3, 9, 4), (2, 3, 9, 4)],
        shard=2,
        **FEW,
    ),
    *[_masked("plain", (9, 7), None, bools=b) for b in (True, False)],
    *[_masked("on queries", (2, 3, 9, 7), 2, bools=b) for b in (True, False)],
    *[_masked("on keys", (2, 1, 9, 7), 3, bools=b) for b in (True, False)],
    *[_masked("of keys", (2, 1, 1, 7), 3, bools=b) for b in (True, False)],
    *[_masked("of queries", (1, 1, 9, 1), 2, bools=b) for b in (True, False)],
    *[_masked("of heads", (3, 9, 7), 0, bools=b) for b in (True, False)],
    OpCase(
        "plain mask with a gradient",
        fn=lambda q, k, v, m: sdpa(q, k, v, m),
        shape=CROSS,
        shard=2,
        plain=[(3, 9, 7)],
        **FEW,
    ),
    OpCase("gather twice", fn=lambda *qkv: _second(_gather(), *qkv), shape=[(1, 2, 9, 4)] * 3, shard=2, **FEW),
    OpCase("keys cut twice", fn=lambda *qkv: _second(sdpa, *qkv), shape=[(1, 2, 9, 4)] * 3, shard=[None, 2, 2], **FEW),
    # ------------------------------------------------------------------ modules
    OpCase("MultiheadAttention", lambda: _Self(8, 2), (9, 2, 8), 0, covers=("multi_head_attention_forward",), **FEW),
    OpCase("MultiheadAttention batch first", lambda: _Self(8, 2, batch_first=True), (2, 9, 8), 1, **FEW),
    OpCase("MultiheadAttention weights", lambda: _Self(8, 2, weights=True), (9, 1, 8), 0, gathers=True, **FEW),
    OpCase("MultiheadAttention unbatched", lambda: _Self(8, 2), (9, 8), 0, **FEW),
    OpCase(
        "TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        (1, 9, 8),
        1,
        gathers=True,
        **FEW,
    ),
    OpCase(
        "TransformerEncoderLayer eval",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval(),
        (1, 9, 8),
        1,
        gathers=True,
        **FEW,
    ),
    OpCase(
        "TransformerDecoderLayer",
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0),
        [(9, 1, 8), (7, 1, 8)],
        0,
        gathers=True,
        **FEW,
    ),
]


class _Self(nn.Module):
    def __init__(self, width: int, heads: int, weights: bool = False, **options) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(width, heads, **options), weights

    def forward(self, x: Tensor):
        out, weights = self.attention(x, x, x, need_weights=self.weights)
        return (out, weights) if self.weights else out


test_attention = op_test(CASES)


def _cut(full: Tensor, dim: int, layout: str = "uneven") -> Tensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, layout))


def _qkv(dtype: torch.dtype = torch.float64, n: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, n, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("mode", ["gather", "ring"])
@distributed(ranks=[1, 2, 4])
def test_error_in_bfloat16_does_not_grow_with_the_ranks(ranks, mode):
    plain = [t.requires_grad_() for t in _qkv(torch.bfloat16, n=64)]
    exact = [t.detach().double().requires_grad_() for t in plain]
    sharded = [_cut(t.detach(), 2).requires_grad_() for t in plain]
    with attention_mode(mode):
        out = sdpa(*sharded)
    assert out.dtype is torch.bfloat16
    expected = sdpa(*exact)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    # One rounding of the result, and of each gradient, whatever the number of ranks.
    torch.testing.assert_close(out.full_tensor().double(), expected, rtol=2**-7, atol=2**-8)
    for found, want in zip(sharded, exact, strict=True):
        torch.testing.assert_close(found.grad.full_tensor().double(), want.grad, rtol=2**-5, atol=2**-5)


@distributed(ranks=2)
def test_a_ring_is_differentiated_once():
    q, k, v = (_cut(t, 2).requires_grad_() for t in _qkv())
    with attention_mode("ring"):
        (g,) = torch.autograd.grad(sdpa(q, k, v).square().sum(), q, create_graph=True)
    expect_error(lambda: g.sum().backward(), RuntimeError, "once_differentiable|differentiate twice")


@pytest.mark.parametrize("mode", ["gather", "ring"])
@distributed(ranks=2)
def test_autocast_decides_the_dtype(mode):
    plain = _qkv(torch.float32)
    q, k, v = (_cut(t, 2) for t in plain)
    with torch.autocast("cpu", torch.bfloat16), attention_mode(mode):
        out, expected = sdpa(q, k, v), sdpa(*plain)
    assert out.dtype is expected.dtype
    torch.testing.assert_close(out.full_tensor(), expected, rtol=2**-6, atol=2**-6)


@distributed(ranks=3)
def test_bad_arguments_raise_as_in_torch_on_every_rank():
    q, k, v = (_cut(t, 2) for t in _qkv())
    expect_error(lambda: sdpa(q, k[..., :4], v), RuntimeError)
    expect_error(lambda: sdpa(q, k, v[:, :, :5]), RuntimeError)
    expect_error(lambda: sdpa(q, k, v, torch.zeros(24, 5, dtype=torch.float64)), RuntimeError)
    expect_error(lambda: sdpa(q, k, v, torch.zeros(24, 24, dtype=torch.float64), is_causal=True), RuntimeError)
    with attention_mode("ring"):
        expect_error(lambda: sdpa(q, k[:, :1].expand_as(k)[:, :, :, :4], v), RuntimeError)
    expect_error(lambda: attention_mode("tree").__enter__(), ValueError, "tree")


@distributed(ranks=[1, 2, 3])
def test_dropout_is_the_same_for_any_number_of_ranks(ranks):
    plain = _qkv(n=9)
    found = []
    for dims in ((2, 2, 2), (1, 1, 1)):
        manual_seed(7)
        q, k, v = (_cut(t, d).requires_grad_() for t, d in zip(plain, dims, strict=True))
        out = sdpa(q, k, v, dropout_p=0.4)
        out.square().sum().backward()
        found.append((out.full_tensor(), q.grad.full_tensor(), v.grad.full_tensor()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    marks = torch.stack([t.detach().square().sum() for t in found[0]])
    torch.testing.assert_close(marks, torch.tensor(DROPPED, dtype=torch.float64))  # what one rank finds
    undropped = sdpa(*plain)
    assert not torch.allclose(found[0][0], undropped)


DROPPED = (49.694671578829954, 128.55994261813083, 227.15763814242376)
