from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from dpzoo.cli import main
from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import GridDataset, GridLoader, Invariants, Stream, describe, open_grid
from dpzoo.datapipes.grid.convert import convert_stores
from dpzoo.datapipes.grid.writer import Contents, GridWriter, slab_rows
from dpzoo.datapipes.watched_zarr import MARKER, state_of
from tests.datapipes.grid.made_grids import CHANNELS, GRID, fields, hours, write_channels, write_netcdf, write_variables

HERE = Path(__file__).parent
NAM, SEVIRI = HERE / "data/nam_excerpt.grib2", HERE / "data/seviri_excerpt.nc"
ERA5 = HERE.parents[2] / "dpzoo/demo/data/era5_members.zarr"


def everything(path, channels=None, **options):
    stream = Stream((path,), channels, **options)
    with GridLoader(GridDataset({"x": stream}), shuffle=False, prefetch=0) as loader:
        return np.stack([s["x"][0].numpy() for s in loader])


def test_zarr_becomes_slabs_of_rows(tmp_path):
    assert main(["convert", "zarr", str(ERA5), str(tmp_path / "a.zarr"), "--slabs", "15"]) == 0
    info = describe(tmp_path / "a.zarr")
    assert (info.grid, info.chunks, info.members) == ((61, 120), ((5, 120),), tuple(map(str, range(10))))
    np.testing.assert_array_equal(everything(tmp_path / "a.zarr"), everything(ERA5))
    array = zarr.open_group(tmp_path / "a.zarr", mode="r")["fields"]
    assert array.shards == (1, 1, 4, 65, 120)
    costs = []
    for rows in (slice(0, 61), slice(0, 15), slice(45, 61)):
        with closing(open_grid(tmp_path / "a.zarr")) as source:
            source.read("fields", (slice(2, 3), slice(0, 1), slice(0, 4), rows, slice(0, 120)))
            costs.append(source.bytes_read)
    assert max(costs[1:]) < 0.34 * costs[0]


def test_netcdf_is_joined_and_says_what_it_holds(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_netcdf(tmp_path / "in" / "a.nc", hours(3), packed=True)
    write_netcdf(tmp_path / "in" / "b.nc", hours(2, 3), chunked=False)
    arguments = ["convert", "netcdf", str(tmp_path / "in"), str(tmp_path / "out.zarr"), "--channels", "z500", "t850"]
    assert main(arguments) == 0
    assert "out.zarr: 5 fields" in capsys.readouterr().out
    found = everything(tmp_path / "out.zarr", ("t850", "z500"))
    truth = fields(hours(5))[:, [0, 3]]
    np.testing.assert_allclose(found[:3], truth[:3], atol=0.006)
    np.testing.assert_array_equal(found[3:], truth[3:])
    xarray = pytest.importorskip("xarray")
    with xarray.open_zarr(tmp_path / "out.zarr", consolidated=False) as opened:
        assert opened["channel"].values.tolist() == ["z500", "t850"]
        assert opened["fields"].dims == ("time", "channel", "latitude", "longitude")
        np.testing.assert_array_equal(opened["time"].values.astype("datetime64[s]"), hours(5))
    assert main(["convert", "netcdf", str(tmp_path / "nothing"), str(tmp_path / "x.zarr")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err


def test_static_fields_and_units_come_along(tmp_path):
    orog = np.random.default_rng(0).random(GRID).astype(np.float32)
    path = write_variables(tmp_path / "a.zarr", hours(2), version=2, static={"orog": orog})
    convert_stores(path, tmp_path / "b.zarr", slabs=2)
    info = describe(tmp_path / "b.zarr")
    assert info.channel("orog").static
    group = zarr.open_group(tmp_path / "b.zarr", mode="r")
    np.testing.assert_array_equal(group["orog"][...], orog)
    units = dict(zip(group["fields"].attrs["channels"], group["fields"].attrs["units"], strict=True))
    assert units == {name: f"unit {j}" for j, name in enumerate(CHANNELS)}
    dataset = GridDataset(
        {"x": Stream((tmp_path / "b.zarr",))}, invariants=Invariants((tmp_path / "b.zarr",), ("orog",))
    )
    with GridLoader(dataset) as loader:
        np.testing.assert_array_equal(next(iter(loader))["invariants"][0], orog)


def test_a_stopped_conversion_goes_on_and_a_finished_one_stays(tmp_path, monkeypatch):
    path = write_channels(tmp_path / "a.zarr", hours(40))
    write, stopped = GridWriter.write, []

    def stop_at_20(self, values):
        if self.done == 20 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        write(self, values)

    monkeypatch.setattr(GridWriter, "write", stop_at_20)
    with pytest.raises(KeyboardInterrupt):
        convert_stores(path, tmp_path / "b.zarr")
    assert state_of(tmp_path / "b.zarr")["done"] == 20
    with pytest.raises(DataError, match=r"b.zarr is unfinished \(its state is 'writing'\)"):
        describe(tmp_path / "b.zarr")
    written = []
    monkeypatch.setattr(GridWriter, "write", lambda self, values: (written.append(self.done), write(self, values)))
    convert_stores(path, tmp_path / "b.zarr")
    convert_stores(path, tmp_path / "b.zarr")
    assert written == list(range(20, 40))
    np.testing.assert_array_equal(everything(tmp_path / "b.zarr"), fields(hours(40)))
    with pytest.raises(DataError, match=r"b.zarr exists and it was made with .*'slabs': 8.*delete it"):
        convert_stores(path, tmp_path / "b.zarr", slabs=3)
    with pytest.raises(DataError, match=r"a.zarr exists and it is no store of this converter"):
        convert_stores(tmp_path / "b.zarr", path)


def test_a_lost_chunk_of_a_converted_store_is_an_error(tmp_path):
    convert_stores(write_channels(tmp_path / "a.zarr", hours(2)), tmp_path / "b.zarr")
    next((tmp_path / "b.zarr" / "fields").rglob("c/1/0/0/0")).unlink()
    with pytest.raises(DataError, match=r"b.zarr: chunk fields/c/1/0/0/0 is missing .*it was written whole"):
        everything(tmp_path / "b.zarr", absent_chunks="fill")


def test_a_satellite_image_keeps_its_mask(tmp_path):
    import h5py

    with h5py.File(SEVIRI) as file:
        raw = file["data"][...]
    seen = raw > -1e9
    assert 0 < (~seen).sum() < seen.sum()
    convert_stores(SEVIRI, tmp_path / "b.zarr", slabs=4)
    for path in (SEVIRI, tmp_path / "b.zarr"):
        dataset = GridDataset({"x": Stream((path,), masked=True)}, cos_zenith=(0,))
        with GridLoader(dataset, multiple=8) as loader:
            (sample,) = loader
        assert str(sample.time) == "2016-05-16T12:00:00"
        np.testing.assert_array_equal(sample.masks["x"][0, 0], seen)
        np.testing.assert_array_equal(sample["x"][0, 0], np.where(seen, raw, 0))
        assert (sample["cos_zenith"] > 0.2).all()  # noon over the North Atlantic in May
        with pytest.raises(DataError, match=r"data at 2016-05-16T12:00:00 has \d+ pixels without a value"):
            everything(path)


def test_slabs():
    assert [slab_rows(*c) for c in ((1024, 8), (1059, 8), (61, 8), (61, 15), (3, 8), (20, 1))] == [
        128,
        136,
        8,
        5,
        1,
        20,
    ]


def test_members_are_written_time_by_time(tmp_path):
    contents = Contents(hours(2), ("a",), (4, 3), members=("7", "9", "11"))
    with GridWriter(tmp_path / "a.zarr", contents, {}) as writer:
        for number in range(6):
            writer.write(np.full((1, 4, 3), number, np.float32))
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert group["fields"][:, :, 0, 0, 0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert group["number"][...].tolist() == [7, 9, 11]
    assert group.attrs[MARKER]["state"] == "finished"
    with pytest.raises(DataError, match=r"a field of shape \(2, 4, 3\)"):
        GridWriter(tmp_path / "b.zarr", replace(contents), {}).write(np.zeros((2, 4, 3), np.float32))
