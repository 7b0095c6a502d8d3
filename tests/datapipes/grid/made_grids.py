"""Small grids with known content, written to disk in every layout that users have."""

import json
from pathlib import Path

import h5py
import numpy as np
import zarr

GRID = (12, 10)
CHANNELS = ("t850", "t500", "z850", "z500")
LEVELS = (850, 500)
HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-12-31T20:00:00", "s")
LATITUDE = np.linspace(50, 28, GRID[0])
LONGITUDE = np.linspace(-110, -92, GRID[1])


def hours(count: int, first: int = 0) -> np.ndarray:
    return START + (first + np.arange(count)) * HOUR


def fields(times: np.ndarray, channels: tuple[str, ...] = CHANNELS, grid: tuple[int, int] = GRID) -> np.ndarray:
    """`(time, channel, y, x)` float32, a function of time and channel only: stores that overlap agree."""
    out = np.empty((len(times), len(channels), *grid), np.float32)
    for i, time in enumerate(times):
        for j, channel in enumerate(channels):
            seed = int((time - START) / np.timedelta64(1, "s")) + 10**9, sum(map(ord, channel))
            out[i, j] = np.random.default_rng(seed).standard_normal(grid) * (3 + j) + 20 * j
    return out


def _put(group, name, data, dims, version, chunks=None, **attributes):
    named = {"dimension_names": dims} if version == 3 else {}
    array = group.create_array(name, data=data, chunks=chunks or data.shape or (1,), **named)
    array.attrs.update(attributes if version == 3 else {**attributes, "_ARRAY_DIMENSIONS": list(dims)})


def _coordinates(group, times, version, y="y", x="x"):
    since = ((times - np.datetime64("2020-01-01", "s")) / np.timedelta64(60, "s")).astype(np.int64)
    _put(group, "time", since, ("time",), version, units="minutes since 2020-01-01 00:00:00", calendar="standard")
    _put(group, "latitude", LATITUDE, (y,), version, units="degrees_north")
    _put(group, "longitude", LONGITUDE, (x,), version, units="degrees_east")


def write_variables(path: Path, times, channels=CHANNELS, version=3, rows=3, data=None, static=None) -> Path:
    """One variable per channel, `(time, y, x)`."""
    values = fields(times, channels) if data is None else data
    group = zarr.create_group(path, zarr_format=version)
    _coordinates(group, times, version)
    for j, name in enumerate(channels):
        _put(group, name, values[:, j], ("time", "y", "x"), version, (1, rows, values.shape[-1]), units=f"unit {j}")
    for name, field in (static or {}).items():
        _put(group, name, field, ("y", "x"), version)
    return path


def write_channels(path: Path, times, channels=CHANNELS, version=3, rows=3, data=None) -> Path:
    """`HRRR (time, channel, y, x)` with the coordinate `channel`."""
    values = fields(times, channels) if data is None else data
    group = zarr.create_group(path, zarr_format=version)
    _coordinates(group, times, version)
    _put(group, "channel", np.array(channels, np.dtypes.StringDType() if version == 3 else "S8"), ("channel",), version)
    chunks = (1, len(channels), rows, values.shape[-1])
    _put(group, "HRRR", values, ("time", "channel", "y", "x"), version, chunks)
    return path


def write_levels(path: Path, times, version=2, transposed=True) -> Path:
    """`(time, level, longitude, latitude)` of two variables, as WeatherBench 2 has them."""
    values = fields(times)
    group = zarr.create_group(path, zarr_format=version)
    _coordinates(group, times, version, "latitude", "longitude")
    _put(group, "level", np.array(LEVELS), ("level",), version)
    for name, places in (("t", (0, 1)), ("z", (2, 3))):
        data, dims = values[:, places], ("time", "level", "latitude", "longitude")
        if transposed:
            data, dims = data.swapaxes(2, 3), ("time", "level", "longitude", "latitude")
        _put(group, name, np.ascontiguousarray(data), dims, version)
    return path


def write_netcdf(path: Path, times, chunked=True, packed=False) -> Path:
    values = fields(times)
    with h5py.File(path, "w") as file:
        file["time"] = (times - np.datetime64("2021-01-01", "s")) / np.timedelta64(1, "D")
        file["time"].attrs["units"] = "days since 2021-01-01"
        file["latitude"], file["longitude"] = LATITUDE, LONGITUDE
        for name in ("time", "latitude", "longitude"):
            file[name].make_scale(name)
        for j, name in enumerate(CHANNELS):
            data, attributes = values[:, j], {}
            if packed:
                data = np.rint(data / 0.01).astype(np.int16)
                attributes = {"scale_factor": 0.01, "add_offset": 0.0, "_FillValue": np.int16(-32768)}
            chunks = (1, 4, GRID[1]) if chunked else None
            file.create_dataset(name, data=data, chunks=chunks, compression="gzip" if chunked else None)
            file[name].attrs.update(attributes)
            for dim, scale in enumerate(("time", "latitude", "longitude")):
                file[name].dims[dim].attach_scale(file[scale])
    return path


def write_npy(path: Path, times) -> Path:
    path.mkdir()
    np.save(path / "state.npy", fields(times))
    np.save(path / "time.npy", times)
    np.save(path / "y.npy", LATITUDE)
    (path / "grid.json").write_text(json.dumps({"attributes": {"state": {"channels": list(CHANNELS)}}}))
    return path


WRITERS = {
    "variables": write_variables,
    "variables zarr 2": lambda path, times: write_variables(path, times, version=2),
    "channels": write_channels,
    "levels zarr 2, transposed": write_levels,
    "levels zarr 3": lambda path, times: write_levels(path, times, 3, False),
    "netcdf": lambda path, times: write_netcdf(path.with_suffix(".nc"), times),
    "netcdf in one piece": lambda path, times: write_netcdf(path.with_suffix(".nc"), times, chunked=False),
    "npy": lambda path, times: write_npy(path.with_suffix(""), times),
}
