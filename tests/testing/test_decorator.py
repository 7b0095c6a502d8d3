import pytest
import torch
import torch.distributed as dist

from dpzoo.testing import RankError, distributed, session_pool
from dpzoo.testing.torchrun import under_torchrun


@distributed(ranks=[1, 2, 3])
def test_body_runs_on_every_rank(ranks):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == ranks == dist.get_world_size()


@distributed(ranks=2)
@pytest.mark.parametrize("left", [1, 2])
def test_parameters_below_are_passed_on(left):
    assert dist.get_world_size() == 2
    assert left in (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@distributed()
def test_parameters_above_are_passed_on(dtype, ranks):
    assert ranks == 2
    assert torch.ones(2, dtype=dtype).dtype == dtype


@distributed(ranks=1)
def test_skip_reaches_pytest():
    pytest.skip("asked for inside a rank")
    raise AssertionError("not reached")


@distributed(ranks=2)
def fails_on_rank_one():
    assert dist.get_rank() != 1, "rank one says no"


@pytest.mark.skipif(under_torchrun(), reason="raises on purpose on one rank")
def test_a_failing_assertion_comes_back():
    with pytest.raises(RankError, match="rank one says no"):
        fails_on_rank_one(ranks=2)
    assert session_pool().process_ids(2)


def test_only_module_level_functions():
    with pytest.raises(TypeError, match="top level"):

        @distributed()
        def test_inside():
            pass
