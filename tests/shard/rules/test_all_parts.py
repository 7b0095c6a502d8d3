"""split, chunk and unbind: gradients of parts that nobody used, in memory and in second derivatives."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpzoo.shard import Shard, scatter_tensor
from dpzoo.testing import OpCase, distributed, domain_mesh, op_test, with_derivatives
from tests.shard.rules.inputs import FEW


def _few(x):
    a, _, c = x.split([2, 3, 4])
    return a.square().sum() + (c * c).sum() + x.chunk(3, 1)[1].pow(3).sum() + x.unbind(1)[2].sin().sum()


CASES = [
    OpCase("second derivatives, some parts unused", fn=with_derivatives(_few), shape=(9, 6), shard=0, mesh2d=(0, 1)),
    OpCase(
        "second derivatives of rows", fn=with_derivatives(lambda x: x.unbind()[1] ** 3), shape=(4, 3), shard=0, **FEW
    ),
    OpCase("no part at all", fn=lambda x: x.sum() + len(x[:, :0].unbind(1)), shape=(4, 3), shard=0, **FEW),
    OpCase("parts of nothing", fn=lambda x: [*x[:, :0].chunk(2, 1), *x[:0].split(3)], shape=(4, 3), shard=0, **FEW),
    OpCase("a part used twice", fn=lambda x: [(p := x.chunk(2))[0] * 2, p[0] + 1], shape=(7, 3), shard=0, **FEW),
]
test_ops = op_test(CASES)


class Largest(TorchDispatchMode):
    """Elements of the largest plain tensor that any op returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if type(t) is Tensor:
                self.numel = max(self.numel, t.numel())
        return out


@distributed(ranks=2)
def test_backward_allocates_nothing_of_the_global_size():
    full = torch.randn(64, 12)
    for use in (lambda x: x.unbind(1)[0], lambda x: x.chunk(4, 1)[2], lambda x: x.split([1, 63])[1]):
        x = scatter_tensor(full, 0, domain_mesh(), [Shard(0)], requires_grad=True)
        y = use(x).square().sum()
        with Largest() as seen:
            y.backward()
        assert 0 < seen.numel <= x.to_local().numel()


@distributed(ranks=2)
def test_slices_of_tensors_that_are_cut_in_different_places():
    """Equal shapes, equal parts: every gradient comes back in the layout of its own tensor."""
    full = torch.randn(8, 3, dtype=torch.float64)
    for part in (lambda t: t[2:6], lambda t: t[3], lambda t: t.narrow(0, 1, 5), lambda t: t[::2]):
        cut = [scatter_tensor(full, 0, domain_mesh(), [Shard(0)], sizes={0: s}) for s in ((4, 4), (6, 2), (0, 8))]
        for _ in range(2):
            inputs = [t.detach().requires_grad_(True) for t in cut]
            outs = [part(t).square().sum() for t in inputs]
            for y in reversed(outs):
                y.backward()
            plain = full.clone().requires_grad_(True)
            part(plain).square().sum().backward()
            for t in inputs:
                assert t.grad._spec.sizes == t._spec.sizes
                torch.testing.assert_close(t.grad.full_tensor(), plain.grad)
            grads = torch.autograd.grad(sum(part(t).pow(3).sum() for t in inputs), inputs)
            assert [g._spec.sizes for g in grads] == [t._spec.sizes for t in inputs]
