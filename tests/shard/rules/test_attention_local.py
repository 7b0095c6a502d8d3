"""Attention that needs nothing of other ranks: batch or heads are cut, or one rank has everything."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpzoo.shard.collectives import gather_objects
from dpzoo.shard.rules import attention
from dpzoo.shard.rules.attention_local import LocalAttention
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut

sdpa = F.scaled_dot_product_attention
QKV = [(5, 6, 7, 4)] * 3


def _of_tokens(x):
    """From a packed projection, as models do: queries lie in memory token by token."""
    q, k, v = x.unflatten(-1, (3, 6, 4)).permute(2, 0, 3, 1, 4).unbind(0)
    return sdpa(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1)


CASES = [
    OpCase("heads", fn=sdpa, shape=QKV, shard=1),
    OpCase("batch, causal", fn=lambda *t: sdpa(*t, is_causal=True, scale=0.3), shape=QKV, shard=0),
    OpCase("heads and batch", fn=sdpa, shape=QKV, mesh2d=(0, 1), ranks=(), subgroups=False),
    OpCase("one rank has all", fn=sdpa, shape=QKV, shard=2, ranks=(1,)),
    OpCase("of a packed projection", fn=_of_tokens, shape=(5, 7, 72), shard=0),
    OpCase("of a packed projection, tokens cut", fn=_of_tokens, shape=(1, 7, 72), shard=1),
]

test_local = op_test(CASES)


def _cut(full, dim, sizes):
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, sizes))


@distributed(ranks=2)
def test_one_node_without_messages():
    t = _cut(torch.randn(QKV[0], dtype=torch.float64), 1, "uneven").requires_grad_()
    attention._PLANS.clear()
    with count_traffic() as sent:
        out = sdpa(t, t, t)
        out.backward(torch.ones_like(out).detach())
    assert sent.calls == 0
    assert [type(plan) for plan in attention._PLANS.values()] == [LocalAttention]


@pytest.mark.parametrize("dim", [1, 2])
@distributed(ranks=3)
def test_memory_order_is_that_of_torch_on_all_ranks(dim):
    """A later view must be one where torch's is, and on all ranks or on none."""
    for shape in ((2, 9, 4, 8), (1, 3, 3, 8)):
        for transposed in (False, True):
            full = torch.randn(shape) if transposed else torch.randn(shape).transpose(1, 2).contiguous()
            q = _cut(full, 3 - dim if transposed else dim, "tiny").requires_grad_()
            heads_first = q.transpose(1, 2) if transposed else q
            out = sdpa(heads_first, heads_first, heads_first)
            (dq,) = torch.autograd.grad(out.sum(), heads_first)
            orders = gather_objects((out._spec.stride, dq._spec.stride), out._spec.layout.groups[0])
            assert len(set(orders)) == 1, (dim, transposed, orders)
            plain = full.transpose(1, 2) if transposed else full
            assert out._spec.stride == sdpa(plain, plain, plain).stride()
