import pytest
import torch
import torch.distributed as dist

from dpzoo.testing import RankError, RankPool, distributed, expect_error, row_mesh
from dpzoo.testing.torchrun import under_torchrun


def refuse():
    raise ValueError(f"sizes (3, 3) do not sum to 7, asked on rank {dist.get_rank()}")


def refuse_on_rank_zero():
    if dist.get_rank() == 0:
        refuse()
    dist.all_reduce(torch.ones(1))


def one_rank_raises():
    expect_error(refuse_on_rank_zero, ValueError, wait_s=0.5)


@distributed(ranks=[1, 2, 3])
def test_all_ranks_raise():
    assert "do not sum to 7" in expect_error(refuse, ValueError, r"sizes \(3, 3\)")


@distributed(ranks=4)
def test_on_a_mesh():
    expect_error(refuse, ValueError, mesh=row_mesh())


@distributed(ranks=2)
def test_other_outcomes_fail_on_every_rank():
    with pytest.raises(AssertionError, match=r"rank 1 returned a NoneType"):
        expect_error(lambda: None, ValueError)
    with pytest.raises(AssertionError, match="should raise KeyError; found"):
        expect_error(refuse, KeyError)
    with pytest.raises(AssertionError, match="matching 'asked on rank 0'"):
        expect_error(refuse, ValueError, "asked on rank 0")


@pytest.mark.skipif(under_torchrun(), reason="leaves a rank inside a collective")
def test_a_rank_that_raises_alone_is_told_apart():
    with RankPool(grace=0.5) as pool, pytest.raises(RankError, match=r"ranks \[1\] did not come back within 0.5 s"):
        pool.run(one_rank_raises, ranks=2)
