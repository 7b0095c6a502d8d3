"""The communication layer alone: any sizes, any dtype, any group, and nothing sent when nothing moves."""

import itertools

import pytest
import torch
import torch.distributed as dist

from dpzoo.shard import collectives as comm
from dpzoo.shard import one_shot
from dpzoo.shard.exchange import exchange, exchange_back, exchange_back_each, exchange_each
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import column_mesh, distributed, domain_mesh, grid_mesh, row_mesh
from tests.shard.counting import count_collectives

MESHES = {"all": domain_mesh, "rows": row_mesh, "columns": column_mesh}
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int16, torch.uint8, torch.bool]


def whole(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def cuts(n, ranks):
    """Some cuts of n rows: even, uneven, empty ones first, last and in the middle."""
    even = [n // ranks + (r < n % ranks) for r in range(ranks)]
    return {tuple(even), (n, *[0] * (ranks - 1)), (*[0] * (ranks - 1), n), (*even[1:-1], 0, even[0] + even[-1])}


def setting(name):
    mesh = MESHES[name]()
    return mesh.get_group().group_name, mesh.get_local_rank(), mesh.size()


def piece(full, dim, sizes, me):
    return full.narrow(dim, sum(sizes[:me]), sizes[me])


@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_gather_and_reduce_scatter(mesh):
    group, me, ranks = setting(mesh)
    full = whole(3, 6, 2).transpose(0, 1)  # not contiguous
    for dim in range(3):
        for sizes in cuts(full.shape[dim], ranks):
            assert torch.equal(comm.all_gather_v(piece(full, dim, sizes, me), dim, sizes, group), full)
            found = comm.reduce_scatter_v(full * (me + 1), dim, sizes, group)
            assert torch.equal(found, piece(full, dim, sizes, me) * sum(range(1, ranks + 1)))
            found = comm.reduce_scatter_v(full * (me + 1), dim, sizes, group, "max")
            assert torch.equal(found, piece(full, dim, sizes, me) * ranks)


@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_equal_blocks_travel_as_they_lie(mesh):
    group, me, ranks = setting(mesh)
    sizes = (3,) * ranks
    for dtype in (torch.float32, torch.float64):
        rows = whole(1, 3 * ranks, 2, dtype=dtype)
        complex_rows = torch.complex(rows, rows + 1)
        for full in (rows, rows.mT.contiguous().mT, complex_rows.conj().imag, rows.clone().requires_grad_()):
            mine = piece(full, 1, sizes, me)
            with count_traffic() as sent:
                found = comm.all_gather_v(mine, 1, sizes, group)
            assert torch.equal(found, full) and not found.requires_grad
            assert (sent.calls, sent.nbytes) == (1, mine.nbytes)
            with count_traffic() as sent:
                found = comm.reduce_scatter_v(full * (me + 1), 1, sizes, group)
            assert torch.equal(found, mine * sum(range(1, ranks + 1))) and not found.requires_grad
            assert (sent.calls, sent.nbytes) == (1, mine.nbytes * (ranks - 1))


@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_all_to_all(mesh):
    group, me, ranks = setting(mesh)
    full = whole(5, 3, 6)
    for a, b in itertools.permutations(range(3), 2):
        for have, want in itertools.product(cuts(full.shape[a], ranks), cuts(full.shape[b], ranks)):
            found = comm.all_to_all_v(piece(full, a, have, me), b, want, a, have, group)
            assert torch.equal(found, piece(full, b, want, me))


@pytest.mark.parametrize("mesh", list(MESHES))
@distributed(ranks=4)
def test_exchange_and_its_transpose(mesh):
    """Intervals may overlap, repeat, lie several ranks away, or be missing; going back adds what overlaps."""
    group, me, ranks = setting(mesh)
    full = whole(2, 9)
    wishes = [((0, 9),), ((2, 5), (7, 9)), (), ((4, 4), (0, 1), (0, 1))]
    for sizes in cuts(9, ranks):
        wanted = tuple(wishes[(me_ + 1) % 4] for me_ in range(ranks))
        found = exchange(piece(full, 1, sizes, me), 1, sizes, wanted, group)
        assert torch.equal(found, torch.cat([full[:, :0], *(full[:, lo:hi] for lo, hi in wanted[me])], 1))
        back = exchange_back(torch.ones_like(found), 1, sizes, wanted, group)
        count = torch.zeros(2, 9, dtype=full.dtype)
        for lo, hi in itertools.chain(*wanted):
            count[:, lo:hi] += 1
        assert torch.equal(back, piece(count, 1, sizes, me))


@distributed(ranks=3)
def test_several_tensors_travel_together():
    """As each would alone, in one message each way; also where a rank has, or wants, nothing."""
    group, me, _ = setting("all")
    wide, narrow = whole(2, 9, 3), -whole(1, 9)
    for sizes, wanted in (
        ((4, 4, 1), (((0, 6),), ((3, 9),), ((6, 9),))),
        ((0, 9, 0), (((2, 5), (0, 1)), ((1, 9),), ())),
    ):
        parts = [piece(t, 1, sizes, me) for t in (wide, narrow)]
        with count_traffic() as there:
            found = exchange_each(parts, 1, sizes, wanted, group)
        gradients = [t * t for t in found]
        with count_traffic() as back:
            home = exchange_back_each(gradients, 1, sizes, wanted, group)
        assert there.calls == back.calls == 1
        for i, part in enumerate(parts):
            assert torch.equal(found[i], exchange(part, 1, sizes, wanted, group))
            assert torch.equal(home[i], exchange_back(gradients[i], 1, sizes, wanted, group))
            assert torch.equal(gradients[i], found[i] * found[i])  # what came in was not written to


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(ranks=3)
def test_every_dtype_travels(dtype):
    group, me, _ = setting("all")
    full, sizes = whole(4, 5, dtype=dtype), (0, 3, 1)
    assert torch.equal(comm.all_gather_v(piece(full, 0, sizes, me), 0, sizes, group), full)
    assert torch.equal(comm.broadcast(full if me == 1 else torch.zeros_like(full), 1, group), full)
    wanted = (((3, 4),), ((0, 4),), ((1, 2),))
    lo, hi = wanted[me][0]
    assert torch.equal(exchange(piece(full, 0, sizes, me), 0, sizes, wanted, group), full[lo:hi])
    total = comm.all_reduce(full, group)
    assert total.dtype is dtype and torch.equal(total, full if dtype is torch.bool else full * 3)


@distributed(ranks=3)
def test_reductions():
    group, me, _ = setting("all")
    t = torch.tensor([me, -me, 2, 1], dtype=torch.int16)
    wanted = {"sum": [3, -3, 6, 3], "max": [2, 0, 2, 1], "min": [0, -2, 2, 1], "product": [0, 0, 8, 1]}
    for op, value in wanted.items():
        found = comm.all_reduce(t, group, op)
        assert found.dtype is torch.int16 and found.tolist() == value
    assert t.tolist() == [me, -me, 2, 1], "the argument is not written to"
    assert comm.all_reduce(torch.tensor(float(me)), group, "avg").item() == 1.0
    truth = torch.tensor([me == 1, True])
    assert comm.all_reduce(truth, group, "sum").tolist() == [True, True]
    assert comm.all_reduce(truth, group, "product").tolist() == [False, True]


REDUCE = {"sum": torch.sum, "product": torch.prod, "max": torch.amax, "min": torch.amin}


@pytest.mark.parametrize("op", list(REDUCE))
@distributed(ranks=[2, 3])
def test_in_one_shot_and_around_a_ring(op, ranks):
    """Short or long, at once or later: the values of one process, and the same bits on every rank."""
    group, me, _ = setting("all")
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
    if op in ("sum", "product"):
        dtypes.append(torch.complex64)
    for dtype, (size, wait) in itertools.product(dtypes, itertools.product((5, 2 * one_shot.SHORT), (True, False))):
        torch.manual_seed(7)
        every = (torch.randn(ranks, size, dtype=dtype if dtype.is_complex else torch.float64) * 4).to(dtype)
        mine = every[me].clone()
        pending = comm.start_all_reduce_(mine, group, op, wait=wait)
        found, want = pending.wait(), REDUCE[op](every, 0)
        assert found is mine and found.dtype is dtype
        largest = {"sum": torch.sum, "product": torch.prod}.get(op, torch.amax)(every.abs().to(torch.float64), 0)
        error = 0.0 if dtype is torch.int64 else ranks * torch.finfo(dtype).eps
        assert ((found - want).abs() <= error * largest).all()
        bits = comm.all_gather_v(found.unsqueeze(0), 0, (1,) * ranks, group)
        assert all(torch.equal(other, found) for other in bits)


@distributed(ranks=3)
def test_half_precision_is_rounded_once():
    """Each of the small ones alone would be lost beside the 1."""
    group, me, _ = setting("all")
    t = torch.tensor([1.0, 2.0**-8, 2.0**-8][me]).bfloat16()
    assert comm.all_reduce(t, group).item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("step", [1, -1])
@distributed(ranks=4)
def test_shift_of_unequal_shards(mesh, step):
    group, me, ranks = setting(mesh)
    shapes = [(2, 3), (0, 3), (5, 1), (1, 1)][:ranks]
    source = (me - step) % ranks
    found = comm.shift(torch.full(shapes[me], float(me)), shapes[source], group, step).wait()
    assert torch.equal(found, torch.full(shapes[source], float(source)))


@distributed(ranks=4)
def test_values_of_a_mesh_come_in_the_order_of_its_ranks():
    for mesh in (domain_mesh(), grid_mesh(), row_mesh(), column_mesh()):
        layout = MeshLayout.of(mesh)
        assert comm.gather_over_mesh({"rank": dist.get_rank()}, layout) == [{"rank": r} for r in layout.ranks]


@distributed(ranks=[1, 2])
def test_nothing_is_sent_when_nothing_moves(ranks):
    group, _, _ = setting("all")
    t, sizes = torch.ones(2, 3), (2,) * ranks
    own = tuple(((2 * r, 2 * r + 2),) for r in range(ranks))
    inner = tuple(((2 * r, 2 * r + 1),) for r in range(ranks))
    with count_collectives() as sent:
        assert exchange(t, 0, sizes, own, group) is t
        exchange(t, 0, sizes, inner, group)
        exchange_back(t[:1], 0, sizes, inner, group)
        comm.all_gather_v(t[:0], 0, (0,) * ranks, group)
        comm.all_reduce(t[:0], group)
        if ranks == 1:
            comm.all_reduce(t, group)
            comm.all_gather_v(t, 0, (2,), group)
            comm.broadcast(t, 0, group)
            comm.reduce_scatter_v(t, 0, (2,), group)
            comm.all_to_all_v(t, 1, (3,), 0, (2,), group)
    assert sent.calls == 0
