import numpy as np
import pytest
import torch

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import GridDataset, GridStatistics, Stream, compute_grid_statistics
from tests.datapipes.grid.made_grids import CHANNELS, fields, hours, write_channels


@pytest.fixture
def dataset(tmp_path):
    data = fields(hours(4))
    data[:, 1] = 1e4 + 1e-2 * data[:, 1]  # a mean far above the spread
    data[:, 2] = 2.5
    data[:, 3] = np.abs(data[:, 3])
    path = write_channels(tmp_path / "a.zarr", hours(4), data=data)
    return data.astype(np.float64), GridDataset({"x": Stream((path,), log1p=("z500",))})


def test_all_pixels_of_all_times_count(dataset):
    data, made = dataset
    found = compute_grid_statistics(made)
    data[:, 3] = np.log1p(data[:, 3])
    assert found.channels("x") == CHANNELS
    for j, moments in enumerate(found.streams["x"].values()):
        assert moments.count == data[:, j].size
        np.testing.assert_allclose(moments.mean, data[:, j].mean(), rtol=1e-7)
        np.testing.assert_allclose(moments.std, data[:, j].std(), rtol=1e-6, atol=1e-12)


def test_normalise_and_back(dataset, tmp_path):
    data, made = dataset
    found = compute_grid_statistics(made)
    x = torch.from_numpy(data)
    normal = found.normalise("x", x)
    torch.testing.assert_close(found.denormalise("x", normal), x)
    assert not normal[:, 2].any()
    found.save(tmp_path / "statistics.json")
    loaded = GridStatistics.load(tmp_path / "statistics.json")
    assert torch.equal(loaded.normalise("x", x), normal)
    assert loaded.renamed(y="x").channels("y") == CHANNELS
    assert tuple(loaded.merged(loaded.renamed(z="x")).streams) == ("x", "z")
    with pytest.raises(DataError, match="no statistics of stream 'y', only of x"):
        loaded.normalise("y", x)
    with pytest.raises(DataError, match=r"expected \(\.\.\., 4, y, x\) for stream 'x', got \(4, 3"):
        loaded.normalise("x", x[:, :3])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad.json is no file of grid statistics"):
        GridStatistics.load(tmp_path / "bad.json")


def test_a_channel_without_a_valid_pixel_has_no_statistics(tmp_path):
    data = fields(hours(2))
    data[:, 1] = np.nan
    path = write_channels(tmp_path / "a.zarr", hours(2), data=data)
    with pytest.raises(DataError, match="t500 has no valid pixel at any time"):
        compute_grid_statistics(GridDataset({"x": Stream((path,), masked=True)}))
    with pytest.raises(DataError, match="no stream 'y'; the dataset has x"):
        compute_grid_statistics(GridDataset({"x": Stream((path,), masked=True)}), streams=["y"])
