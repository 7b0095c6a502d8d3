from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import (
    GridDataset,
    GridLoader,
    GridStatistics,
    Invariants,
    Stream,
    describe,
    open_grid,
    to_xarray,
)
from dpzoo.datapipes.grid.part import read_part
from dpzoo.datapipes.grid.read import Box, read_channels
from tests.datapipes.grid.made_grids import (
    CHANNELS,
    GRID,
    HOUR,
    LATITUDE,
    LONGITUDE,
    WRITERS,
    fields,
    hours,
    write_channels,
    write_levels,
    write_netcdf,
    write_npy,
    write_variables,
)

ERA5 = Path(__file__).parents[3] / "dpzoo/demo/data/era5_members.zarr"


@pytest.mark.parametrize("layout", WRITERS)
def test_every_layout_gives_the_same_block(layout, tmp_path):
    times = hours(5)
    path = WRITERS[layout](tmp_path / "a.zarr", times)
    info = describe(path)
    assert set(info.channels) == set(CHANNELS)
    assert info.grid == GRID
    np.testing.assert_array_equal(info.times, times)
    order = ("z500", "t850")
    box = Box(3, 10, 2, 9)
    with closing(open_grid(path)) as source:
        values, valid = read_channels(source, [info.channels[c] for c in order], [3, 1, 2, 1], 0, box)
    truth = fields(times)[[3, 1, 2, 1]][:, [3, 0], 3:10, 2:9]
    np.testing.assert_array_equal(values, truth)
    assert valid.all()


@pytest.mark.parametrize("box", [Box(4, 4, 0, 10), Box(0, 12, 10, 10)])
def test_an_empty_block_reads_nothing(box, tmp_path):
    path = write_variables(tmp_path / "a.zarr", hours(2))
    info = describe(path)
    with closing(open_grid(path)) as source:
        values, valid = read_channels(source, [info.channels["t850"]], [0], 0, box)
        assert source.bytes_read == 0
    assert values.shape == valid.shape == (1, 1, *box.shape)


@pytest.mark.parametrize("kind", ["zarr", "netcdf", "npy"])
def test_a_block_costs_its_share_of_the_bytes(kind, tmp_path):
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, 1, 64, 32)).astype(np.float32)
    if kind == "zarr":
        path, variable = tmp_path / "a.zarr", "noise"
        zarr.create_group(path).create_array(variable, data=data, chunks=(1, 1, 8, 32), shards=(1, 1, 64, 32))
    elif kind == "netcdf":
        import h5py

        path, variable = tmp_path / "a.nc", "noise"
        with h5py.File(path, "w") as file:
            file.create_dataset(variable, data=data, chunks=(1, 1, 8, 32), compression="gzip")
    else:
        path, variable = tmp_path / "a", "noise"
        path.mkdir()
        np.save(path / "noise.npy", data)
    costs = []
    for rows in (slice(0, 64), slice(0, 16), slice(48, 64)):
        with closing(open_grid(path)) as source:
            got = source.read(variable, (slice(1, 2), slice(0, 1), rows, slice(0, 32)))
            costs.append(source.bytes_read)
        np.testing.assert_array_equal(got, data[1:2, :, rows])
    assert costs[0] >= 0.8 * data[0].nbytes
    for part in costs[1:]:
        assert 0.2 * costs[0] <= part <= 0.3 * costs[0]


def test_stores_are_joined_along_time_and_by_channel(tmp_path):
    first = write_variables(tmp_path / "2021.zarr", hours(4), ("t850", "z500"))
    second = write_channels(tmp_path / "2022.zarr", hours(5, 4), ("z500", "t850"))
    third = write_netcdf(tmp_path / "more.nc", hours(6, 2))
    stream = Stream((first, second, third), ("t500", "z500"), offsets=(-1, 0, 2))
    with pytest.raises(DataError, match=r"2021.zarr and .*more.nc both have z500 at 2021-12-31T22"):
        GridDataset({"x": stream}).index  # noqa: B018
    radar = write_variables(tmp_path / "radar.zarr", hours(5, 2), ("refc",))
    stream = Stream((first, second, radar), ("refc", "z500", "t850"), offsets=(-1, 0, 2))
    index = GridDataset({"x": stream}).index
    np.testing.assert_array_equal(index.times, hours(2, 3))
    for number, time in enumerate(index.times):
        part = read_part(index.request(number, Box(0, *GRID[:1], 0, GRID[1])))
        assert part.time == time
        truth = fields(time + np.array([-1, 0, 2]) * HOUR, ("refc", "z500", "t850"))
        both = fields(time + np.array([-1, 0, 2]) * HOUR, ("t850", "z500"))
        other = fields(time + np.array([-1, 0, 2]) * HOUR, ("z500", "t850"))
        np.testing.assert_array_equal(part.arrays["x"][:, 0], truth[:, 0])
        for frame, at in enumerate(time + np.array([-1, 0, 2]) * HOUR):
            old = at < hours(5, 4)[0]
            np.testing.assert_array_equal(part.arrays["x"][frame, 1], (both[:, 1] if old else other[:, 0])[frame])
            np.testing.assert_array_equal(part.arrays["x"][frame, 2], (both[:, 0] if old else other[:, 1])[frame])


def test_windows_invariants_coordinates_and_the_sun(tmp_path):
    orog = np.random.default_rng(0).random(GRID).astype(np.float32)
    path = write_variables(tmp_path / "a.zarr", hours(6), static={"orog": orog})
    states = Stream((path,), ("t850", "z850"), offsets=(-1, 0))
    dataset = GridDataset(
        {"past": states, "next": replace(states, offsets=(1,))},
        invariants=Invariants((path,), ("longitude", "orog", "latitude")),
        cos_zenith=(0, 1),
        crop=(2, 10, 0, 8),
    )
    with GridLoader(dataset, multiple=4, shuffle=False, prefetch=0) as loader:
        samples = list(loader)
    assert [s.time for s in samples] == list(hours(4, 1))
    truth = fields(hours(6))[:, [0, 2], 2:10, :8]
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(sample["past"], truth[i : i + 2])
        np.testing.assert_array_equal(sample["next"], truth[i + 2 : i + 3])
        np.testing.assert_array_equal(sample.times["next"], [hours(6)[i + 2]])
        assert sample.stacked("past").shape == (1, 4, 8, 8)
        np.testing.assert_array_equal(sample.stacked("past")[0, 1], truth[i, 1])
        np.testing.assert_array_equal(sample.stacked("past")[0, 2], truth[i + 1, 0])
        assert sample.batched("invariants").shape == (1, 3, 8, 8)
        np.testing.assert_allclose(sample["invariants"][0, 3], LONGITUDE[:8], rtol=1e-6)
        np.testing.assert_array_equal(sample["invariants"][1], orog[2:10, :8])
        np.testing.assert_allclose(sample["invariants"][2, :, 1], LATITUDE[2:10], rtol=1e-6)
        assert sample["cos_zenith"].shape == (2, 1, 8, 8)
    assert sample["cos_zenith"][0, 0, 0, 7] < sample["cos_zenith"][0, 0, 0, 0] < 0  # evening, night comes from the east


def test_real_members_are_samples():
    states = Stream((ERA5,))
    dataset = GridDataset({"now": states, "later": replace(states, offsets=(1,))}, crop=(0, 60, 0, 120))
    index = dataset.index
    assert (len(index), index.members[3], index.step) == (30, "3", np.timedelta64(12, "h"))
    assert index.timelines["now"].channels == ("z850", "z500", "t850", "t500")
    part = read_part(index.request(10, Box(8, 12, 0, 120)))
    group = zarr.open_group(ERA5, mode="r")
    at = (3, slice(1, 2))
    truth = (
        group["reference"][at][..., None, None] + group["step"][at][..., None, None] * group["packed"][at][..., 8:12, :]
    )
    np.testing.assert_array_equal(part.arrays["now"], truth.astype(np.float32))
    whole = read_part(index.request(10, Box(0, 60, 0, 120)))
    assert part.bytes_read < 0.25 * whole.bytes_read


def test_files_of_one_time_each(tmp_path):
    import h5py

    for i, time in enumerate(hours(3)):
        with h5py.File(tmp_path / f"goes_{i}.nc", "w") as file:
            file["t"] = int((time - np.datetime64("2000-01-01T12:00:00", "s")) / np.timedelta64(1, "s"))
            file["t"].attrs["units"] = "seconds since 2000-01-01 12:00:00"
            for name in ("y", "x"):
                file[name] = np.arange(6.0)
                file[name].make_scale(name)
            file["CMI"] = np.full((6, 6), -1 if i == 2 else -3 - i, np.int16)
            file["CMI"].attrs.update(
                {"scale_factor": 0.5, "add_offset": 1.0, "_Unsigned": "true", "_FillValue": np.int16(-1)}
            )
            for dim, name in enumerate(("y", "x")):
                file["CMI"].dims[dim].attach_scale(file[name])
    stream = Stream(tuple(sorted(tmp_path.glob("goes_*.nc"))), masked=True)
    index = GridDataset({"goes": stream}).index
    np.testing.assert_array_equal(index.times, hours(3))
    parts = [read_part(index.request(i, Box(0, 6, 0, 3))) for i in range(3)]
    assert [float(p.arrays["goes"][0, 0, 0, 0]) for p in parts] == [65533 / 2 + 1, 65532 / 2 + 1, 0]
    assert [bool(p.arrays["goes/mask"].all()) for p in parts] == [True, True, False]


def test_workers_in_processes_and_threads_agree(tmp_path):
    path = write_levels(tmp_path / "a.zarr", hours(4))
    dataset = GridDataset({"x": Stream((path,))}, cos_zenith=(0,), seed=3)
    with GridLoader(dataset, workers="process", prefetch=1) as one, GridLoader(dataset, prefetch=3) as two:
        for a, b in zip(one.epoch(2), two.epoch(2), strict=True):
            assert a.time == b.time
            np.testing.assert_array_equal(a["x"], b["x"])
            np.testing.assert_array_equal(a["cos_zenith"], b["cos_zenith"])
        assert one.bytes_read == two.bytes_read > 0


def test_the_order_is_a_function_of_seed_and_epoch(tmp_path):
    path = write_npy(tmp_path / "a", hours(8))
    dataset = GridDataset({"x": Stream((path,), ("t500",))})
    with GridLoader(dataset, prefetch=0) as loader, GridLoader(dataset, prefetch=2) as again:
        first, second = ([s.time for s in loader.epoch(e)] for e in (0, 1))
        assert first != second
        assert sorted(first) == sorted(second) == list(hours(8))
        assert [s.time for s in again.epoch(1, start=3)] == second[3:]
    with GridLoader(replace(dataset, seed=1), prefetch=0) as other:
        assert [s.time for s in other] != first


def test_stormcast_folders(tmp_path):
    """Years of `(time, channel, y, x)`, invariants `(channel, y, x)`, statistics as arrays beside them."""
    for year, times in (("2021", hours(4)), ("2022", hours(4, 4))):
        write_channels(tmp_path / f"{year}.zarr", times)
    static = np.random.default_rng(0).random((2, *GRID)).astype(np.float32)
    group = zarr.create_group(tmp_path / "invariants.zarr", zarr_format=2)
    array = group.create_array("HRRR_invariants", data=static)
    array.attrs["_ARRAY_DIMENSIONS"] = ["channel", "y", "x"]
    names = group.create_array("channel", data=np.array(["lsm", "orog"], "S8"))
    names.attrs["_ARRAY_DIMENSIONS"] = ["channel"]
    means, stds = np.arange(4.0), 1 + np.arange(4.0)
    states = Stream((tmp_path / "2021.zarr", tmp_path / "2022.zarr"))
    dataset = GridDataset(
        {"now": states, "later": replace(states, offsets=(1,))},
        invariants=Invariants((tmp_path / "invariants.zarr",), ("orog", "lsm")),
        statistics=GridStatistics.from_arrays("now", CHANNELS, means, stds).renamed(later="now"),
        missing=(hours(8)[6],),
    )
    with GridLoader(dataset, shuffle=False) as loader:
        samples = list(loader)
    assert [s.time for s in samples] == list(hours(5))  # hour 6 is missing, so no sample uses it
    truth = (fields(hours(8)) - means[:, None, None]) / stds[:, None, None]
    np.testing.assert_allclose(samples[3]["now"][0], truth[3], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(samples[3]["later"][0], truth[4], rtol=1e-5, atol=1e-5)  # over the turn of the year
    np.testing.assert_array_equal(samples[0]["invariants"], static[::-1])


def test_fields_get_their_labels_back():
    xarray = pytest.importorskip("xarray")
    values = fields(hours(3))
    labelled = to_xarray(torch.from_numpy(values), CHANNELS, hours(3), LATITUDE, LONGITUDE)
    chosen = labelled.sel(channel="z850", latitude=slice(48, 40))
    assert isinstance(labelled, xarray.DataArray)
    np.testing.assert_array_equal(chosen, values[:, 2, (LATITUDE <= 48) & (LATITUDE >= 40)])
    latitude, longitude = np.meshgrid(LATITUDE, LONGITUDE, indexing="ij")
    members = to_xarray(np.stack([values, values]), CHANNELS, hours(3), latitude, longitude, ("0", "1"))
    assert members.dims == ("number", "time", "channel", "y", "x")
    assert members["latitude"].dims == ("y", "x")
