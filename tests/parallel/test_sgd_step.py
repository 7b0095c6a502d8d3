"""One SGD step on replicas and shards equals one process on the global batch, however gradients are reduced."""

import pytest
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dpzoo.parallel import no_sync, parallelize
from dpzoo.testing import distributed, grid_mesh
from tests.parallel.small_net import (
    Net,
    meshes,
    place,
    same_weights,
    trained_alone,
    trained_together,
)

# How the passes of a step are added up, and what is computed twice.
PASSES = {
    "once": (1, None, None),
    "each pass reduced": (2, None, None),
    "no_sync": (2, no_sync, None),
    "checkpoint": (1, None, "saved"),
    "reentrant": (1, None, "reentrant"),
    "reentrant, no_sync": (2, no_sync, "reentrant"),
}


def options_of(strategy):
    return {"static_graph": True} if strategy == "ddp" else {}


def check(wrap, mesh, names=tuple(PASSES), note=""):
    for name in names:
        passes, held, recompute = PASSES[name]
        net = Net(recompute)
        alone = trained_alone(net, place(mesh)[0], passes)
        together = trained_together(wrap(net, recompute), mesh, passes, held)
        same_weights(together, alone, f"{note} {name}")


@pytest.mark.parametrize("reduction", ["flat", "domain"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@distributed(ranks=4, timeout=100)
def test_parallelize(strategy, reduction):
    for name, mesh in meshes().items():
        if (strategy, reduction, name) == ("fsdp", "domain", "domain"):
            continue  # refused, see test_parallelize.py

        def wrap(net, recompute, mesh=mesh):
            # DDP finds unused weights in the graph, in which a reentrant checkpoint hides some
            more = (
                {} if strategy == "fsdp" else {"static_graph": True} if recompute else {"find_unused_parameters": True}
            )
            return parallelize(net, mesh, strategy=strategy, reduction=reduction, **more)

        check(wrap, mesh, PASSES if name == "2x2" else ["no_sync", "reentrant"], name)


@distributed(ranks=4, timeout=100)
def test_wrappers_of_ones_own():
    """DDP and fully_shard as torch has them, over the replicas or over all ranks."""
    mesh = grid_mesh()
    over = {"replicas": mesh["ddp"], "all": mesh._flatten()}

    def ddp(net, recompute, group):
        return DistributedDataParallel(net, process_group=group.get_group(), static_graph=True)

    def fsdp(net, recompute, group):
        fully_shard(net.blocks[1], mesh=group)
        fully_shard(net.blocks[2], mesh=group)
        return fully_shard(net, mesh=group)

    for wrap in (ddp, fsdp):
        for name, group in over.items():
            check(
                lambda n, r, w=wrap, g=group: w(n, r, g),
                mesh,
                ["once", "no_sync", "reentrant"],
                f"{wrap.__name__} {name}",
            )
