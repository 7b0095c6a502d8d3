"""What a worker does: read one rank's block of one sample, check it, transform and normalise it."""

from pathlib import Path

import numpy as np

from dpzoo.datapipes.agreement import as_data_error
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.dataset import COS_ZENITH, GridPart, GridRequest, StreamRequest
from dpzoo.datapipes.grid.read import Box, check_chunks, read_channels
from dpzoo.datapipes.grid.solar import cos_zenith
from dpzoo.datapipes.grid.source import GridSource, open_grid
from dpzoo.datapipes.grid.store import StoreInfo
from dpzoo.datapipes.grid.survey import describe


def read_part(request: GridRequest) -> GridPart:
    """Read one rank's block of a sample.

    Raises:
        DataError: naming store, variable and time: a pixel without a value, a lost chunk, a damaged file.
    """
    part = GridPart(request.time, request.member)
    with OpenStores() as stores:
        for name, stream in request.streams.items():
            part.arrays[name], valid = read_stream(stream, request.member, request.box, stores)
            if stream.masked:
                part.arrays[f"{name}/mask"] = valid
        if request.sun:
            latitude, longitude = read_coordinates(request.coordinates, request.box, stores)
            part.arrays[COS_ZENITH] = np.stack([cos_zenith(t, latitude, longitude) for t in request.sun])[:, None]
        part.bytes_read = stores.bytes_read
    return part


class OpenStores:
    """The stores that one read needs, each opened once and all closed at its end."""

    def __init__(self) -> None:
        self._open: dict[Path, GridSource] = {}

    def __getitem__(self, path: Path) -> GridSource:
        if path not in self._open:
            self._open[path] = open_grid(path)
        return self._open[path]

    @property
    def bytes_read(self) -> int:
        """Bytes taken from all of them."""
        return sum(source.bytes_read for source in self._open.values())

    def __enter__(self) -> "OpenStores":
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()


def read_stream(stream: StreamRequest, member: int, box: Box, stores: OpenStores) -> tuple[np.ndarray, np.ndarray]:
    """Values and mask `(frame, channel, row, column)`; the value of an invalid pixel is 0 if the stream is masked."""
    values = np.empty((stream.frames, len(stream.channels), *box.shape), np.float32)
    valid = np.empty(values.shape, bool)
    for read in stream.reads:
        with named(read.path):
            source = stores[read.path]
            # A store without members serves every member of the others.
            own = member if "member" in read.channels[0].roles else 0
            block, good = read_channels(source, read.channels, read.times, own, box, stream.invalid_values)
            check_chunks(source, [c.name for c in read.channels], stream.absent_chunks == "fill")
            if not stream.masked and not good.all():
                raise DataError(_invalid(source, stream, read.times, [c.name for c in read.channels], good, box))
        place = np.ix_(read.frames, read.positions)
        values[place], valid[place] = block, good
    for position in stream.log1p:
        _log1p(values[:, position], valid[:, position], stream, position)
    if stream.mean is not None and stream.std is not None:
        values -= stream.mean
        values /= stream.std
    if stream.masked:
        values[~valid] = 0
    return values, valid


def read_coordinates(info: StoreInfo | None, box: Box, stores: OpenStores) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude `(row, column)` of a block, degrees."""
    if info is None or info.latitude is None or info.longitude is None:
        raise DataError(f"{'no store' if info is None else info.path} has latitude and longitude")
    rows, columns = slice(box.top, box.bottom), slice(box.left, box.right)
    with named(info.path):
        source = stores[info.path]
        latitude = _coordinate(source, info.latitude, rows, columns, rows)
        longitude = _coordinate(source, info.longitude, rows, columns, columns)
    if latitude.ndim == 1:
        latitude = latitude[:, None]
    latitude, longitude = np.broadcast_arrays(latitude, longitude)
    return np.asarray(latitude, np.float32), np.asarray(longitude, np.float32)


def read_static(
    infos: tuple[StoreInfo, ...], names: tuple[str, ...], coordinates: StoreInfo | None, box: Box
) -> np.ndarray:
    """Fields without a time, `(field, row, column)`.

    Raises:
        DataError: a field is in no store, has a time, or has a pixel without a value.
    """
    with OpenStores() as stores:
        out = [_static_field(infos, name, coordinates, box, stores) for name in names]
    return np.stack(out) if out else np.empty((0, *box.shape), np.float32)


def _static_field(
    infos: tuple[StoreInfo, ...], name: str, coordinates: StoreInfo | None, box: Box, stores: OpenStores
) -> np.ndarray:
    if name in ("latitude", "longitude") and coordinates is not None:
        return read_coordinates(coordinates, box, stores)[0 if name == "latitude" else 1]
    info = next((i for i in infos if name in i.channels), infos[0] if infos else None)
    if info is None:
        raise DataError(f"no store of invariants has {name!r}")
    channel = info.channel(name)
    if not channel.static:
        raise DataError(f"{info.path}: {name} has a time, so it is no invariant")
    with named(info.path):
        values, valid = read_channels(stores[info.path], [channel], [0], 0, box)
    if not valid.all():
        row, column = np.argwhere(~valid[0, 0])[0]
        raise DataError(
            f"{info.path}: {name} has {int((~valid).sum())} pixels without a value, the first at row "
            f"{box.top + row}, column {box.left + column}: fill them"
        )
    return values[0, 0]


class named:
    """Any error inside becomes a `DataError` that names the store."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, ImportError) or not isinstance(error, Exception):
            return
        if isinstance(error, DataError) and str(self.path) in str(error):
            return
        raise DataError(f"{self.path}: {as_data_error(error)}") from error


def _coordinate(source: GridSource, name: str, rows: slice, columns: slice, own: slice) -> np.ndarray:
    return source.read(name, (own,) if len(source.variables[name].dims) == 1 else (rows, columns))


def _invalid(
    source: GridSource, stream: StreamRequest, times: tuple[int, ...], channels: list[str], good: np.ndarray, box: Box
) -> str:
    frame, channel, row, column = np.argwhere(~good)[0]
    known = describe(source.path).times
    time = f"at {known[times[frame]]}" if known is not None else "without a time"
    return (
        f"{source.path}: {channels[channel]} {time} has {int((~good[frame, channel]).sum())} pixels without a value in "
        f"rows [{box.top}, {box.bottom}), the first at row {box.top + row}, column {box.left + column}: repair the "
        "store, leave the time out (missing=), or pass masked=True"
    )


def _log1p(values: np.ndarray, valid: np.ndarray, stream: StreamRequest, position: int) -> None:
    if (values[valid] < 0).any():
        lowest = float(values[valid].min())
        path = next(r.path for r in stream.reads if position in r.positions)
        raise DataError(
            f"{path}: {stream.channels[position]} has a value of {lowest:g}, and log1p is for values of at least 0: "
            "take the channel out of log1p=, or name the value in invalid_values="
        )
    np.log1p(values, out=values, where=valid)
