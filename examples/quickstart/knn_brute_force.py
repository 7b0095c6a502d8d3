"""k nearest neighbours by brute force, without any handler: ordinary torch code, and its gradients.

python examples/quickstart/knn_brute_force.py
torchrun --nproc-per-node 3 examples/quickstart/knn_brute_force.py

Every op here has a rule, so it is right. It is not yet good: the bytes that are printed are those of the distance
matrix, many times those of the points. `resharding.py` shows where they come from, `knn_ring.py` does without them.
"""

import sys

import torch
from agreement import compare
from ranks import launch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import scatter, strict

K = 8


def nearest(x: Tensor, y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For every y (M, 3) the squared distances to its k nearest x (N, 3), nearest first, and their indices: (M, k)."""
    d = x[None] - y[:, None]
    distances, indices = d.square().sum(-1).topk(k, largest=False)
    return distances, indices


def with_gradients(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Distances, indices, and the gradients of the sum of the distances."""
    distances, indices = nearest(x, y, min(K, x.shape[0]))
    x.grad = y.grad = None
    distances.sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    return {"distances": distances, "indices": indices, "gradient of x": x.grad, "gradient of y": y.grad}


def main(mesh: DeviceMesh, size: int) -> bool:
    x = torch.randn(size, 3, dtype=torch.float64, device=mesh.device_type, requires_grad=True)
    y = torch.randn(max(size // 4, 1), 3, dtype=torch.float64, device=mesh.device_type, requires_grad=True)
    x_cut, y_cut = (scatter(t.detach(), mesh, requires_grad=True) for t in (x, y))
    with strict():  # an op without a rule would raise here instead of gathering its operands
        return compare("brute force", mesh, lambda: with_gradients(x, y), lambda: with_gradients(x_cut, y_cut))


if __name__ == "__main__":
    sys.exit(launch(main, size=2_000, description=__doc__))
