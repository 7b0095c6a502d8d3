"""from_local in its three modes, to_local, full_tensor, and the way from and to DTensor; values and gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from dpzoo.shard import (
    LayoutError,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    UndeterminedShardingError,
    scatter_tensor,
)
from dpzoo.shard.tensor import FUNCTIONS
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh
from tests.shard.counting import count_collectives

MESHES = {"all": domain_mesh, "rows": row_mesh, "columns": column_mesh}


def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def piece(full, mesh, dim, sizes):
    me = mesh.get_local_rank()
    return full.narrow(dim, sum(sizes[:me]), sizes[me]).clone()


# ---------------------------------------------------------------------- infer
@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_infer_any_sizes(mesh):
    mesh = MESHES[mesh]()
    for dim, sizes in itertools.product((0, 1, -1), ((3, 0, 2, 1), (0, 4, 0, 0), (1, 1, 1, 1), (0, 0, 0, 0))):
        sizes = sizes[: mesh.size()]
        shape = [2, 3, 4]
        shape[dim] = sum(sizes)
        full = whole(*shape)
        x = ShardTensor.from_local(piece(full, mesh, dim, sizes), mesh, [Shard(dim)])
        assert x.shape == full.shape and x._spec.sizes == (sizes,)
        assert torch.equal(x.full_tensor(), full)


@distributed(ranks=4)
def test_infer_on_two_axes():
    mesh = grid_mesh()
    i, j = mesh.get_coordinate()
    full = whole(2, 5, 4)
    local = full[:, 3 * i : 3 + 2 * i, :1] if j == 0 else full[:, 3 * i : 3 + 2 * i, 1:]
    x = ShardTensor.from_local(local, mesh, [Shard(1), Shard(2)])
    assert x._spec.sizes == ((3, 2), (1, 3)) and torch.equal(x.full_tensor(), full)
    y = ShardTensor.from_local(full[:, 3 * i : 3 + 2 * i], mesh, [Shard(1), Replicate()])
    assert y._spec.sizes == ((3, 2), ()) and torch.equal(y.full_tensor(), full)


@distributed(ranks=4)
def test_infer_refuses_shards_that_form_no_tensor():
    mesh, rank = domain_mesh(), dist.get_rank()
    odd = rank == 2
    for local, words in (
        (torch.ones(2, 4 if odd else 3), r"do not form one tensor: .*rank 2: \(2, 4\)"),
        (torch.ones(2, 3, dtype=torch.float64 if odd else torch.float32), r"dtype.*rank 2: \(torch.float64, 2\)"),
        (torch.ones((2, 3, 1) if odd else (2, 3)), r"number of dims.*rank 2: \(torch.float32, 3\)"),
        (torch.ones(2, 3, requires_grad=odd), r"only some need a gradient: rank 0: False.*rank 2: True"),
    ):
        expect_error(lambda t=local: ShardTensor.from_local(t, mesh, [Shard(0)]), UndeterminedShardingError, words)
    mine = [Shard(1)] if odd else [Shard(0)]
    words = r"placements.*rank 1: \(\[Shard\(dim=0\)\].*rank 2: \(\[Shard\(dim=1\)\]"
    expect_error(lambda: ShardTensor.from_local(torch.ones(2, 3), mesh, mine), UndeterminedShardingError, words)


@distributed(ranks=4)
def test_infer_refuses_a_torn_grid():
    mesh = grid_mesh()
    rows = 3 if dist.get_rank() == 3 else 2
    words = r"sizes of dim 0 along axis 0 .* differ between the other axes: \[\[2, 2\], \[2, 3\]\]"
    place = [Shard(0), Shard(1)]
    expect_error(lambda: ShardTensor.from_local(torch.ones(rows, 3), mesh, place), UndeterminedShardingError, words)


# ---------------------------------------------------------------------- chunk
@pytest.mark.parametrize("n", range(7))
@distributed(ranks=3)
def test_chunk(n):
    mesh = domain_mesh()
    full = whole(n, 2)
    sizes = tuple(c.shape[0] for c in full.chunk(3)) if n else (0,)
    sizes += (0,) * (3 - len(sizes))
    local = piece(full, mesh, 0, sizes)
    for shape in (None, (n, 2)):
        x = ShardTensor.from_local(local, mesh, [Shard(0)], "chunk", shape)
        assert x._spec.sizes == (sizes,) and torch.equal(x.full_tensor(), full)


@distributed(ranks=3)
def test_chunk_refuses_other_sizes():
    mesh = domain_mesh()
    local = torch.ones(4 - dist.get_rank(), 2)
    words = r"the ranks of mesh\(domain=3\) hold \(\(4, 3, 2\),\), but torch.chunk would give \(\(3, 3, 3\),\)"
    place = [Shard(0)]
    expect_error(lambda: ShardTensor.from_local(local, mesh, place, "chunk"), UndeterminedShardingError, words)


# ---------------------------------------------------------------------- explicit shapes
@distributed(ranks=[1, 2, 3])
def test_shapes_of_another_tensor(ranks):
    """Only the size along the cut dim is read, so that a handler may pass on the shapes of its operand."""
    mesh, sizes = domain_mesh(), (4, 0, 3)[:ranks]
    y = ShardTensor.from_local(torch.zeros(2, sizes[dist.get_rank()]), mesh, [Shard(1)])
    full = whole(2, sum(sizes), 5, 3)
    x = ShardTensor.from_local(piece(full, mesh, 1, sizes), mesh, [Shard(1)], y._spec.sharding_shapes())
    assert x.shape == full.shape and torch.equal(x.full_tensor(), full)
    shapes = {0: [(9, n) for n in sizes]}
    assert torch.equal(
        ShardTensor.from_local(piece(full, mesh, 1, sizes), mesh, [Shard(1)], shapes).full_tensor(), full
    )


@distributed(ranks=2)
def test_shapes_that_do_not_fit():
    mesh, local = domain_mesh(), torch.ones(2, 3)

    def make(shapes, dim=0, **more):
        return lambda: ShardTensor.from_local(local, mesh, [Shard(dim)], shapes, **more)

    expect_error(make({}), UndeterminedShardingError, "no entry 0")
    expect_error(make({0: [(2, 3)]}), UndeterminedShardingError, r"must hold 2 shapes .* got \[\(2, 3\)\]")
    expect_error(make({0: [(2,), (2,)]}, 1), UndeterminedShardingError, "more than 1 dims")
    expect_error(make({0: [(1, 3), (3, 3)]}), LayoutError, r"passed a shard of shape \(2, 3\), but its layout")
    expect_error(make("rows"), UndeterminedShardingError, "'infer', 'chunk' or a dict, got 'rows'")
    expect_error(
        make("infer", global_shape=(5, 3)), LayoutError, r"\(5, 3\) was given, but the shards make up \(4, 3\)"
    )


@distributed(ranks=[2, 3])
def test_one_wrong_shard_fails_on_every_rank(ranks):
    mesh, rank = domain_mesh(), dist.get_rank()
    odd = rank == ranks - 1
    local, place = torch.ones(3 if odd else 2, 3), [Shard(0)]
    words = rf"rank {ranks - 1}: the rank at .* passed a shard of shape \(3, 3\), but its layout .* says \(2, 3\)"
    for shapes, shape in (({0: [(2, 3)] * ranks}, None), ("chunk", (2 * ranks, 3))):
        expect_error(lambda s=shapes, g=shape: ShardTensor.from_local(local, mesh, place, s, g), LayoutError, words)
    good, shapes = torch.ones(2, 3), {0: [(2, 3)] * ranks}
    other = {0: [(2, 3)] * (ranks - 1) + [(3, 3)]} if odd else shapes
    for arguments, error, words in (
        (
            (torch.ones(3, 3) if odd else good, mesh, place, other),
            UndeterminedShardingError,
            "disagree.*sharding_shapes",
        ),
        ((good.double() if odd else good, mesh, place, shapes), UndeterminedShardingError, "different dtype"),
        ((good.clone().requires_grad_(odd), mesh, place, shapes), UndeterminedShardingError, "some need a gradient"),
        ((good, mesh, place * 2 if odd else place, shapes), UndeterminedShardingError, "disagree.*placements"),
        ((None if odd else good, mesh, place, shapes), UndeterminedShardingError, "None, 0"),
        ((good, mesh, place, {0: [(2, 3)]} if odd else shapes), UndeterminedShardingError, "disagree"),
    ):
        expect_error(lambda a=arguments: ShardTensor.from_local(*a), error, words)


@distributed(ranks=4)
def test_one_wrong_shard_on_a_grid_and_in_a_later_group():
    mesh, rank = grid_mesh(), dist.get_rank()
    local, shapes = torch.ones(2, 4 if rank == 3 else 3), {0: [(2, 3)] * 2, 1: [(2, 3)] * 2}
    words = r"rank 3: the rank at \(1, 1\).*\(2, 4\)"
    expect_error(lambda: ShardTensor.from_local(local, mesh, [Shard(0), Shard(1)], shapes), LayoutError, words)
    for mesh in (column_mesh(), row_mesh()):
        words = rf"rank {mesh.mesh[1]}: .*passed a shard of shape \(5, 3\)"
        local, shapes = torch.ones(5 if mesh.get_local_rank() else 2, 3), {0: [(2, 3)] * 2}
        expect_error(
            lambda t=local, m=mesh, s=shapes: ShardTensor.from_local(t, m, [Shard(0)], s), LayoutError, words, mesh=mesh
        )


@distributed(ranks=2)
def test_what_the_check_costs():
    """One reduction of a few bytes; nothing when it is left out, nor inside a handler."""
    mesh = domain_mesh()
    local, shapes = torch.ones(3, 2), {0: [(3, 2), (3, 2)]}

    def handler(func, types, args, kwargs):
        y = args[0]
        return ShardTensor.from_local(y.to_local() * 2, mesh, y.placements, y._spec.sharding_shapes())

    x = ShardTensor.from_local(local, mesh, [Shard(0)], shapes)
    before = FUNCTIONS.get(torch.Tensor.sinc)
    ShardTensor.register_function_handler(torch.Tensor.sinc, handler)
    try:
        for make, count in (
            (lambda: ShardTensor.from_local(local, mesh, [Shard(0)], shapes), 1),
            (lambda: ShardTensor.from_local(local, mesh, [Shard(0)], shapes, run_check=False), 0),
            (lambda: x.sinc(), 0),
        ):
            with count_collectives() as seen:
                made = make()
            assert seen.calls == count and made._spec is x._spec
    finally:
        FUNCTIONS.pop(torch.Tensor.sinc)
        if before is not None:
            FUNCTIONS[torch.Tensor.sinc] = before


@distributed(ranks=4)
def test_replicas_can_be_compared():
    mesh, rank = grid_mesh(), dist.get_rank()
    same = torch.tensor([1.0, float("nan"), -0.0]) + (rank // 2)
    place = [Shard(0), Replicate()]
    x = ShardTensor.from_local(same, mesh, place, run_check="values")
    assert x.shape == (6,)
    words = r"ranks \[3\] passed other values"
    odd = same + (rank == 3)
    expect_error(lambda: ShardTensor.from_local(odd, mesh, place, run_check="values"), LayoutError, words)


@distributed(ranks=2)
def test_what_from_local_does_not_take():
    mesh, t = domain_mesh(), torch.ones(2, 3)
    x = ShardTensor.from_local(t, mesh, [Shard(0)])
    expect_error(lambda: ShardTensor.from_local(x, mesh, [Shard(0)]), LayoutError, "plain tensor, got ShardTensor")
    expect_error(lambda: ShardTensor.from_local([1.0], mesh, [Shard(0)]), LayoutError, "plain tensor, got list")
    expect_error(lambda: ShardTensor.from_local(t, None, [Shard(0)]), LayoutError, "needs a device_mesh")
    expect_error(lambda: ShardTensor.from_local(t, "cpu", [Shard(0)]), LayoutError, "expected a torch DeviceMesh")
    expect_error(lambda: ShardTensor.from_local(t, mesh, [Shard(2)]), LayoutError, "dim 2, but the tensor has 2 dims")
    two = [Shard(0), Shard(1)]
    expect_error(lambda: ShardTensor.from_local(t, mesh, two), LayoutError, "1 axes, but 2 placements")


# ---------------------------------------------------------------------- bridges and gradients
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")])
@distributed(ranks=3)
def test_gradients_reach_the_local_tensor(place):
    """The loss is a function of the global value; each rank's local tensor gets the derivative with respect to it."""
    mesh, rank = domain_mesh(), dist.get_rank()
    torch.manual_seed(rank if not isinstance(place, Replicate) else 7)
    local = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    x = ShardTensor.from_local(local, mesh, [place])
    weight = torch.arange(float(x.numel()), dtype=torch.float64).view(x.shape) + 1
    (x.full_tensor() * weight).sum().backward()
    wanted = weight
    if isinstance(place, Shard):
        wanted = piece(weight, mesh, place.dim, (2, 2, 2))
    elif place == Partial("avg"):
        wanted = weight / 3
    assert torch.equal(local.grad, wanted)


@distributed(ranks=2)
def test_to_local_of_a_replicated_value_asks_for_grad_placements():
    mesh, rank = domain_mesh(), dist.get_rank()
    x = ShardTensor.from_local(torch.ones(3), mesh, [Replicate()]).requires_grad_(True)
    words = r"grad_placements=\[Partial\(\)\] if each rank .* \[Replicate\(\)\] if all ranks"
    expect_error(x.to_local, UndeterminedShardingError, words)
    with torch.no_grad():
        assert torch.equal(x.to_local(), torch.ones(3))
    own = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    (x.to_local(grad_placements=[Partial()]) * own).sum().backward()  # each rank its own part of the loss
    assert torch.equal(x.grad.full_tensor(), torch.tensor([3.0, 6.0, 9.0]))
    x.grad = None
    (x.to_local(grad_placements=[Replicate()]) * 5).sum().backward()  # all ranks the same loss
    assert torch.equal(x.grad.full_tensor(), torch.full((3,), 5.0))


@distributed(ranks=2)
def test_to_local_refuses_gradients_that_cannot_be():
    mesh = domain_mesh()
    cut = ShardTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    copies = ShardTensor.from_local(torch.ones(3, 2), mesh, [Replicate()])
    summands = ShardTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
    for x, wrong in ((cut, Replicate()), (cut, Shard(1)), (cut, Partial()), (copies, Shard(0)), (summands, Partial())):
        expect_error(
            lambda x=x, p=wrong: x.to_local(grad_placements=[p]), LayoutError, "along axis 0 the gradient .* can be"
        )
    expect_error(lambda: cut.full_tensor(grad_placements=[Shard(0)]), LayoutError, "can be Replicate")


@distributed(ranks=3)
def test_full_tensor_with_partial_gradients():
    mesh, rank = domain_mesh(), dist.get_rank()
    x = scatter_tensor(whole(5), 0, mesh, [Shard(0)], requires_grad=True)
    (x.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5,), 6.0, dtype=torch.float64))
    assert x.grad.placements == x.placements


@distributed(ranks=2)
def test_extremes_have_no_gradient_and_say_so_early():
    mesh = domain_mesh()
    local = torch.ones(3, requires_grad=True)
    make = lambda: ShardTensor.from_local(local, mesh, [Partial("max")])  # noqa: E731
    expect_error(make, RuntimeError, "only sum and avg can be differentiated")


@distributed(ranks=2)
def test_second_derivatives_through_the_bridges():
    mesh = domain_mesh()
    local = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    x = ShardTensor.from_local(local, mesh, [Shard(0)])
    y = x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]).full_tensor() ** 3
    (g,) = torch.autograd.grad(y.sum(), local, create_graph=True)
    assert torch.equal(g, torch.full((2,), 27.0, dtype=torch.float64)) and g.requires_grad
    (gg,) = torch.autograd.grad((g**2).sum(), local)
    assert torch.equal(gg, torch.full((2,), 2 * 27.0 * 18.0, dtype=torch.float64))


# ---------------------------------------------------------------------- DTensor
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()])
@distributed(ranks=3)
def test_from_and_to_dtensor(place):
    mesh, full = domain_mesh(), whole(4, 5)
    d = distribute_tensor(full, mesh, [place]).requires_grad_(True)
    x = ShardTensor.from_dtensor(d)
    assert x.placements == (place,) and torch.equal(x.full_tensor(), full)
    back = x.to_dtensor()
    assert isinstance(back, DTensor) and back.placements == d.placements and torch.equal(back.full_tensor(), full)
    (back * whole(4, 5).add(1).pow(2)[0, 1].item()).sum().backward()
    assert torch.equal(d.grad.full_tensor(), torch.full((4, 5), 4.0, dtype=torch.float64))


@distributed(ranks=2)
def test_partial_dtensor():
    mesh, rank = domain_mesh(), dist.get_rank()
    local = torch.full((3,), rank + 1.0, requires_grad=True)
    x = ShardTensor.from_dtensor(DTensor.from_local(local, mesh, [Partial()]))
    assert x.placements == (Partial(),) and torch.equal(x.full_tensor(), torch.full((3,), 3.0))
    x.full_tensor().pow(2).sum().backward()
    assert torch.equal(local.grad, torch.full((3,), 6.0))
    assert torch.equal(x.detach().to_dtensor().full_tensor(), torch.full((3,), 3.0))


@distributed(ranks=2)
def test_the_gradient_of_a_dtensor_shares_no_memory():
    """A sum hands one gradient to both operands; whoever changes the one in place must not change the other."""
    mesh = domain_mesh()
    d = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]).requires_grad_(True)
    x = scatter_tensor(torch.ones(4, 3), 0, mesh, [Shard(0)], requires_grad=True)

    def change(d):
        d.grad.to_local().mul_(7)

    d.register_post_accumulate_grad_hook(change)
    ((x * 2 + d) ** 2).sum().backward()
    assert torch.equal(d.grad.full_tensor(), torch.full((4, 3), 42.0))
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 3), 12.0))


@distributed(ranks=4)
def test_dtensors_on_two_axes():
    mesh, full = grid_mesh(), whole(4, 6)
    d = distribute_tensor(full, mesh, [Shard(1), Replicate()])
    assert torch.equal(ShardTensor.from_dtensor(d).full_tensor(), full)
    twice = distribute_tensor(full, mesh, [Shard(0), Shard(0)])
    expect_error(lambda: ShardTensor.from_dtensor(twice), LayoutError)


@distributed(ranks=2)
def test_free_sizes_are_no_dtensor():
    x = scatter_tensor(whole(5), 0, domain_mesh(), [Shard(0)], sizes={0: (4, 1)})
    expect_error(
        x.to_dtensor, LayoutError, r"4\+1 is not a layout a DTensor can hold|redistribute to the sizes \(\(3, 2\),\)"
    )
