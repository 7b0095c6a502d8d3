"""Dot product with a handler of your own: a function that reduces over the cut dim.

python examples/quickstart/dot_product.py
torchrun --nproc-per-node 3 examples/quickstart/dot_product.py

`torch.dot` has a rule already; a handler that a user registers wins over it. This one shows the three steps of every
reduction: the local op on this rank's shards, a result that is only this rank's summand, and its sum.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from agreement import compare
from ranks import launch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import Partial, Replicate, Shard, ShardTensor, scatter


def dot_handler(func: Callable[..., Tensor], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    """What `torch.dot` does when one of its operands is a ShardTensor."""
    return _dot(func, *args, **kwargs)


def _dot(func: Callable[..., Tensor], input: Tensor, tensor: Tensor) -> ShardTensor:
    """Dot product of vectors (n,) in any layouts, either of them plain; the result is whole on every rank."""
    template = next(t for t in (input, tensor) if isinstance(t, ShardTensor))
    x = brought_to(template, input)
    y = brought_to(x, tensor)
    local = func(x.to_local(grad_placements=x.placements), y.to_local(grad_placements=y.placements))
    summands = [Partial() if isinstance(p, Shard) else Replicate() for p in x.placements]
    result = ShardTensor.from_local(local, x.device_mesh, summands, sharding_shapes={})
    return result.redistribute(placements=[Replicate() for _ in summands])  # one all-reduce of one number


def brought_to(template: ShardTensor, t: Tensor) -> ShardTensor:
    """`t` cut in the places of `template`, which has the same shape; sums that are not added up yet are added."""
    if not isinstance(t, ShardTensor):  # a plain tensor is the same on every rank
        everywhere = [Replicate() for _ in template.placements]
        t = ShardTensor.from_local(t, template.device_mesh, everywhere, sharding_shapes={})
    placements = [p if isinstance(p, Shard) else Replicate() for p in template.placements]
    sizes: dict[int, Sequence[int]] = {
        axis: template.spec.sizes[axis] for axis, p in enumerate(placements) if isinstance(p, Shard)
    }
    return t.redistribute(template.device_mesh, placements, sizes=sizes)


def with_gradients(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The dot product and the gradients of its square."""
    product = torch.dot(x, y)
    x.grad = y.grad = None
    product.square().backward()
    assert x.grad is not None
    assert y.grad is not None
    return {"x . y": product, "gradient of x": x.grad, "gradient of y": y.grad}


def main(mesh: DeviceMesh, size: int) -> bool:
    ShardTensor.register_function_handler(torch.dot, dot_handler)
    x, y = (torch.randn(size, dtype=torch.float64, device=mesh.device_type, requires_grad=True) for _ in range(2))
    x_cut, y_cut = (scatter(t.detach(), mesh, requires_grad=True) for t in (x, y))
    cut = compare("both cut", mesh, lambda: with_gradients(x, y), lambda: with_gradients(x_cut, y_cut))
    y_plain = y.detach().requires_grad_()  # as a weight of a model would be
    mixed = compare("y plain", mesh, lambda: with_gradients(x, y), lambda: with_gradients(x_cut, y_plain))
    return cut and mixed


if __name__ == "__main__":
    sys.exit(launch(main, size=1_000_000, description=__doc__))
