"""k nearest neighbours as a ring: a function of your own with a handler that passes shards from rank to rank.

python examples/quickstart/knn_ring.py
torchrun --nproc-per-node 3 examples/quickstart/knn_ring.py

Every rank keeps its y and the best k candidates so far; the shards of x go once around. A rank holds two
shards of x at a time (one that leaves, one that comes): never the whole of x, and never the whole distance matrix.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from agreement import compare
from ranks import launch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import wrap_torch_function

from dpzoo.shard import Replicate, RingPassingConfig, Shard, ShardTensor, perform_ring_iteration, scatter

K = 8


@wrap_torch_function(lambda x, y, k: (x, y))  # "ask these arguments first whether they know better"
def nearest(x: Tensor, y: Tensor, k: int) -> Tensor:
    """Indices (M, k) of the k nearest x (N, d) of every y (M, d), nearest first. Single-device code, no gradient."""
    return distances(x, y).topk(k, largest=False).indices


def distances(x: Tensor, y: Tensor) -> Tensor:
    """(M, N) from x (N, d) and y (M, d); not by way of a product, which loses half of the digits of close points."""
    return torch.cdist(y, x, compute_mode="donot_use_mm_for_euclid_dist")


def ring_handler(func: Callable[..., Tensor], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    """What `nearest` does when x or y is a ShardTensor."""
    return _ring_nearest(*args, **kwargs)


def _ring_nearest(x: Tensor, y: Tensor, k: int) -> ShardTensor:
    """`nearest` in as many steps as there are ranks; the result is cut like y.

    Raises:
        ValueError: on every rank: k is larger than the number of points, or the mesh has several axes.
    """
    mesh = next(t for t in (x, y) if isinstance(t, ShardTensor)).device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"nearest: the ring turns along one mesh axis, this mesh has {mesh.ndim}: scatter over mesh[name]"
        )
    if not 0 < k <= x.shape[0]:  # decided from global sizes: all ranks raise, or none
        raise ValueError(f"nearest: k={k} neighbours were asked for, there are {x.shape[0]} points")
    x, y = on_rows(x, mesh), on_rows(y, mesh)
    ring, ranks, me = RingPassingConfig(mesh_dim=0, mesh_size=mesh.size()), mesh.size(), mesh.get_local_rank()
    shapes, offsets = x.spec.sharding_shapes(0), x.spec.offsets(0)
    block, queries = x.to_local().detach(), y.to_local().detach()
    best = queries.new_empty((len(queries), 0))
    indices = torch.empty_like(best, dtype=torch.int64)
    for step in range(ranks):
        owner = (me - step) % ranks  # whose x this rank holds at this step
        found, rows = distances(block, queries).topk(min(k, len(block)), largest=False)
        best, order = torch.cat([best, found], 1).topk(min(k, best.shape[1] + found.shape[1]), largest=False)
        indices = torch.cat([indices, rows + offsets[owner]], 1).gather(1, order)
        if step < ranks - 1:
            block = perform_ring_iteration(block, mesh, ring, recv_shape=shapes[(owner - 1) % ranks])
    # Shapes that all ranks know already spare the exchange in which they would tell each other.
    shards: dict[int, Sequence[Sequence[int]]] = {0: [(n, k) for n in y.spec.sizes[0]]}
    return ShardTensor.from_local(indices, mesh, [Shard(0)], sharding_shapes=shards)


def on_rows(t: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """`t` cut along dim 0; the sizes of its shards stay if it is cut there already."""
    if not isinstance(t, ShardTensor):  # a plain tensor is the same on every rank
        t = ShardTensor.from_local(t, mesh, [Replicate()], sharding_shapes={})
    return t.redistribute(mesh, [Shard(0)])


def main(mesh: DeviceMesh, size: int) -> bool:
    ShardTensor.register_function_handler(nearest, ring_handler)
    x = torch.randn(size, 3, dtype=torch.float64, device=mesh.device_type)
    y = torch.randn(max(size // 4, 1), 3, dtype=torch.float64, device=mesh.device_type)
    x_cut, y_cut = scatter(x, mesh), scatter(y, mesh)
    k = min(K, size)
    rows, longest = y_cut.to_local().shape[0], max(x_cut.spec.sizes[0])
    agrees = compare("ring", mesh, lambda: {"indices": nearest(x, y, k)}, lambda: {"indices": nearest(x_cut, y_cut, k)})
    if mesh.get_local_rank() == 0:
        print(f"    largest matrix here ({rows}, {longest}), on one process ({len(y)}, {size})")
    return agrees


if __name__ == "__main__":
    sys.exit(launch(main, size=8_000, description=__doc__))
