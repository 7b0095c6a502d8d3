"""torch.compile inside and around the wrappers: a graph sums its gradients itself, whatever the mode at its making."""

import copy

import pytest
import torch
from torch import nn

from dpzoo.parallel import parallelize
from dpzoo.shard import Shard, scatter_tensor
from dpzoo.testing import distributed, grid_mesh
from tests.parallel.small_net import Block, loss_of, sample, whole


@pytest.mark.parametrize("how", ["ddp of compiled", "compiled ddp", "fsdp"])
@distributed(ranks=4, timeout=100)
def test_gradients(how):
    mesh = grid_mesh()
    torch.manual_seed(0)
    net = Block().double()
    for p in net.parameters():
        nn.init.normal_(p)
    alone = copy.deepcopy(net)
    for replica in range(2):
        (loss_of(alone(sample(replica, (1, 7, 4)))) / 2).backward()
    if how != "compiled ddp":
        net.compile(backend="aot_eager")
    run = parallelize(net, mesh, strategy="fsdp" if how == "fsdp" else "ddp")
    if how == "compiled ddp":
        run = torch.compile(run, backend="aot_eager")
    domain = mesh["domain"]
    x = sample(mesh.get_local_rank("ddp"), (1, 7, 4))
    x = scatter_tensor(x, int(domain.mesh.flatten()[0]), domain, [Shard(1)], sizes={0: (6, 1)})
    for _ in range(2):
        net.zero_grad()
        loss_of(run(x)).backward()
    for (name, p), want in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), want.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
