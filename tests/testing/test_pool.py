import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from dpzoo.testing import RankError, RankPool, RankTimeout, column_mesh, domain_mesh, grid_mesh, row_mesh
from dpzoo.testing.torchrun import under_torchrun

pytestmark = pytest.mark.skipif(under_torchrun(), reason="tests of the process pool itself")


@dataclass(frozen=True)
class Parcel:
    """A class of this module, to travel both ways."""

    value: int


@pytest.fixture(scope="module")
def pool():
    with RankPool(grace=1.0) as pool:
        yield pool


def add_ranks(start, scale=1):
    total = torch.tensor(float(dist.get_rank() * scale + start))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def wrap(parcel):
    return Parcel(parcel.value + dist.get_rank())


def draw():
    return torch.randn(3)


def process_id():
    return os.getpid()


def raise_on(ranks):
    print(f"about to decide on rank {dist.get_rank()}")
    if dist.get_rank() in ranks:
        raise KeyError(f"broken on {dist.get_rank()}")


def raise_on_one_while_others_wait(rank):
    if dist.get_rank() == rank:
        raise ValueError("the original error")
    dist.all_reduce(torch.ones(1))


def hang_in_a_collective(absent):
    if dist.get_rank() != absent:
        dist.all_reduce(torch.ones(1))


def sleep_while_the_other_waits():
    if dist.get_rank() == 1:
        sleep_long()
    dist.all_reduce(torch.ones(1))


def leave_a_collective_behind():
    if dist.get_rank() == 0:
        return dist.all_reduce(torch.ones(1), async_op=True) is not None
    return True


def sleep_long():
    time.sleep(600)


def end_process():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def return_a_group():
    return dist.group.WORLD


def skip_here():
    pytest.skip("not today")


def describe_meshes():
    found = {}
    for name, mesh in (("row", row_mesh()), ("column", column_mesh())):
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=mesh.get_group())
        found[name] = (mesh.mesh.tolist(), mesh.get_local_rank(), total.item())
    assert grid_mesh() is grid_mesh()
    return found


def mesh_of_the_wrong_size():
    domain_mesh(3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(pool, ranks):
    total = sum(range(ranks)) * 2 + ranks
    assert pool.run(add_ranks, 1, ranks=ranks, kwargs={"scale": 2}) == [(rank, total) for rank in range(ranks)]


def test_ranks_stay_up_between_tasks(pool):
    assert pool.run(process_id, ranks=2) == pool.run(process_id, ranks=2) == pool.process_ids(2)


def test_classes_of_a_test_module_travel_both_ways(pool):
    assert pool.run(wrap, Parcel(5), ranks=2) == [Parcel(5), Parcel(6)]


def test_every_rank_and_every_task_draws_the_same_numbers(pool):
    first, second = pool.run(draw, ranks=2)
    assert torch.equal(first, second)
    assert torch.equal(first, pool.run(draw, ranks=2)[0])


def test_error_has_every_traceback_and_the_output(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_on, (0, 2), ranks=3)
    assert caught.value.error_types == {0: "KeyError", 2: "KeyError"}
    message = str(caught.value)
    for part in (
        "raise_on raised on 2 of 3 ranks",
        "broken on 0",
        "broken on 2",
        "in raise_on",
        "about to decide on rank 2",
    ):
        assert part in message
    assert set(caught.value.tracebacks) == {0, 1, 2}
    assert pool.run(add_ranks, 0, ranks=3)[0] == (0, 3.0)


def test_one_rank_raising_while_others_wait_is_reported_first(pool):
    with pytest.raises(RankError) as caught:
        pool.run(raise_on_one_while_others_wait, 1, ranks=3)
    assert next(iter(caught.value.tracebacks)) == 1
    assert "the original error" in caught.value.tracebacks[1]
    for waiting in (0, 2):
        assert "still running" in caught.value.tracebacks[waiting]
        assert "raise_on_one_while_others_wait" in caught.value.tracebacks[waiting]
    assert pool.run(add_ranks, 0, ranks=3)[0] == (0, 3.0)


def test_hang_shows_stacks_and_the_pool_works_afterwards(pool):
    before = pool.process_ids(2)
    with pytest.raises(RankTimeout) as caught:
        pool.run(sleep_long, ranks=2, timeout=1.0)
    assert caught.value.waiting == (0, 1)
    assert "sleep_long" in caught.value.tracebacks[0]
    assert "test_pool.py" in str(caught.value)
    for process in before:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert pool.run(add_ranks, 0, ranks=2) == [(0, 1.0), (1, 1.0)]


def test_a_collective_that_one_rank_skips_is_a_failure(pool):
    with pytest.raises(RankError) as caught:
        pool.run(hang_in_a_collective, 1, ranks=2, timeout=2.0)
    assert "hang_in_a_collective" in str(caught.value)


def test_a_collective_left_behind_fails_the_task_that_left_it(pool):
    with pytest.raises(RankError, match="left a collective"):
        pool.run(leave_a_collective_behind, ranks=2, timeout=2.0)


def test_group_timeout_ends_a_collective():
    with RankPool(group_timeout=1.0, grace=0.5) as pool, pytest.raises(RankError, match=r"[Tt]imed out"):
        pool.run(sleep_while_the_other_waits, ranks=2)


def test_killed_rank_is_named(pool):
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        pool.run(end_process, ranks=2)


def test_values_that_can_not_travel_are_refused_with_advice(pool):
    with pytest.raises(TypeError, match="top level of a module"):
        pool.run(lambda: None, ranks=2)
    with pytest.raises(RankError, match="can not send"):
        pool.run(return_a_group, ranks=2)


def test_skip_inside_a_task_skips_the_test(pool):
    with pytest.raises(pytest.skip.Exception, match="not today"):
        pool.run(skip_here, ranks=2)


def test_number_of_ranks_is_checked(pool):
    for ranks in (0, 5):
        with pytest.raises(ValueError, match=f"ranks={ranks}"):
            pool.run(draw, ranks=ranks)


def test_sub_groups_that_are_not_the_first(pool):
    found = pool.run(describe_meshes, ranks=4)
    assert [rank["row"] for rank in found] == [([0, 1], 0, 1), ([0, 1], 1, 1), ([2, 3], 0, 5), ([2, 3], 1, 5)]
    assert [rank["column"] for rank in found] == [([0, 2], 0, 2), ([1, 3], 0, 4), ([0, 2], 1, 2), ([1, 3], 1, 4)]
    with pytest.raises(RankError, match="this task runs on 2 ranks"):
        pool.run(mesh_of_the_wrong_size, ranks=2)


def test_closing_ends_the_processes():
    pool = RankPool()
    processes = pool.process_ids(1)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(processes[0], 0)
    assert pool.run(add_ranks, 3, ranks=1) == [(0, 3.0)]
    pool.close()
