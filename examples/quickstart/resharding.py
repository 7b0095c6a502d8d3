"""What re-sharding does to `x[None] - y[:, None]`: same values, very different traffic and memory.

python examples/quickstart/resharding.py
torchrun --nproc-per-node 3 examples/quickstart/resharding.py

The result is (M, N, 3). A mesh axis cuts one of its dims: x wants dim 1 cut, y dim 0. One of them has to give way; the
core keeps the larger in place, which is right for this op alone. But the next op may need dim 1 whole (here `topk` over
all x), and then it is not two lists of points that travel, but the matrix. One line, before the op, decides.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from agreement import compare
from ranks import launch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import Replicate, ShardTensor, scatter
from dpzoo.shard.traffic import count_traffic

K = 8


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """(M, N) from x (N, 3) and y (M, 3)."""
    return (x[None] - y[:, None]).square().sum(-1)


def nearest(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Distances and indices of the nearest x of every y."""
    distances, indices = squared_distances(x, y).topk(min(K, x.shape[0]), largest=False)
    return {"distances": distances, "indices": indices}


def nearest_after(reshard: Callable[[], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """`nearest` with the re-sharding before it, so that both are counted."""
    return nearest(*reshard())


def show_layouts(x: ShardTensor, y: ShardTensor, mesh: DeviceMesh) -> None:
    """Print what each half of `nearest` sends from the first rank, and how the matrix is cut between them."""
    with count_traffic() as difference:
        d = squared_distances(x, y)
    assert isinstance(d, ShardTensor)
    with count_traffic() as selection:
        d.topk(min(K, x.shape[0]), largest=False)
    if mesh.get_local_rank() == 0:
        print(
            f"    x {x.placements[0]}, y {y.placements[0]} -> matrix {d.placements[0]}, {tuple(d.to_local().shape)} of "
            f"{tuple(d.shape)} here; rank 0 sends {difference.nbytes:,} bytes for it, {selection.nbytes:,} for topk"
        )


def main(mesh: DeviceMesh, size: int) -> bool:
    x = torch.randn(size, 3, dtype=torch.float64, device=mesh.device_type)
    y = torch.randn(max(size // 4, 1), 3, dtype=torch.float64, device=mesh.device_type)
    x_cut, y_cut = scatter(x, mesh), scatter(y, mesh)
    everywhere = [Replicate()]
    agrees = True
    for what, reshard in {
        "both as they are": lambda: (x_cut, y_cut),
        "y everywhere": lambda: (x_cut, y_cut.redistribute(placements=everywhere)),
        "x everywhere": lambda: (x_cut.redistribute(placements=everywhere), y_cut),
    }.items():
        agrees &= compare(what, mesh, partial(nearest, x, y), partial(nearest_after, reshard))
        show_layouts(*reshard(), mesh)
    return agrees


if __name__ == "__main__":
    sys.exit(launch(main, size=2_000, description=__doc__))
