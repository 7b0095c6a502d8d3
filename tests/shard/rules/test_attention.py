"""Attention: every operand and mask cut on every dim, on one axis and on two."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpzoo.shard import attention_mode
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, expect_same_error, op_test, with_derivatives
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.shard.rules.inputs import FEW

GRID = {"ranks": (), "subgroups": False}
sdpa = F.scaled_dot_product_attention


def _in(mode: str, **options):
    """Attention in a mode, with options of its own."""

    def call(q, k, v, *rest):
        with attention_mode(mode):
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


def _twice(fn):
    """With first derivatives, to be differentiated again; torch's fused kernels cannot."""

    def call(*tensors):
        with sdpa_kernel(SDPBackend.MATH):
            return with_derivatives(fn)(*tensors)

    return call


MASKED = [_normal, _normal, _normal, _bools]
QKV = [(2, 3, 9, 4)] * 3
CROSS = [(2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 5)]
GROUPED = [(2, 6, 9, 4), (2, 3, 9, 4), (2, 3, 9, 4)]


def _masked(mode: str, name: str, shape: tuple[int, ...], shard: int | None, *, bools: bool) -> OpCase:
    """A mask of a shape, plain (None) or cut, of either kind."""
    kind = "bool" if bools else "additive"
    return OpCase(f"{mode}, {kind} mask {name}", fn=lambda q, k, v, m: _in(mode)(q, k, v, m), shape=[*CROSS, shape],
                  shard=[2, 2, 2, shard], fill=MASKED if bools else _normal, ranks=(3,), subgroups=False)  # fmt: skip


MASKS = [
    ("plain", (9, 7), None),
    ("on queries", (2, 3, 9, 7), 2),
    ("on keys", (2, 1, 9, 7), 3),
    ("of keys", (2, 1, 1, 7), 3),
    ("of queries", (1, 1, 9, 1), 2),
    ("of heads", (3, 9, 7), 0),
]

CASES = [
    OpCase("auto", fn=sdpa, shape=QKV, shard=2, mesh2d=(1, 2), covers=("sdpa",)),
    OpCase("cross", fn=sdpa, shape=CROSS, shard=2, layouts=("even", "misaligned", "empty"), **FEW),
    OpCase("causal", fn=lambda *t: sdpa(*t, is_causal=True), shape=QKV, shard=2, **FEW),
    OpCase("queries cut", fn=sdpa, shape=CROSS, shard=[2, None, None], **FEW),
    OpCase("queries cut, causal", fn=lambda *t: sdpa(*t, is_causal=True), shape=CROSS, shard=[2, None, None], **FEW),
    OpCase("keys cut", fn=sdpa, shape=CROSS, shard=[None, 2, 2], mesh2d=[None, (None, 2), (None, 2)], **FEW),
    OpCase("keys cut, causal", fn=lambda *t: sdpa(*t, is_causal=True), shape=CROSS, shard=[None, 2, 2], **FEW),
    OpCase("keys cut, values whole", fn=sdpa, shape=CROSS, shard=[2, 2, None], **FEW),
    OpCase("values cut, keys whole", fn=sdpa, shape=CROSS, shard=[2, None, 2], **FEW),
    OpCase("keys alone cut", fn=sdpa, shape=CROSS, shard=[None, 2, None], **FEW),
    OpCase("keys cut, a mask", fn=sdpa, shape=[*CROSS, (3, 9, 7)], shard=[None, 2, 2, 2], **FEW),
    OpCase("keys cut, a mask of keys", fn=sdpa, shape=[*CROSS, (2, 1, 1, 7)], shard=[None, 2, 2, None], fill=MASKED,
           grads=False, **FEW),
    OpCase("latent queries", fn=lambda k, v, q: sdpa(q, k, v), shape=CROSS[1:], shard=2, plain=[(1, 3, 5, 4)],
           mesh2d=(1, 2), **FEW),
    OpCase("text keys", fn=lambda q, k, v: sdpa(q, k, v), shape=[(2, 3, 9, 4)], shard=2,
           plain=[(2, 3, 5, 4), (2, 3, 5, 4)], **FEW),
    OpCase("class token", fn=lambda x, t: sdpa(*[torch.cat((t.expand(2, 3, 1, 4), x), 2)] * 3), shape=(2, 3, 9, 4),
           shard=2, plain=[(1, 3, 1, 4)], **FEW),
    OpCase("registers as keys", fn=lambda x, t: sdpa(x, *[torch.cat((x, t.expand(2, 3, 2, 4)), 2)] * 2),
           shape=(2, 3, 9, 4), shard=2, plain=[(1, 3, 2, 4)], **FEW),
    OpCase("heads cut", fn=sdpa, shape=[(1, 5, 7, 4)] * 3, shard=1, **FEW),
    OpCase("heads and keys cut", fn=sdpa, shape=[(1, 5, 7, 4)] * 3, shard=[1, 2, 2], **FEW),
    OpCase("batch cut", fn=sdpa, shape=[(5, 2, 7, 4)] * 3, shard=0, **FEW),
    OpCase("channels cut", fn=sdpa, shape=QKV, shard=3, **FEW),
    OpCase("value channels cut", fn=sdpa, shape=CROSS, shard=[None, None, 3], **FEW),
    OpCase("two dims", fn=sdpa, shape=[(9, 4), (7, 4), (7, 4)], shard=0, **FEW),
    OpCase("five dims", fn=sdpa, shape=[(2, 1, 3, 9, 4)] * 3, shard=3, mesh2d=(0, 3), **FEW),
    OpCase("five dims, a mask", fn=sdpa, shape=[(2, 2, 3, 9, 4)] * 3 + [(2, 1, 9, 9)], shard=[3, 3, 3, None], **FEW),
    OpCase("keywords", fn=lambda q, k, v: sdpa(query=q, key=k, value=v, scale=0.3), shape=QKV, shard=2, **FEW),
    OpCase("broadcast batch", fn=sdpa, shape=[(2, 3, 9, 4), (1, 3, 7, 4), (1, 1, 7, 5)], shard=2, mesh2d=(None, 2),
           **FEW),
    OpCase("zero values", fn=lambda q, k: sdpa(q, k, torch.zeros_like(k)), shape=[(2, 3, 9, 4)] * 2, shard=2, **FEW),
    OpCase("grouped queries", fn=_in("auto", enable_gqa=True), shape=GROUPED, shard=2, mesh2d=(1, 2), **FEW),
    OpCase("grouped queries, causal", fn=_in("auto", enable_gqa=True, is_causal=True), shape=GROUPED, shard=2, **FEW),
    OpCase("grouped queries, heads cut", fn=_in("auto", enable_gqa=True), shape=[(2, 6, 7, 4)] + [(2, 2, 7, 4)] * 2,
           shard=[1, None, None], **FEW),
    OpCase("grouped queries, a mask", fn=_in("auto", enable_gqa=True), shape=[*GROUPED, (2, 6, 9, 9)],
           shard=[2, 2, 2, 3], **FEW),
    OpCase("grouped queries, two dims of keys", fn=_in("auto", enable_gqa=True),
           shape=[(6, 9, 4), (2, 9, 4), (3, 9, 5)], shard=1, **FEW),
    # ------------------------------------------------------------------ two axes
    OpCase("tokens and batch", fn=_in("ring"), shape=QKV, mesh2d=(0, 2), **GRID),
    OpCase("tokens and heads, ulysses", fn=_in("ulysses"), shape=[(1, 5, 9, 4)] * 3, mesh2d=(1, 2), **GRID),
    OpCase("queries and keys on two axes", fn=sdpa, shape=CROSS, mesh2d=[(2, None), (None, 2), (None, 2)], **GRID),
    OpCase("queries and keys on two axes, causal", fn=lambda *t: sdpa(*t, is_causal=True), shape=CROSS,
           mesh2d=[(2, None), (None, 2), (None, 2)], **GRID),
    OpCase("keys and values on two axes", fn=sdpa, shape=CROSS, mesh2d=[(None, 2), (None, 2), (2, None)], **GRID),
    OpCase("crossed axes", fn=sdpa, shape=CROSS, mesh2d=[(2, 1), (1, 2), (1, 2)], **GRID),
    OpCase("value channels on the other axis", fn=_in("ring"), shape=CROSS, mesh2d=[(None, 2), (None, 2), (3, 2)],
           **GRID),
    OpCase("a mask on the other axis", fn=_in("ring"), shape=[*CROSS, (2, 3, 9, 7)],
           mesh2d=[(None, 2), (None, 2), (None, 2), (2, 3)], **GRID),
    OpCase("a mask of heads on the other axis", fn=_in("ulysses"), shape=[*CROSS, (3, 9, 1)],
           mesh2d=[(None, 2), (None, 2), (None, 2), (0, None)], **GRID),
    # ------------------------------------------------------------------ second derivatives
    OpCase("auto twice", fn=_twice(sdpa), shape=[(1, 2, 9, 4)] * 3, shard=2, **FEW),
    OpCase("keys cut twice", fn=_twice(sdpa), shape=[(1, 2, 9, 4)] * 3, shard=[None, 2, 2], **FEW),
    *[_masked("auto", *m, bools=b) for m in MASKS for b in (True, False)],
]  # fmt: skip

test_attention = op_test(CASES)


def _cut(full: Tensor, dim: int, layout: str = "uneven") -> Tensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, layout))


WRONG = {
    "head dims": lambda q: sdpa(q, q[..., :4], q),
    "heads": lambda q: sdpa(q, q[:, :2], q[:, :2]),
    "heads of a group": lambda q: sdpa(q, q[:, :2], q[:, :2], enable_gqa=True),
    "columns of a mask": lambda q: sdpa(q, q, q, torch.zeros(12, 5, dtype=q.dtype)),
    "rows of a mask": lambda q: sdpa(q, q, q, torch.zeros(7, 12, dtype=torch.bool)),
    "dtype of a mask": lambda q: sdpa(q, q, q, torch.zeros(12, 12, dtype=torch.int64)),
    "a mask and causal": lambda q: sdpa(q, q, q, torch.zeros(12, 12, dtype=q.dtype), is_causal=True),
    "dtypes": lambda q: sdpa(q, q.float(), q.float()),
    "one dim": lambda q: sdpa(q[0, 0, :, 0], q[0, 0, :, 0], q[0, 0, :, 0]),
    "probability": lambda q: sdpa(q, q, q, dropout_p=1.5),
    "unknown word": lambda q: sdpa(q, q, q, causal=True),
}


@pytest.mark.parametrize("name", list(WRONG))
@distributed(ranks=3)
def test_what_torch_refuses_is_refused_on_every_rank(name):
    full = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    for mode in ("auto", "ring", "ulysses"):
        with attention_mode(mode):
            expect_same_error(WRONG[name], full, 2)


@distributed(ranks=2)
def test_more_keys_than_values():
    """torch's CPU kernel reads beyond the values."""
    q = _cut(torch.randn(2, 3, 12, 8), 2)
    expect_error(lambda: sdpa(q, q, q[:, :, :5]), RuntimeError)


@distributed(ranks=2)
def test_the_words_of_attention_mode():
    expect_error(lambda: attention_mode("tree").__enter__(), ValueError, "'ring'.*tree")


@distributed(ranks=3)
def test_autocast_decides_the_dtype():
    plain = [torch.randn(1, 2, 24, 8) for _ in range(3)]
    mask = torch.randn(24, 24)
    for mode in ("gather", "ring", "ulysses"):
        q, k, v = (_cut(t, 2).requires_grad_() for t in plain)
        with torch.autocast("cpu", torch.bfloat16), attention_mode(mode):
            out, expected = sdpa(q, k, v, mask), sdpa(*plain, mask)
            out.float().sum().backward()
        assert out.dtype is expected.dtype
        assert q.grad.dtype is torch.float32
        torch.testing.assert_close(out.full_tensor(), expected, rtol=2**-6, atol=2**-6)
    q, k, v = (_cut(t.double(), 2) for t in plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(q, k, v).dtype is sdpa(*[t.double() for t in plain]).dtype is torch.float64
