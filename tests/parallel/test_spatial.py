"""Parameters and buffers that lie on the grid, sharded over the domain beside FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dpzoo.parallel import no_sync, parallelize
from dpzoo.shard import LayoutError, scatter_tensor
from dpzoo.testing import distributed, expect_error, grid_mesh
from tests.parallel.small_net import (
    Net,
    cut,
    loss_of,
    meshes,
    place,
    same_weights,
    sample,
    trained_alone,
    trained_together,
)


@pytest.mark.parametrize("reduction", ["flat", "domain"])
@distributed(ranks=4, timeout=60)
def test_position_embedding(reduction):
    """28 positions: 14 + 14 where the sample has 24 + 4, and 7 each where it has 12 + 0 + 8 + 8."""
    for name in ("2x2", "domain", "1x4"):
        mesh = meshes()[name]
        if reduction == "domain" and name == "domain":
            continue
        domain = place(mesh)[2]
        for passes, held, recompute in ((1, None, None), (2, no_sync, "reentrant")):
            net = Net(recompute)
            alone = trained_alone(net, place(mesh)[0], passes, steps=2)
            net = parallelize(net, mesh, strategy="fsdp", reduction=reduction, spatial={"pos_*": 1})
            trained_together(net, mesh, passes, held, steps=2)
            same_weights(net, alone, f"{name} {passes}")
            for t in (net.pos_embed, net.pos_embed.grad):
                assert isinstance(t, DTensor) and t.placements == (Shard(1),) and t.device_mesh == domain
                assert t.to_local().shape == (1, 28 // domain.size(), 4)
            assert net.pos_embed.to_local().untyped_storage().nbytes() == 28 // domain.size() * 4 * 8


class Tables(nn.Module):
    """A table of 7 rows that is trained, one that is not, and one that two modules share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.proj = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(7, 1))
        self.shift, self.again = nn.Module(), nn.Module()
        self.shift.table = self.again.table = nn.Parameter(torch.randn(7, 4))
        self.register_buffer("angles", torch.randn(7, 4))
        self.gain.requires_grad_(False)
        self.double()

    def forward(self, x):
        x = self.proj(x) * self.angles.cos() + self.shift.table[:, :]
        return (x + x.roll(1, -1) * self.angles.sin()) * self.gain * self.again.table.exp()


@distributed(ranks=4)
def test_tables():
    """Uneven chunks (4 + 3), a buffer, a shared parameter, and one that is thawed after it was sharded."""
    mesh = grid_mesh()
    replica, domain = mesh.get_local_rank("ddp"), mesh["domain"]
    alone, net = Tables(), Tables()
    chosen = {"gain": 0, "angles": -2, "shift.table": 0, "again.table": 0}
    parallelize(net, mesh, strategy="fsdp", spatial=lambda name, t: chosen.get(name))
    assert isinstance(net.angles, DTensor) and net.angles.placements == (Shard(0),) and not net.gain.requires_grad
    assert net.shift.table is net.again.table and isinstance(net.proj.weight, DTensor)
    for step in range(3):
        for model in (alone, net):
            model.gain.requires_grad_(step > 0)
        sum(loss_of(alone(sample(r, (1, 3, 7, 4))[0, 0])) / 2 for r in range(2)).backward()
        x = cut(sample(replica, (1, 3, 7, 4)), domain)[0, 0]
        loss_of(net(x)).backward()
        for name, want in alone.named_parameters():
            got = dict(net.named_parameters())[name].grad
            assert (got is None) == (want.grad is None), name
            if want.grad is not None:
                torch.testing.assert_close(got.full_tensor(), want.grad, rtol=1e-10, atol=1e-12)


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.map, self.lines = nn.Parameter(torch.randn(1, 4, 7, 4)), nn.Parameter(torch.randn(4, 1, 4))
        self.double()

    def forward(self, x):
        return (self.conv(x) + self.map) * self.lines


@distributed(ranks=4)
def test_a_domain_of_two_axes():
    for shape in ((1, 2, 2), (2, 1, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "h", "w"))
        replica, domain = mesh.get_local_rank("ddp"), mesh["h", "w"]
        alone, net = Map(), Map()
        spatial = {"map": (2, 3), "lines": (None, -1)}
        parallelize(net, mesh, strategy="fsdp", domain_axis=("h", "w"), spatial=spatial)
        assert net.map.placements == (Shard(2), Shard(3)) and net.lines.placements == (Replicate(), Shard(2))
        sum(loss_of(alone(sample(r))) / shape[0] for r in range(shape[0])).backward()
        source = int(domain.mesh.flatten()[0])
        sizes = {0: {1: (7,), 2: (6, 1)}[shape[1]], 1: (1, 3)}
        loss_of(net(scatter_tensor(sample(replica), source, domain, [Shard(2), Shard(3)], sizes=sizes))).backward()
        for name, want in alone.named_parameters():
            got = dict(net.named_parameters())[name].grad.full_tensor()
            torch.testing.assert_close(got, want.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@distributed(ranks=4)
def test_names_of_shared_tensors_go_together():
    words = r"\['again\.table'\] are the same tensors as chosen ones"
    expect_error(
        lambda: parallelize(Tables(), grid_mesh(), strategy="fsdp", spatial={"shift.table": 0}), LayoutError, words
    )
