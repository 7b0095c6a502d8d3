"""perform_ring_iteration: a tensor goes around the ring once and every rank has seen every shard."""

import pytest
import torch

from dpzoo.shard import RingPassingConfig, perform_ring_iteration
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh


@pytest.mark.parametrize("mesh", ["all", "rows", "columns"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@distributed(ranks=4)
def test_once_around(mesh, direction):
    mesh = {"all": domain_mesh, "rows": row_mesh, "columns": column_mesh}[mesh]()
    me, n = mesh.get_local_rank(), mesh.size()
    config = RingPassingConfig(mesh_dim=0, mesh_size=n, ring_direction=direction)
    sizes = (3, 0, 5, 1)[:n]
    held, owner = torch.full((sizes[me], 2), float(me)), me
    for _ in range(n):
        owner = (owner - (1 if direction == "forward" else -1)) % n
        held = perform_ring_iteration(held, mesh, config, recv_shape=(sizes[owner], 2))
        assert torch.equal(held, torch.full((sizes[owner], 2), float(owner)))
    assert owner == me


@distributed(ranks=4)
def test_each_axis_of_a_grid():
    mesh = grid_mesh()
    for axis in (0, 1, -1):
        me = mesh.get_coordinate()[axis]
        found = perform_ring_iteration(torch.tensor([me]), mesh, RingPassingConfig(axis, 2))
        assert found.item() == 1 - me


@distributed(ranks=3)
def test_gradients_travel_back():
    mesh, me = domain_mesh(), domain_mesh().get_local_rank()
    sizes = (3, 0, 2)
    x = torch.arange(sizes[me], dtype=torch.float64).add_(me).requires_grad_()
    for direction, step in (("forward", 1), ("backward", -1)):
        config = RingPassingConfig(0, 3, direction)
        y = perform_ring_iteration(x, mesh, config, recv_shape=(sizes[(me - step) % 3],))
        (g,) = torch.autograd.grad((y**3).sum() * (me + 1), x, create_graph=True)  # the receiver weighs by its rank
        torch.testing.assert_close(g, 3 * x**2 * ((me + step) % 3 + 1))
        (second,) = torch.autograd.grad(g.sum(), x)
        torch.testing.assert_close(second, 6 * x * ((me + step) % 3 + 1))


@distributed(ranks=1)
def test_a_ring_of_one_sends_nothing():
    t = torch.ones(3)
    assert perform_ring_iteration(t, domain_mesh(), RingPassingConfig(0, 1)) is t


@distributed(ranks=2)
def test_wrong_rings_are_refused():
    expect_error(
        lambda: perform_ring_iteration(torch.ones(2), domain_mesh(), RingPassingConfig(0, 3)),
        ValueError,
        "says 3 ranks, axis 0 .* has 2",
    )
    expect_error(lambda: RingPassingConfig(0, 2, "sideways"), ValueError, "'forward' or 'backward', got 'sideways'")
    expect_error(
        lambda: perform_ring_iteration(torch.ones(2), domain_mesh(), RingPassingConfig(1, 2)), ValueError, "no axis 1"
    )
