"""redistribute between any two layouts, on one, two and three axes and on sub-groups; values and gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.shard import LayoutError, Partial, Replicate, Shard, ShardTensor, scatter_tensor
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.transfer import bytes_moved, steps
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh

R, P = Replicate(), Partial()
MESHES = {"all": domain_mesh, "rows": row_mesh, "columns": column_mesh}


def whole(*shape):
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def cut_like(n, ranks, turn):
    """Sizes that change with `turn`; some of them zero."""
    weights = [(3 * r + turn) % 4 for r in range(ranks)]
    sizes = [n * w // max(1, sum(weights)) for w in weights]
    sizes[turn % ranks] += n - sum(sizes)
    return tuple(sizes)


def lay(full, mesh, placements, turn=0):
    """`full` in a layout; summands where it is partial."""
    x = scatter_tensor(full, MeshLayout.of(mesh).ranks[0], mesh, [R] * mesh.ndim)
    sizes = {
        a: cut_like(full.shape[p.dim], mesh.size(a), turn + a) for a, p in enumerate(placements) if isinstance(p, Shard)
    }
    return x.redistribute(placements=placements, sizes=sizes)


def check(x, full, placements):
    assert x.placements == tuple(placements) and x.shape == full.shape and x.to_local().shape == x._spec.local_shape
    whole = x._local_tensor
    if not any(isinstance(p, Partial) for p in placements):
        for dim, axis in x._spec.cut_dims.items():
            n = x._spec.sizes[axis][x.device_mesh.get_local_rank(axis)]
            full = full.narrow(dim, x._spec.local_start(axis), n)
        assert torch.equal(whole, full)


@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_every_pair_on_one_axis(mesh):
    mesh, full = MESHES[mesh](), whole(5, 3, 4) - 7
    places = [Shard(0), Shard(1), Shard(2), R, P, Partial("avg"), Partial("max"), Partial("min")]
    for a, b in itertools.product(places, repeat=2):
        for turn in (0, 3):
            y = lay(full, mesh, [a], turn)
            check(y, full, [a])
            z = y.redistribute(placements=[b])
            check(z, full, [b])
            assert torch.equal(z.full_tensor(), full)
            assert torch.equal(z.redistribute(placements=[a], sizes=sized(y)).to_local(), y.to_local()) or a == P


def sized(x):
    return {a: s for a, s in enumerate(x._spec.sizes) if s}


@pytest.mark.parametrize("n", range(10))
@distributed(ranks=3)
def test_round_trips_of_all_lengths(n):
    """Every way to cut n rows over 3 ranks, to chunks, to every other cut's mirror, and back: the same bits."""
    mesh, full = domain_mesh(), torch.rand(n, 2, dtype=torch.float64)
    whole_ = scatter_tensor(full, 0, mesh, [R])
    full = whole_.to_local()
    for a in range(n + 1):
        for b in range(n + 1 - a):
            sizes = (a, b, n - a - b)
            x = whole_.redistribute(placements=[Shard(0)], sizes={0: sizes})
            y = x.redistribute(placements=[Shard(0)], sizes={0: sizes[::-1]})
            check(y, full, [Shard(0)])
            assert y._spec.sizes == (sizes[::-1],)
            back = y.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)], sizes={0: sizes})
            assert torch.equal(back.to_local(), x.to_local())


@distributed(ranks=4, timeout=60)
def test_every_pair_on_two_axes():
    mesh, full = grid_mesh(), whole(3, 5, 4) - 11
    places = [Shard(0), Shard(1), Shard(2), R, P]
    layouts = [p for p in itertools.product(places, repeat=2) if not (isinstance(p[0], Shard) and p[0] == p[1])]
    for turn, (a, b) in enumerate(itertools.product(layouts, repeat=2)):
        z = lay(full, mesh, a, turn).redistribute(placements=b)
        check(z, full, b)
        assert torch.equal(z.full_tensor(), full), (a, b)


@distributed(ranks=4, timeout=60)
def test_swaps_on_three_axes():
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    full = whole(3, 4, 5)
    x = lay(full, mesh, [Shard(0), Shard(1), Shard(2)])
    for order in itertools.permutations(range(3)):
        y = x.redistribute(placements=[Shard(d) for d in order])
        check(y, full, [Shard(d) for d in order])
        back = y.redistribute(placements=x.placements, sizes=sized(x))
        assert torch.equal(back.to_local(), x.to_local()) and torch.equal(y.full_tensor(), full)
    assert torch.equal(x.redistribute(placements=[P, Shard(0), R]).full_tensor(), full)


def _pairs_with_gradients(ndim):
    """Every pair of layouts of an axis; of two axes every pair without averages, and each average from and to one."""
    sums, average = [Shard(0), Shard(1), R, P], Partial("avg")
    if ndim == 1:
        return list(itertools.product([(p,) for p in (*sums, average)], repeat=2))
    layouts = [
        p for p in itertools.product([*sums, average], repeat=ndim) if not (isinstance(p[0], Shard) and p[0] == p[1])
    ]
    plain = [p for p in layouts if average not in p]
    averaged = [p for p in layouts if average in p]
    some = [*zip(averaged, plain, strict=False), *zip(plain, averaged, strict=False)]
    return [*itertools.product(plain, repeat=2), *some, *zip(averaged, averaged[::-1], strict=True)]


@distributed(ranks=4, timeout=60)
def test_gradients_come_back_in_the_layout_they_left():
    full = whole(3, 4)
    for mesh in (domain_mesh(), grid_mesh(), row_mesh()):
        for a, b in _pairs_with_gradients(mesh.ndim):
            x = lay(full, mesh, a).detach().requires_grad_(True)
            (x.redistribute(placements=b).full_tensor() * full).sum().backward()
            # A summand's derivative is that of the sum, whole on every rank.
            check(x.grad, full, [R if isinstance(p, Partial) else p for p in a])


@distributed(ranks=3)
def test_hooks_inside_a_chain_see_gradients_of_their_layout():
    mesh, seen = domain_mesh(), []
    x = scatter_tensor(whole(7), 0, mesh, [Shard(0)], sizes={0: (1, 6, 0)}, requires_grad=True)
    y = x.redistribute(placements=[Shard(0)], sizes={0: (3, 1, 3)})
    y.register_hook(lambda g: seen.append(g._spec.sizes))
    (y.redistribute(placements=[R]) ** 2).sum().backward()
    assert seen == [((3, 1, 3),)] and x.grad._spec.sizes == ((1, 6, 0),)
    assert torch.equal(x.grad.full_tensor(), 2 * whole(7))


@distributed(ranks=2)
def test_second_derivative():
    x = scatter_tensor(whole(5) + 1, 0, domain_mesh(), [Shard(0)], requires_grad=True)
    y = x.redistribute(placements=[Shard(0)], sizes={0: (0, 5)})
    (g,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad((g**2).sum(), x)
    assert torch.equal(gg.full_tensor(), 36 * (whole(5) + 1) ** 3)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.complex128, torch.int16, torch.uint8, torch.bool]
)
@distributed(ranks=3)
def test_every_dtype(dtype):
    mesh, full = domain_mesh(), (whole(4, 5) % 7 - (0 if dtype in (torch.uint8, torch.bool) else 3)).to(dtype)
    ops = ["sum", "avg"] if dtype.is_complex else ["sum", "max", "min", "product"]
    for a, b in itertools.permutations([Shard(0), Shard(1), R, *(Partial(op) for op in ops)], 2):
        y = lay(full, mesh, [a]).redistribute(placements=[b])
        assert y.dtype is dtype and torch.equal(y.full_tensor(), full)


@distributed(ranks=3)
def test_reductions_of_what_the_ranks_hold():
    mesh, rank = domain_mesh(), dist.get_rank()
    local = torch.tensor([rank + 1.0, -rank, 2.0 - rank, float(rank == 1)])
    every = torch.stack([torch.tensor([r + 1.0, -r, 2.0 - r, float(r == 1)]) for r in range(3)])
    wanted = {
        "sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0), "product": every.prod(0)
    }  # fmt: skip
    for op, value in wanted.items():
        x = ShardTensor.from_local(local, mesh, [Partial(op)])
        assert torch.allclose(x.full_tensor(), value)
        y = x.redistribute(placements=[Shard(0)], sizes={0: (0, 3, 1)})
        assert torch.allclose(y.full_tensor(), value) and y.to_local().shape == ((0, 3, 1)[rank],)


@distributed(ranks=2)
def test_the_result_does_not_share_memory_with_the_source():
    """In-place on a redistributed tensor must not change the one it came from, whatever moved."""
    mesh = domain_mesh()
    for a, b in ((R, R), (R, Shard(0)), (R, P), (Shard(0), Shard(0)), (Shard(0), R)):
        x = lay(whole(4), mesh, [a])
        y = x.redistribute(placements=[b])
        if y is not x:
            before = x.full_tensor().clone()
            y.zero_()
            assert torch.equal(x.full_tensor(), before), (a, b)


@distributed(ranks=2)
def test_same_layout_is_the_same_tensor():
    x = scatter_tensor(whole(5), 0, domain_mesh(), [Shard(0)], sizes={0: (4, 1)}, requires_grad=True)
    assert x.redistribute() is x and x.redistribute(placements=[Shard(0)]) is x
    assert x.redistribute(placements=Shard(-1)) is x
    assert x.redistribute(x.device_mesh, [Shard(0)]) is x


@distributed(ranks=2)
def test_memory_order_is_kept_where_nothing_moves():
    mesh = domain_mesh()
    local = torch.randn(1, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    x = ShardTensor.from_local(local, mesh, [R]).redistribute(placements=[Shard(2)])
    assert x.is_contiguous(memory_format=torch.channels_last) == x._local_tensor.is_contiguous(
        memory_format=torch.channels_last
    )


@distributed(ranks=4)
def test_what_does_not_fit_fails_everywhere():
    mesh, grid = domain_mesh(), grid_mesh()
    x, y = lay(whole(4, 3), mesh, [Shard(0)]), lay(whole(4, 3), grid, [Shard(0), R])
    expect_error(lambda: x.redistribute(placements=[Shard(2)]), LayoutError, "dim 2, but the tensor has 2 dims")
    expect_error(lambda: x.redistribute(placements=[R, R]), LayoutError, "1 axes, but 2 placements")
    expect_error(lambda: x.redistribute(grid, [R, R]), LayoutError, "cannot change the mesh")
    expect_error(
        lambda: x.redistribute(sizes={0: (4, 1, 0, 0)}), LayoutError, r"sum to 5, but the global shape is \(4, 3\)"
    )
    expect_error(lambda: x.redistribute(sizes={0: (2, 2)}), LayoutError, "needs 4 shard sizes")
    expect_error(lambda: x.redistribute(placements=[R], sizes={0: (1, 1, 1, 1)}), LayoutError, "cuts no dim")
    expect_error(lambda: y.redistribute(placements=[Shard(1), Shard(1)]), LayoutError, "both cut dim 1")


@distributed(ranks=4)
def test_steps_are_planned_once_and_few():
    layout = MeshLayout.of(grid_mesh())
    make = lambda cuts, sizes: ShardTensorSpec.make(layout, cuts, sizes, (8, 8), torch.float32)  # noqa: E731
    a = make([0, 1], [(4, 4), (4, 4)])
    assert steps(a, a) == ()
    assert steps(a, make([0, 1], [(1, 7), (4, 4)])) is steps(a, make([0, 1], [(1, 7), (4, 4)]))
    assert len(steps(a, make([0, -1], [(4, 4), ()]))) == 1
    assert len(steps(a, make([1, 0], [(4, 4), (4, 4)]))) == 3
    assert bytes_moved(a, a) == 0
    assert bytes_moved(a, make([0, -1], [(4, 4), ()])) == 8 * 8 * 4
    assert bytes_moved(a, make([0, 1], [(3, 5), (4, 4)])) == 8 * 4
