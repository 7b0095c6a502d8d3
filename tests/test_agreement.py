"""An error on one rank is one on all, in the caller's words; what is not told costs one small reduction an axis."""

import pytest
import torch.distributed as dist

from dpzoo.agreement import gather, raise_together, together
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import distributed, expect_error, grid_mesh


class OddError(RuntimeError):
    pass


def telling(notes, mine):
    return OddError("; ".join(f"{note.rank} {note.full} {note.digest}" for note in notes if note.kind))


def only_on(rank):
    def work():
        if dist.get_rank() == rank:
            raise OSError(f"disk {rank}")
        return rank

    return work


@distributed(ranks=4)
def test_what_one_rank_meets_all_raise():
    mesh = grid_mesh()
    for rank in range(4):
        expect_error(lambda r=rank: together(only_on(r), mesh, telling), OddError, rf"^{rank} OSError: disk {rank} 0$")
    assert together(only_on(4), mesh, telling) == 4
    row = mesh["domain"]  # another group: its ranks alone are told
    if dist.get_rank() < 2:
        with pytest.raises(OddError, match=r"^1 OSError: disk 1 0$"):
            together(only_on(1), row, telling)
    else:
        assert together(only_on(1), row, telling) == 1


@distributed(ranks=4)
def test_numbers_that_have_to_agree():
    mesh, rank = grid_mesh(), dist.get_rank()
    first, second = mesh.mesh_dim_names
    raise_together(None, mesh, telling, digest=7)
    raise_together(None, mesh, telling, digest=rank // 2, digest_axes=(second,))
    raise_together(None, mesh, telling, digest=rank % 2, digest_axes=(first,))
    raise_together(None, mesh, telling, digest=rank, digest_axes=())

    def differ(notes, mine):
        return OddError(str([note.digest for note in notes]))

    for axes in (None, (first,), (second,), (first, second)):
        expect_error(lambda a=axes: raise_together(None, mesh, differ, rank * 5, a), OddError, r"^\[0, 5, 10, 15\]$")
    last = int(rank == 3)  # seen on one line of the second axis alone
    expect_error(lambda: raise_together(None, mesh, differ, last, (second,)), OddError, r"^\[0, 0, 0, 1\]$")


@distributed(ranks=4)
def test_what_is_well_is_told_in_integers():
    mesh = grid_mesh()
    with count_traffic() as seen:
        raise_together(None, mesh, telling)
    assert (seen.calls, seen.nbytes) == (3, 24 + 24 + 8)


def test_alone_an_error_may_stay_what_it_is():
    error = OSError("disk")
    error.__cause__ = KeyError("why")
    with pytest.raises(OSError, match="disk") as raised:
        raise_together(error, None, lambda notes, mine: mine)
    assert raised.value is error
    assert isinstance(error.__cause__, KeyError)
    with pytest.raises(OddError, match=r"^0 OSError: disk 3$") as raised:
        raise_together(error, None, telling, digest=3)
    assert raised.value.__cause__ is error
    assert together(lambda: 3, None, telling) == 3


@distributed(ranks=4)
def test_values_come_in_the_order_of_the_mesh():
    mesh = grid_mesh()
    assert gather(dist.get_rank(), mesh) == mesh.mesh.flatten().tolist()
