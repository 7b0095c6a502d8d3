"""Copies, casts, comparisons and new tensors."""

from __future__ import annotations

import copy

import torch

from dpzoo.shard import Replicate, Shard, ShardTensor
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test
from tests.shard.rules.inputs import FEW
from tests.shard.rules.inputs import cut as _cut
from tests.shard.rules.inputs import numbers as _numbers

CASES = [
    OpCase("like", fn=lambda x: [torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 2.5),
           torch.zeros_like(x, dtype=torch.bool), torch.full_like(input=x, fill_value=True, dtype=torch.bool)],
           shape=(5, 9), shard=1, mesh2d=(0, 1)),
    OpCase("new", fn=lambda x: [x.new_zeros(5, 9), x.new_ones((5, 9)), x.new_full((9,), 2.0),
           x.new_zeros(3, dtype=torch.int32), x.new_zeros(()) + x, x.new_tensor([1.0, 2.0]) * 2], shape=(5, 9), shard=1,
           covers=("new_tensor",), **FEW),
    OpCase("casts", fn=lambda x: [x.float(), x.to(torch.int64), x.bool(), x.half(), x.bfloat16().double(), x.cpu(),
           x.type(torch.float32), x.type_as(x.float()), x.to(x.int()), x.cfloat(), x.to("cpu", torch.float32)],
           shape=(5, 9), shard=1, grads=False, mesh2d=(0, 1)),
    OpCase("casts, gradients", fn=lambda x: [x.float().double(), x.to(torch.float32).to(x) * x, x.cdouble().real],
           shape=(5, 9), shard=1, rtol=1.3e-6, atol=1e-5, **FEW),
    OpCase("copies", fn=lambda x: [x.clone(), x.contiguous(), x.detach(), x.t().contiguous(), x.t().clone(),
           x.clone(memory_format=torch.contiguous_format), torch.clone(input=x)], shape=(5, 9), shard=1, mesh2d=(0, 1)),
    OpCase("channels_last", fn=lambda x: [x.to(memory_format=torch.channels_last) * 2,
           x.contiguous(memory_format=torch.channels_last)], shape=(2, 3, 5, 4), shard=2, **FEW),
    OpCase("comparisons", fn=lambda x: [torch.equal(x, x), torch.equal(x, x * 1.0), torch.equal(x, x + 1),
           x.equal(x.t()), (x == x).all()], shape=(5, 9), shard=1, grads=False, mesh2d=(0, 1)),
]  # fmt: skip

test_ops = op_test(CASES)


@distributed(ranks=3)
def test_new_tensors_of_the_same_shape_are_cut_alike():
    x = _cut(_numbers(7, 3), sizes=(4, 0, 3))
    for new in (torch.zeros_like(x), torch.empty_like(x, dtype=torch.int8), x.new_zeros(7, 3), x.new_empty(7, 3)):
        assert new._spec.sharding_shapes() == x._spec.sharding_shapes()
        assert not new.requires_grad
    assert x.new_zeros(3, 7).placements == (Replicate(),)
    assert torch.zeros_like(x, requires_grad=True).requires_grad


@distributed(ranks=2)
def test_new_tensors_like_a_partial_value_are_whole():
    from dpzoo.shard import Partial

    part = ShardTensor.from_local(torch.full((3,), 2.0), domain_mesh(), [Partial()])
    for new in (torch.ones_like(part), part.new_ones(3), torch.full_like(part, 1.0)):
        assert new.placements == (Replicate(),)
        assert torch.equal(new.full_tensor(), torch.ones(3))
    assert torch.equal(part.double().full_tensor(), torch.full((3,), 4.0).double())
    assert torch.equal(part.bool().full_tensor(), torch.ones(3, dtype=torch.bool))
    part.zero_()
    assert torch.equal(part.full_tensor(), torch.zeros(3))


@distributed(ranks=2)
def test_writes_into_a_partial_value():
    from dpzoo.shard import Partial, ShardError
    from dpzoo.testing import expect_error

    part = ShardTensor.from_local(torch.full((3,), 2.0), domain_mesh(), [Partial()])
    expect_error(lambda: part.mul_(part), ShardError, "partial")
    expect_error(lambda: part.copy_(torch.ones(3)), ShardError, "partial")
    expect_error(lambda: part.fill_(1.0), ShardError, "partial")


@distributed(ranks=2)
def test_equal_is_the_same_on_every_rank():
    x, y = _cut(_numbers(6, 2)), _numbers(6, 2)
    y[5, 1] = 0.0  # on the last rank only
    assert torch.equal(x, _numbers(6, 2))
    assert torch.equal(x, _cut(_numbers(6, 2), dim=1))
    assert not torch.equal(x, y)
    assert not torch.equal(y, x)
    assert not torch.equal(x, _cut(y))
    assert not torch.equal(x, _numbers(6, 3))


@distributed(ranks=2)
def test_copies_and_moves_keep_the_layout():
    x = _cut(_numbers(7, 3), sizes=(5, 2), requires_grad=True)
    for out in (x.clone(), x.float(), x.to(torch.device("cpu")), copy.deepcopy(x), copy.copy(x), x.detach(), x.to(x)):
        assert out.placements == (Shard(0),)
        assert out._spec.sharding_shapes() == x._spec.sharding_shapes()
    assert x.to(torch.float64) is x
    assert x.contiguous() is x
    assert x.clone()._local_tensor.data_ptr() != x._local_tensor.data_ptr()
