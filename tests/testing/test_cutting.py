import pytest

from dpzoo.shard import Replicate, Shard
from dpzoo.testing.cutting import Cut, owner_of, plan_cut


def test_a_dim_a_placement_and_a_negative_dim_mean_the_same():
    for placement in (1, -2, Shard(1), (1,)):
        assert plan_cut((2, 7, 3), (2,), placement, (5, 2)) == Cut((1,), ((5, 2),))


def test_plain_and_replicated():
    assert plan_cut((2, 7), (2,), None, "even") is None
    assert plan_cut((2, 7), (2,), Replicate(), "even") == Cut((None,), (None,))


def test_two_axes():
    assert plan_cut((4, 6), (2, 2), (0, 1), "even") == Cut((0, 1), ((2, 2), (3, 3)))
    assert plan_cut((4, 6), (2, 2), (None, 1), [None, (6, 0)]) == Cut((None, 1), (None, (6, 0)))


def test_owner():
    cut = Cut((0, None, 1), ((0, 3, 1), None, (2, 4)))
    assert owner_of((0, 0), cut) == (1, None, 0)
    assert owner_of((3, 5), cut) == (2, None, 1)


def test_errors_name_the_values():
    with pytest.raises(ValueError, match="dim 3 of a tensor with 2 dims"):
        plan_cut((2, 7), (2,), 3, "even")
    with pytest.raises(ValueError, match="1 entries for a mesh of 2 axes"):
        plan_cut((2, 7), (2, 2), 1, "even")
    with pytest.raises(ValueError, match="sum to 6"):
        plan_cut((2, 7), (2,), 1, (3, 3))
    with pytest.raises(ValueError, match="not a cut of 7 rows over 3 ranks"):
        plan_cut((2, 7), (3,), 1, (3, 4))
