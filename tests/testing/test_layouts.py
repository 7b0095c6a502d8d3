import itertools

import pytest

from dpzoo.testing import LAYOUTS, layout_sizes
from dpzoo.testing.layouts import check_sizes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sizes_are_a_cut_of_any_length(layout, ranks):
    for n in range(20):
        for turn in range(ranks):
            sizes = layout_sizes(n, ranks, layout, turn)
            assert len(sizes) == ranks
            assert sum(sizes) == n
            assert min(sizes) >= 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_names_mean_what_they_say(ranks):
    assert layout_sizes(17, ranks, "tiny").count(1) >= 1
    assert layout_sizes(17, ranks, "empty").count(0) == 1
    assert layout_sizes(17, ranks, "empty_first")[0] == 0
    assert layout_sizes(17, ranks, "empty_last")[-1] == 0
    uneven = layout_sizes(17, ranks, "uneven")
    assert 0 not in uneven
    assert all(a != b for a, b in itertools.pairwise(uneven))


def test_even_is_how_torch_cuts():
    assert layout_sizes(5, 4, "even") == (2, 2, 1, 0)
    assert layout_sizes(8, 4, "even") == (2, 2, 2, 2)


def test_turn_rotates():
    assert (
        layout_sizes(17, 3, "uneven", turn=1) == layout_sizes(17, 3, "uneven")[1:] + layout_sizes(17, 3, "uneven")[:1]
    )


def test_errors_name_the_values():
    with pytest.raises(ValueError, match="'odd' is not known"):
        layout_sizes(4, 2, "odd")
    with pytest.raises(ValueError, match="ranks=0"):
        layout_sizes(4, 0, "even")
    with pytest.raises(ValueError, match="sum to 5"):
        check_sizes(4, 2, (2, 3))
