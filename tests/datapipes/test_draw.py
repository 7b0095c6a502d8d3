import numpy as np
import pytest

from dpzoo.datapipes import DataError
from dpzoo.datapipes.points.draw import Draw, make_draw, shard_sizes


def drawn(draw: Draw, sizes: tuple[int, ...]) -> np.ndarray:
    """The rows that ranks with these sizes take, one after the other."""
    starts = np.cumsum((0, *sizes))
    return np.concatenate([draw.rows(int(lo), int(hi)) for lo, hi in zip(starts, starts[1:], strict=False)])


@pytest.mark.parametrize("kind", ["window", "strata"])
@pytest.mark.parametrize(("total", "points"), [(100, 37), (100, 100), (5, 1), (7, 6), (10, 0)])
def test_any_cut_draws_the_same_rows_once(kind, total, points):
    draw = make_draw(total, points, kind, 3, "run_1")
    whole = draw.rows(0, points)
    assert len(np.unique(whole)) == points == len(whole)
    assert not points or (whole.min() >= 0 and whole.max() < total)
    for ranks in (1, 2, 3, 5, 12):
        np.testing.assert_array_equal(drawn(draw, shard_sizes(points, ranks)), whole)


@pytest.mark.parametrize("kind", ["window", "strata", "all"])
def test_the_intervals_hold_the_rows_in_order(kind):
    for key in range(40):
        draw = Draw(30, 30 if kind == "all" else 11, kind, key)
        for lo, hi in ((0, 11), (4, 9), (3, 3), (10, 11)):
            covered = [row for first, last in draw.intervals(lo, hi) for row in range(first, last)]
            rows = draw.rows(lo, hi)
            assert [row for row in covered if row in set(rows)] == rows.tolist()
            if kind != "strata":
                assert covered == rows.tolist()


def test_a_thin_draw_by_strata_reads_its_part_of_the_file_only():
    draw = Draw(1000, 20, "strata", 1900)  # starts at row 900
    assert draw.intervals(0, 2) == [(900, 1000)]
    assert draw.intervals(2, 7) == [(0, 250)]
    assert draw.intervals(1, 3) == [(950, 1000), (0, 50)]
    assert draw.intervals(0, 20) == [(900, 1000), (0, 900)]


@pytest.mark.parametrize("kind", ["window", "strata"])
def test_every_row_is_drawn_equally_often(kind):
    counts = np.zeros(20)
    for key in range(4000):
        counts[make_draw(20, 7, kind, key).rows(0, 7)] += 1
    assert counts.sum() == 7 * 4000
    np.testing.assert_allclose(counts / 4000, 7 / 20, atol=0.04)


def test_epochs_and_cars_draw_differently():
    first = make_draw(1000, 50, "strata", 0, 0, "run_1").rows(0, 50)
    assert not np.array_equal(first, make_draw(1000, 50, "strata", 0, 1, "run_1").rows(0, 50))
    assert not np.array_equal(first, make_draw(1000, 50, "strata", 0, 0, "run_2").rows(0, 50))
    assert not np.array_equal(first, make_draw(1000, 50, "strata", 1, 0, "run_1").rows(0, 50))


def test_rows_of_a_file_as_long_as_a_full_volume_do_not_overflow():
    draw = Draw(160_000_000, 150_000_000, "strata", 160_000_000)  # starts at row 0
    rows = draw.rows(149_999_990, 150_000_000)
    assert (np.diff(rows) > 0).all()
    assert 159_999_980 <= rows[0] < rows[-1] < 160_000_000


def test_more_points_than_rows_are_refused():
    with pytest.raises(DataError, match="asked for 11 of 10 rows"):
        make_draw(10, 11, "window", 0)


def test_shard_sizes():
    assert shard_sizes(10, 4) == (3, 3, 2, 2)
    assert shard_sizes(2, 4) == (1, 1, 0, 0)
    assert shard_sizes(100, 3, (2.0, 0.0, 1.0)) == (67, 0, 33)
    for weights in ((1.0, 2.0), (1.0, -1.0, 1.0), (0.0, 0.0, 0.0)):
        with pytest.raises(DataError, match="3 ranks need as many weights"):
            shard_sizes(10, 3, weights)
