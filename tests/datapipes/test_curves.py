import itertools

import numpy as np
import pytest

from dpzoo.datapipes.points.curves import curve_keys, curve_order


def grid(side: int, dims: int) -> np.ndarray:
    return np.array(list(itertools.product(range(side), repeat=dims)), np.float64)


@pytest.mark.parametrize(("side", "dims"), [(8, 3), (16, 2)])
def test_the_hilbert_curve_visits_every_cell_and_never_jumps(side, dims):
    points = grid(side, dims) + 0.5
    corners = np.vstack([points, np.zeros((1, dims)), np.full((1, dims), side)])  # the cube is the grid's
    order = curve_order(corners)
    path = corners[order[~np.isin(order, (len(points), len(points) + 1))]]
    assert len(np.unique(path, axis=0)) == side**dims
    assert (np.abs(np.diff(path, axis=0)).sum(1) == 1).all()


def test_morton_interleaves_bits():
    points = np.vstack([grid(4, 3), np.full((1, 3), 4.0)])
    keys = curve_keys(points, "morton")
    bits = [sum(((int(c) >> b) & 1) << (3 * b + 2 - d) for d, c in enumerate(p) for b in range(2)) for p in points[:-1]]
    np.testing.assert_array_equal(keys[:-1] >> np.uint64(3 * 19), bits)


def test_pieces_of_the_order_are_compact():
    points = np.random.default_rng(0).random((4096, 3))
    for curve in ("hilbert", "morton"):
        pieces = np.split(points[curve_order(points, curve)], 64)
        # A cube of 1/64 of the volume is a quarter as wide as the whole, in which a random piece would lie.
        assert np.mean([piece.std(0) for piece in pieces]) < 0.4 * points.std(0).mean()


def test_few_equal_and_flat_points():
    assert curve_order(np.empty((0, 3))).tolist() == []
    assert curve_order(np.ones((3, 3))).tolist() == [0, 1, 2]
    assert curve_order(np.array([[2.0, 0, 0], [0, 0, 0], [1, 0, 0]])).tolist() == [1, 2, 0]
    with pytest.raises(ValueError, match=r"\(n, 2\) or \(n, 3\)"):
        curve_keys(np.ones((3, 4)))
