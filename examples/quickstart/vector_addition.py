"""Vector addition: nothing to write, an op with a rule runs on shards.

python examples/quickstart/vector_addition.py
torchrun --nproc-per-node 3 examples/quickstart/vector_addition.py

First both vectors are cut alike, and nothing is sent. Then `b` is cut in other places: its rows come to those of `a`
first, which costs the bytes that are printed. The values are the same.
"""

import sys

import torch
from agreement import compare
from ranks import launch
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import scatter


def main(mesh: DeviceMesh, size: int) -> bool:
    a, b = torch.randn(2, size, dtype=torch.float64, device=mesh.device_type)
    a_cut, b_cut = scatter(a, mesh), scatter(b, mesh)
    alike = compare("cut alike", mesh, lambda: {"a + b": a + b}, lambda: {"a + b": a_cut + b_cut})

    everything_on_the_last = [0] * (mesh.size() - 1) + [size]  # shards have any size, empty ones too
    b_elsewhere = scatter(b, mesh, sizes=everything_on_the_last)
    elsewhere = compare("b cut elsewhere", mesh, lambda: {"a + b": a + b}, lambda: {"a + b": a_cut + b_elsewhere})
    return alike and elsewhere


if __name__ == "__main__":
    sys.exit(launch(main, size=1_000_000, description=__doc__))
