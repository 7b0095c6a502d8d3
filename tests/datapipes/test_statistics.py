import numpy as np
import pytest
import torch

from dpzoo.datapipes import DataError
from dpzoo.datapipes.points import SURFACE, VOLUME, Moments, PointDataset, Statistics, compute_statistics
from dpzoo.datapipes.points import statistics as statistics_module
from tests.datapipes.made_cars import car_arrays, write_npy


@pytest.fixture
def cars(tmp_path):
    arrays = [car_arrays(surface=30 + 10 * i, seed=i) for i in range(3)]
    for car in arrays:
        car["volume_fields"][:, 3] = 1e4 + 1e-2 * car["volume_fields"][:, 3]  # a mean far above the spread
        car["volume_fields"][:, 4] = 2.5
    return arrays, {f"run_{i}": write_npy(tmp_path / f"run_{i}", car) for i, car in enumerate(arrays)}


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_all_rows_of_all_cars_count(cars, block, monkeypatch):
    monkeypatch.setattr(statistics_module, "BLOCK_ROWS", block)
    arrays, paths = cars
    found = compute_statistics(PointDataset(paths, {"surface": SURFACE, "volume": VOLUME}))
    for name in (*SURFACE.fields, *VOLUME.fields):
        rows = np.concatenate([car[name].reshape(len(car[name]), -1) for car in arrays]).astype(np.float64)
        moments = found.fields[name]
        assert moments.count == len(rows)
        np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(moments.std, rows.std(0), rtol=1e-10, atol=1e-12)
        np.testing.assert_array_equal(moments.low, rows.min(0))
        np.testing.assert_array_equal(moments.high, rows.max(0))


def test_normalise_and_back(cars):
    found = compute_statistics(PointDataset(cars[1], {"volume": VOLUME, "surface": SURFACE}))
    x = torch.from_numpy(np.concatenate([car["volume_fields"] for car in cars[0]])).double()
    normal = found.normalise("volume_fields", x)
    torch.testing.assert_close(normal[:, :4].mean(0), torch.zeros(4, dtype=x.dtype), rtol=0, atol=1e-9)
    torch.testing.assert_close(normal[:, :4].std(0, correction=0), torch.ones(4, dtype=x.dtype), rtol=1e-8, atol=0)
    assert not normal[:, 4].any()
    torch.testing.assert_close(found.denormalise("volume_fields", normal), x)
    assert found.normalise("surface_areas", torch.ones(3)).shape == (3,)
    with pytest.raises(DataError, match="no statistics of 'sdf', only of surface_areas"):
        found.normalise("sdf", x)


def test_saved_statistics_are_the_same(cars, tmp_path):
    found = compute_statistics(PointDataset(cars[1], {"volume": VOLUME}), fields=["volume_fields"])
    found.save(tmp_path / "statistics.json")
    loaded = Statistics.load(tmp_path / "statistics.json")
    assert list(loaded.fields) == ["volume_fields"]
    for key in ("count", "mean", "m2", "low", "high"):
        np.testing.assert_array_equal(
            getattr(loaded.fields["volume_fields"], key), getattr(found.fields["volume_fields"], key)
        )


def test_no_rows_add_nothing():
    some, none = Moments.of(np.arange(6.0).reshape(3, 2)), Moments.of(np.empty((0, 2)))
    for merged in (some.merge(none), none.merge(some)):
        assert (merged.count, merged.mean.tolist(), merged.m2.tolist()) == (3, [2.0, 3.0], [8.0, 8.0])
    assert none.merge(none).std.tolist() == [0.0, 0.0]
