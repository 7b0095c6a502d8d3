from dataclasses import replace

import numpy as np
import pytest
import torch

from dpzoo.datapipes import DataError
from dpzoo.datapipes.points import GEOMETRY, SURFACE, VOLUME, PointDataset, PointLoader
from tests.datapipes.made_cars import car_arrays, write_npy, write_plain_zarr


@pytest.fixture
def dataset(tmp_path):
    cars = {f"run_{i}": write_npy(tmp_path / f"run_{i}", car_arrays(surface=20 + i, seed=i)) for i in range(5)}
    return PointDataset(cars, {"surface": SURFACE, "volume": replace(VOLUME, points=30)}, whole=GEOMETRY, seed=3)


def same(one, other):
    return one.name == other.name and all(torch.equal(one[field], other[field]) for field in one.tensors)


def test_a_sample_has_everything_of_the_car(dataset):
    with PointLoader(dataset, shuffle=False) as loader:
        sample = next(loader.epoch(0))
    assert sample.name == "run_0"
    assert sample["surface_fields"].shape == (20, 4)
    assert sample.batched("volume_fields").shape == (1, 30, 5)
    assert sample.globals == {"Cd": 0.3, "Cl": 0.05, "stream_velocity": 38.889}
    assert sample.attributes["units"] == "SI"
    assert sample.totals == {"surface": 20, "volume": 70}
    assert not sample.is_repeat
    assert sample["stl_faces"].dtype == torch.int32
    np.testing.assert_array_equal(sample["surface_areas"], car_arrays(surface=20, seed=0)["surface_areas"])
    assert loader.bytes_read > 0


def test_epochs_are_reproducible_and_differ(dataset):
    with PointLoader(dataset) as loader:
        first, again, second = (list(loader.epoch(number)) for number in (0, 0, 1))
    assert all(map(same, first, again))
    assert sorted(s.name for s in first) == sorted(dataset.names)
    assert [s.name for s in first] != [s.name for s in second]
    by_name = {s.name: s for s in second}
    assert not torch.equal(first[0]["volume_fields"], by_name[first[0].name]["volume_fields"])  # another window


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 9}, {"prefetch": 1, "workers": "process"}])
def test_workers_change_nothing(dataset, options):
    with PointLoader(dataset) as loader, PointLoader(dataset, **options) as other:
        assert all(map(same, loader.epoch(2), other.epoch(2)))
        assert loader.bytes_read == other.bytes_read


def test_an_epoch_can_be_entered_in_the_middle_and_left_early(dataset):
    with PointLoader(dataset) as loader:
        whole = list(loader.epoch(4))
        assert all(map(same, whole[3:], loader.epoch(4, start=3)))
        for sample in loader.epoch(0):
            assert sample.name
            break
        assert len(list(loader.epoch(1))) == len(loader) == 5
    assert len(list(loader)) == 5  # starts its workers anew
    loader.close()


def test_a_bad_car_stops_the_epoch_where_it_comes(dataset, tmp_path):
    arrays = car_arrays()
    arrays["volume_fields"][40] = np.nan
    bad = write_plain_zarr(tmp_path / "bad.zarr", arrays)
    dataset = replace(dataset, cars={**dataset.cars, "bad": bad}, clouds={"volume": VOLUME})
    with PointLoader(dataset, shuffle=False) as loader:
        epoch = loader.epoch(0)
        assert [next(epoch).name for _ in range(5)] == list(dataset.names[:5])
        with pytest.raises(DataError, match=r"bad.zarr: volume_fields .* row 40"):
            next(epoch)
        assert next(loader.epoch(0)).name == "run_0"  # the workers are still there


def test_a_missing_package_says_how_to_install_it(dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    (tmp_path / "run_1.h5").touch()
    dataset = replace(dataset, cars={"run_1": tmp_path / "run_1.h5"})
    with (
        PointLoader(dataset) as loader,
        pytest.raises(DataError, match=r'pip install h5py, or pip install "dpzoo\[points\]"'),
    ):
        next(loader.epoch(0))
