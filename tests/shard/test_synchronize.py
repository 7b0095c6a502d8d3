"""sync_module_over_mesh: one rank's parameters and buffers everywhere, or a report of what differs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from dpzoo.shard import LayoutError, ShardError, sync_module_over_mesh, synchronize
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh

MESHES = {"all": domain_mesh, "rows": row_mesh, "columns": column_mesh, "grid": grid_mesh}


def model(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[1](torch.randn(5, 4))  # running statistics and a counter
    net[1].num_batches_tracked += seed
    return net.half() if seed < 0 else net


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("source", [0, 1])
@distributed(ranks=4)
def test_all_take_the_values_of_the_source(mesh, source):
    mesh, rank = MESHES[mesh](), dist.get_rank()
    net = model(rank)
    held = list(net.parameters())
    sync_module_over_mesh(net, mesh, source)
    wanted = model(mesh.mesh.flatten()[source].item()).state_dict()
    for name, t in net.state_dict().items():
        assert torch.equal(t, wanted[name]), name
    assert all(a is b and a.requires_grad for a, b in zip(held, net.parameters(), strict=True))
    sync_module_over_mesh(net, mesh, source, verify=True)


@distributed(ranks=3)
def test_verify_names_what_differs_on_every_rank():
    net, rank = model(0), dist.get_rank()
    if rank == 2:
        with torch.no_grad():
            net[0].bias[1] += 1
            net[1].running_var[0] = float("nan")
    words = r"0\.bias, 1\.running_var; call sync_module_over_mesh"
    before = {name: t.clone() for name, t in net.state_dict().items()}
    expect_error(lambda: sync_module_over_mesh(net, domain_mesh(), verify=True), ShardError, words)
    assert all(torch.equal(t.nan_to_num(), before[n].nan_to_num()) for n, t in net.state_dict().items())


@distributed(ranks=2)
def test_nan_on_every_rank_is_no_difference():
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, float("nan"))
    nn.init.zeros_(net.bias)
    sync_module_over_mesh(net, domain_mesh(), verify=True)


@distributed(ranks=2)
def test_shared_and_frozen_weights_and_dtypes():
    torch.manual_seed(dist.get_rank())
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net.register_buffer("mask", torch.tensor([dist.get_rank() == 0, True]))
    net.register_buffer("small", torch.tensor(float(dist.get_rank())).half())
    sync_module_over_mesh(net, domain_mesh(), 1)
    assert net[1].weight is net[0].weight and net.mask.tolist() == [False, True] and net.small.item() == 1.0
    sync_module_over_mesh(net, domain_mesh(), verify=True)


@distributed(ranks=2)
def test_other_modules_and_sources_are_refused_everywhere():
    rank, mesh = dist.get_rank(), domain_mesh()
    net = nn.Linear(3, 2 + rank)
    words = r"rank 1 has another module than rank 0 .*\('weight', \(3, 3\), torch.float32\)"
    expect_error(lambda: sync_module_over_mesh(net, mesh), LayoutError, words)
    expect_error(lambda: sync_module_over_mesh(model(0), mesh, 2), LayoutError, "src_mesh_rank=2 is no position")
    net = fully_shard(nn.Linear(2, 2), mesh=mesh)
    expect_error(lambda: sync_module_over_mesh(net, mesh), LayoutError, r"sharded over ranks: \['weight', 'bias'\]")


@distributed(ranks=2)
def test_large_modules_travel_in_pieces():
    torch.manual_seed(dist.get_rank())
    net = nn.ModuleList([nn.Linear(3, 5), nn.Linear(7, 2).double(), nn.Linear(5, 3), nn.Linear(1, 1)])
    torch.manual_seed(0)
    wanted = nn.ModuleList([nn.Linear(3, 5), nn.Linear(7, 2).double(), nn.Linear(5, 3), nn.Linear(1, 1)])
    before, synchronize.PIECE_BYTES = synchronize.PIECE_BYTES, 70
    try:
        sync_module_over_mesh(net, domain_mesh())
    finally:
        synchronize.PIECE_BYTES = before
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), wanted.parameters(), strict=True))
