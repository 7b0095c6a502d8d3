import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import (
    GridDataset,
    GridLoader,
    GridStatistics,
    Invariants,
    Stream,
    compute_grid_statistics,
    describe,
)
from tests.datapipes.grid.made_grids import (
    CHANNELS,
    GRID,
    HOUR,
    fields,
    hours,
    write_channels,
    write_levels,
    write_variables,
)


def first_sample(dataset, **options):
    with GridLoader(dataset, shuffle=False, prefetch=0, **options) as loader:
        return next(iter(loader))


def test_a_missing_channel(tmp_path):
    path = write_variables(tmp_path / "a.zarr", hours(3), static={"orog": np.ones(GRID)})
    with pytest.raises(DataError, match=r"a.zarr: no variable 'refc' for stream 'x' at any time; has t500, t850, z500"):
        first_sample(GridDataset({"x": Stream((path,), ("t850", "refc"))}))
    with pytest.raises(DataError, match=r"a.zarr: no variable 'orog' .*read it as an invariant"):
        first_sample(GridDataset({"x": Stream((path,), ("orog",))}))
    with pytest.raises(DataError, match=r"a.zarr has no channel 'lsm'; it has orog, t500"):
        first_sample(GridDataset({"x": Stream((path,))}, invariants=Invariants((path,), ("lsm",))))
    with pytest.raises(DataError, match=r"a.zarr: t850 has a time, so it is no invariant"):
        first_sample(GridDataset({"x": Stream((path,))}, invariants=Invariants((path,), ("t850",))))
    with pytest.raises(DataError, match=r"absent.zarr does not exist"):
        first_sample(GridDataset({"x": Stream((tmp_path / "absent.zarr",))}))


def test_a_time_gap(tmp_path):
    times = hours(9)
    path = write_variables(tmp_path / "a.zarr", np.delete(times, [3, 4]))
    dataset = GridDataset({"x": Stream((path,), offsets=(-1, 0))})
    with pytest.raises(DataError, match=r"a.zarr: t500 has no time 2021-12-31T23:00:00 \(and 1 more times\).*missing="):
        first_sample(dataset)
    skipping = [replace(dataset, gaps="skip"), replace(dataset, missing=(times[3], times[4]))]
    for usable in skipping:
        np.testing.assert_array_equal(usable.index.times, times[[1, 2, 6, 7, 8]])
    np.testing.assert_array_equal(replace(dataset, missing=tuple(times[3:7])).index.times, times[[1, 2, 8]])
    assert list(replace(dataset, start=times[6]).index.times) == list(times[6:])
    assert list(replace(dataset, stop=times[2]).index.times) == [times[1]]
    with pytest.raises(DataError, match="no time has all frames"):
        first_sample(replace(dataset, gaps="skip", step=np.timedelta64(7, "m")))


@pytest.mark.parametrize("masked", [False, True])
def test_a_pixel_without_a_value(masked, tmp_path):
    data = fields(hours(2))
    data[1, 2, 5, 7] = np.nan
    path = write_channels(tmp_path / "a.zarr", hours(2), data=data)
    dataset = GridDataset({"x": Stream((path,), masked=masked)})
    with GridLoader(dataset, shuffle=False, prefetch=0) as loader:
        samples = loader.epoch(0)
        good = next(samples)
        if not masked:
            told = r"a.zarr: z850 at 2021-12-31T21:00:00 has 1 pixels without a value .*row 5, column 7.*masked=True"
            with pytest.raises(DataError, match=told):
                next(samples)
            with pytest.raises(DataError, match=told):
                compute_grid_statistics(dataset)
            return
        assert good.masks["x"].all()
        bad = next(samples)
    wanted = np.isfinite(data[1])[None]
    np.testing.assert_array_equal(bad.masks["x"], wanted)
    np.testing.assert_array_equal(bad["x"], np.where(wanted, data[1], 0))


def test_invalid_values_and_log1p(tmp_path):
    data = np.abs(fields(hours(2)))
    data[:, 1, :2] = -99
    path = write_channels(tmp_path / "a.zarr", hours(2), data=data)
    stream = Stream((path,), log1p=("t500",), masked=True)
    with pytest.raises(DataError, match=r"a.zarr: t500 has a value of -99, and log1p is for values of at least 0"):
        first_sample(GridDataset({"x": stream}))
    sample = first_sample(GridDataset({"x": replace(stream, invalid_values=(-99.0, -999.0))}))
    assert not sample.masks["x"][0, 1, :2].any()
    assert sample.masks["x"][0, 1, 2:].all()
    np.testing.assert_allclose(sample["x"][0, 1, 2:], np.log1p(data[0, 1, 2:]), rtol=1e-6)
    np.testing.assert_array_equal(sample["x"][0, 0], data[0, 0])
    assert not sample["x"][0, 1, :2].any()


def test_statistics_of_other_channels_or_another_order(tmp_path):
    path = write_channels(tmp_path / "a.zarr", hours(2))
    dataset = GridDataset({"x": Stream((path,), ("t850", "z500"))})
    given = GridStatistics.from_arrays("x", ("z500", "t850"), np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    with pytest.raises(
        DataError, match=r"a.zarr: statistics of stream 'x' are in another channel order: number 0 is 'z500'"
    ):
        first_sample(replace(dataset, statistics=given))
    sample = first_sample(replace(dataset, statistics=given.reordered("x", ("t850", "z500"))))
    truth = (fields(hours(1))[:, [0, 3]] - np.array([2, 1])[:, None, None]) / np.array([4, 3])[:, None, None]
    np.testing.assert_allclose(sample["x"], truth, rtol=1e-5, atol=1e-6)
    short = GridStatistics.from_arrays("x", ("t850",), np.zeros(1), np.ones(1))
    with pytest.raises(DataError, match=r"a.zarr: statistics of stream 'x' lack z500"):
        first_sample(replace(dataset, statistics=short))
    with pytest.raises(DataError, match="2 channels have 3 means"):
        GridStatistics.from_arrays("x", ("a", "b"), np.zeros(3), np.ones(3))


def test_a_grid_that_does_not_divide(tmp_path):
    path = write_channels(tmp_path / "a.zarr", hours(2))
    dataset = GridDataset({"x": Stream((path,))})
    with pytest.raises(DataError, match=r"a.zarr, dim x: 10 rows or columns are not divisible by 4 .*crop to 8"):
        first_sample(dataset, multiple=4)
    with pytest.raises(DataError, match=r"a.zarr: crop \(0, 12, 0, 11\) is not a part of its grid of 12 x 10"):
        first_sample(replace(dataset, crop=(0, 12, 0, 11)))


def test_stores_that_disagree_on_the_grid(tmp_path):
    a = write_channels(tmp_path / "a.zarr", hours(2))
    b = write_channels(tmp_path / "b.zarr", hours(2, 2), data=fields(hours(2, 2), grid=(8, 10)))
    for streams in ({"x": Stream((a, b))}, {"x": Stream((a,)), "y": Stream((b,))}):
        with pytest.raises(DataError, match=r"a.zarr \(t850\) has a grid of 12 x 10, .*b.zarr \(t850\) one of 8 x 10"):
            first_sample(GridDataset(streams))
    c = write_channels(tmp_path / "c.zarr", hours(2, 2))
    zarr.open_group(c)["latitude"][4] = 12.0
    with pytest.raises(DataError, match=r"lie on different grids: latitude number 4 is 42\.0 in the first and 12"):
        first_sample(GridDataset({"x": Stream((a, c))}))


def test_lost_chunks(tmp_path):
    path = write_channels(tmp_path / "a.zarr", hours(2))
    shutil.rmtree(path / "HRRR" / "c" / "0" / "0" / "2")
    dataset = GridDataset({"x": Stream((path,))})
    with pytest.raises(DataError, match=r'a.zarr: chunk HRRR/c/0/0/2/0 is missing .*absent_chunks="fill"'):
        first_sample(dataset)
    sample = first_sample(GridDataset({"x": Stream((path,), absent_chunks="fill")}))
    assert not sample["x"][:, :, 6:9].any()
    assert sample["x"][:, :, 5].all()


def test_stores_that_cannot_be_read(tmp_path):
    (tmp_path / "a.nc").write_bytes(b"\x89HDF\r\n\x1a\n cut off")
    (tmp_path / "b.nc").write_bytes(b"CDF\x01 cut off")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "t.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "d.grib").write_bytes(b"GRIB")
    for name, message in (
        ("a.nc", "a.nc is not a complete HDF5 file"),
        ("b.nc", "b.nc is not a complete NetCDF 3 file"),
        ("c", r"t.npy is not a complete .npy file"),
        ("d.grib", "d.grib is not a grid store: .*dpzoo convert grib"),
    ):
        with pytest.raises(DataError, match=message):
            describe(tmp_path / name)


def test_times_that_cannot_be_used(tmp_path):
    path = write_levels(tmp_path / "a.zarr", hours(3))
    group = zarr.open_group(path)
    group["time"].attrs["units"] = "fortnights since 2020-01-01"
    with pytest.raises(DataError, match=r"a.zarr: time: times need units such as .*fortnights"):
        describe(path)
    group["time"].attrs.update(units="hours since 2020-01-01", calendar="noleap")
    with pytest.raises(DataError, match="calendar 'noleap' is not Gregorian"):
        describe(path)
    group["time"].attrs.update(calendar="standard")
    group["time"][:] = np.array([0, 2, 1])
    with pytest.raises(DataError, match=r"time is not ascending: 2020-01-01T02:00:00 is followed by 2020-01-01T01"):
        describe(path)
    one = write_channels(tmp_path / "one.zarr", hours(1))
    with pytest.raises(DataError, match=r"one.zarr has 1 times: say what one step is with step="):
        first_sample(GridDataset({"x": Stream((one,), offsets=(0, 1))}))
    assert GridDataset({"x": Stream((one,), offsets=(0,))}, step=HOUR).index.times == hours(1)


def test_arguments_that_do_not_fit(tmp_path):
    path = write_channels(tmp_path / "a.zarr", hours(1))
    dataset = GridDataset({"x": Stream((path,))})
    for cut in ({}, {"domain": "z"}, {"a": "y", "b": "y"}):
        with pytest.raises(DataError, match="must name a mesh axis"):
            GridLoader(dataset, cut=cut)
    with pytest.raises(DataError, match="wants t850 twice"):
        first_sample(GridDataset({"x": Stream((path,), ("t850", "t850"))}))
    with pytest.raises(DataError, match="log1p names refc"):
        first_sample(GridDataset({"x": Stream((path,), log1p=("refc",))}))
    assert GridDataset({"x": Stream((path,))}).index.timelines["x"].channels == CHANNELS


@pytest.mark.parametrize("fill", [-9, 0])
def test_the_fill_value_of_packed_integers_in_zarr_2(fill, tmp_path):
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    time = group.create_array("time", data=np.arange(1))
    time.attrs.update(units="hours since 2020-01-01", _ARRAY_DIMENSIONS=["time"])
    raw = np.array([[[0, 3], [-9, 4]]], np.int16)
    array = group.create_array("t", shape=raw.shape, dtype="int16", chunks=raw.shape, fill_value=fill)
    array[...] = raw
    array.attrs.update(scale_factor=0.5, _ARRAY_DIMENSIONS=["time", "y", "x"])
    sample = first_sample(GridDataset({"x": Stream((tmp_path / "a.zarr",), masked=True)}))
    # Zero is the fill value that zarr gives to every array: it marks nothing.
    assert sample.masks["x"].flatten().tolist() == [True, True, fill != -9, True]
    assert sample["x"].flatten().tolist() == [0, 1.5, 0 if fill == -9 else -4.5, 2]
