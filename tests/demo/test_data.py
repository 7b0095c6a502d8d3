"""The demo's samples: which pairs there are, what is read from disk, and that shards make up the sample."""

import itertools

import numpy as np
import pytest
import torch

from dpzoo.demo.data import GRID, ForecastPairs, open_store, patch_row_split


def test_each_member_gives_three_pairs_of_one_sample():
    pairs = ForecastPairs(list(range(10)))
    state, change = pairs[0]
    assert len(pairs) == 30
    assert state.shape == change.shape == (1, 4, 60, 120)
    assert state.dtype == change.dtype == torch.float32
    assert pairs.channels == ["z850", "z500", "t850", "t500"]


def test_change_leads_from_one_state_to_the_next():
    pairs = ForecastPairs([3])
    s = pairs.statistics
    (first, change), (second, _) = pairs[0], pairs[1]
    later = first[0] * s.std + s.mean + change[0] * s.change_std
    torch.testing.assert_close(later, second[0] * s.std + s.mean, rtol=1e-6, atol=0)


def test_training_samples_are_normalised():
    pairs = ForecastPairs(list(range(8)))
    change = torch.cat([pairs[index][1] for index in range(len(pairs))])
    torch.testing.assert_close(change.std((0, 2, 3)), torch.ones(4), rtol=1e-3, atol=0)
    state = torch.cat([pairs[index][0] for index in range(len(pairs))])
    assert state.mean((0, 2, 3)).abs().max() < 0.05


def test_values_are_physical():
    fields = ForecastPairs([0]).fields(0, 0)
    height, temperature = fields[1] / 9.80665, fields[2]
    assert 4500 < height.min() < height.max() < 6000
    assert 220 < temperature.min() < temperature.max() < 320


def test_north_pole_is_one_value():
    assert np.unique(ForecastPairs([0]).fields(0, 0)[1, 0].numpy()).size == 1
    latitude, longitude = ForecastPairs([0]).coordinates()
    assert latitude[0] == 90
    assert latitude[-1] == -87
    assert longitude[0] == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 15])
def test_shards_make_up_the_sample(ranks):
    sizes = patch_row_split(ranks, 4)
    borders = np.cumsum([0, *sizes]).tolist()
    whole = ForecastPairs([9])
    shards = [ForecastPairs([9], first, last) for first, last in itertools.pairwise(borders)]
    for part in (0, 1):
        assert torch.equal(torch.cat([shard[2][part] for shard in shards], dim=2), whole[2][part])


def test_a_rank_reads_only_its_rows():
    """The index that reaches the store is noted: no read may touch a row that is not the rank's."""
    pairs = ForecastPairs([0], 32, 60)
    store, asked = pairs._packed, []

    class Noting:
        def __getitem__(self, index):
            asked.append(index[3])
            return store[index]

    pairs._packed = Noting()
    assert pairs[0][0].shape == (1, 4, 28, 120)
    assert asked == [slice(32, 60), slice(32, 60)]


def test_chunks_do_not_cross_the_border_of_two_ranks():
    chunk_rows = open_store()["packed"].chunks[3]
    assert all(size % chunk_rows == 0 for size in patch_row_split(2, 4))


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, [60]), (2, [32, 28]), (4, [16, 16, 16, 12]), (7, [12] * 5 + [0, 0])]
)
def test_patch_rows_are_cut_like_torch_chunk(ranks, expected):
    assert patch_row_split(ranks, 4) == expected
    assert sum(expected) == GRID[0]


@pytest.mark.parametrize(("ranks", "patch"), [(2, 7), (0, 4), (16, 4)])
def test_impossible_cuts_name_the_numbers(ranks, patch):
    with pytest.raises(ValueError, match=f"60 grid rows in patches of {patch} rows over {ranks} ranks"):
        patch_row_split(ranks, patch)


def test_rows_outside_the_grid_are_refused():
    with pytest.raises(ValueError, match=r"rows \[32, 61\) are not part of the grid"):
        ForecastPairs([0], 32, 61)


def test_store_names_its_origin():
    attributes = open_store().attrs
    assert "Copernicus Climate Change Service information 2017" in attributes["attribution"]
