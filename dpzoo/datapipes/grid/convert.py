"""`dpzoo convert zarr|netcdf`: stores in chunks that no rank can share, into slabs of rows. Once.

One time is in memory at a time. A conversion that was stopped goes on where it was when the same command runs again.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.dataset import StreamRequest
from dpzoo.datapipes.grid.part import OpenStores, read_static, read_stream
from dpzoo.datapipes.grid.read import Box
from dpzoo.datapipes.grid.source import HDF5_SUFFIXES, open_grid
from dpzoo.datapipes.grid.store import StoreInfo
from dpzoo.datapipes.grid.stream import Stream, Timeline
from dpzoo.datapipes.grid.survey import units_of
from dpzoo.datapipes.grid.writer import Contents, GridWriter
from dpzoo.datapipes.optional import require


def convert_stores(
    source: Path,
    destination: Path,
    channels: Sequence[str] | None = None,
    slabs: int = 8,
    select: dict[str, int] | None = None,
) -> int:
    """Write the stores at `source` as one store of y-slabs; returns the number of fields `(member, time)` it has.

    Fields without a time are copied as they are, pixels without a value become NaN.

    Args:
        source: a zarr store, a NetCDF file, or a folder of either, which are joined along time or by channels.
        destination: the zarr store to write.
        channels: all by default.
        slabs: pieces of a field along y.
        select: index along dims that are not time, channel, level, y or x.

    Raises:
        DataError: a store is bad, the stores do not fit together, or another store is at `destination`.
    """
    paths = find_stores(source)
    stream = Stream(
        paths, tuple(channels) if channels else None, masked=True, absent_chunks="fill", select=select or {}
    )
    line = Timeline("source", stream)
    if not len(line.times):
        raise DataError(f"{source}: no time has all of {', '.join(line.channels)}; convert channels apart")
    contents = _contents(line)
    settings = {"source": [path.name for path in paths], "select": dict(stream.select)}
    bar = require("tqdm", "a progress bar").tqdm
    with GridWriter(destination, contents, settings, slabs) as writer:
        members = max(1, len(contents.members))
        total = len(contents.times) * members
        for number in bar(range(writer.done, total), initial=writer.done, total=total, unit="field", disable=None):
            time, member = divmod(number, members)
            writer.write(_field(line, contents.times[time], member))
    return total


def find_stores(source: Path) -> tuple[Path, ...]:
    """The stores at a path: itself, or those directly in a folder, by name.

    Raises:
        DataError: there is none.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist")
    if source.is_file() or source.suffix == ".zarr" or any((source / n).is_file() for n in ("zarr.json", ".zgroup")):
        return (source,)
    found = sorted(p for p in source.iterdir() if p.suffix in (".zarr", *HDF5_SUFFIXES))
    if not found:
        raise DataError(f"{source} holds no *.zarr store and no NetCDF file")
    return tuple(found)


def _field(line: Timeline, time: np.datetime64, member: int) -> np.ndarray:
    stream = line.stream
    request = StreamRequest(
        line.reads(np.array([time])), 1, line.channels, (), True, stream.invalid_values, stream.absent_chunks
    )
    ny, nx = line.infos[0].grid
    with OpenStores() as stores:
        values, valid = read_stream(request, member, Box(0, ny, 0, nx), stores)
    return np.where(valid, values, np.float32(np.nan))[0]


def _contents(line: Timeline) -> Contents:
    latitude, longitude = coordinates_of(line.infos)
    static: dict[str, np.ndarray] = {}
    units: dict[str, str] = {}
    box = Box(0, line.infos[0].grid[0], 0, line.infos[0].grid[1])
    for info in line.infos:
        units |= units_of(info.path, info)
        for name, channel in info.channels.items():
            if channel.static and name not in static and "channel" not in channel.roles:
                static[name] = read_static((info,), (name,), None, box)[0]
    return Contents(line.times, line.channels, line.infos[0].grid, latitude, longitude, line.members, static, units)


def coordinates_of(infos: Sequence[StoreInfo]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Latitude and longitude as the first store that has both keeps them."""
    for info in infos:
        if info.latitude is None or info.longitude is None:
            continue
        with closing(open_grid(info.path)) as source:
            latitude, longitude = (
                source.read(n, (slice(None),) * len(source.variables[n].dims)) for n in (info.latitude, info.longitude)
            )
        if latitude.ndim == longitude.ndim and latitude.ndim in (1, 2):
            if latitude.ndim == 2 and latitude.shape != info.grid:
                continue
            return latitude, longitude
    return None, None
