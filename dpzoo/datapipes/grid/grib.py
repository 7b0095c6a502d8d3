"""`dpzoo convert grib`: GRIB messages, each of which holds one whole field, into slabs of rows.

Two passes over the files: the first reads headers only and says which channel, time and member each message is; the
second decodes. Fields of one time are kept until all channels are there, so files in order of time need little memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.writer import Contents, GridWriter
from dpzoo.datapipes.optional import require

SUFFIXES = (".grib", ".grib2", ".grb", ".grb2", ".grib1", ".grb1")


class Header(NamedTuple):
    """What one message is."""

    name: str
    kind: str
    level: int
    time: np.datetime64
    member: int
    grid: tuple[int, int]
    units: str


def convert_grib(source: Path, destination: Path, channels: Sequence[str] | None = None, slabs: int = 8) -> int:
    """Write the GRIB files at `source` as one store of y-slabs; returns the number of fields `(member, time)`.

    Channels are called by their CF variable name, with the level on pressure levels (`t850`, `t2m`); when one name
    stands for several kinds of level the kind is added (`u_heightAboveGround10`). Missing points become NaN.

    Args:
        source: a file, or a folder of them.
        destination: the zarr store to write.
        channels: names to keep; all by default.
        slabs: pieces of a field along y.

    Raises:
        DataError: no file, no such channel, a channel absent at some time, or fields on several grids.
    """
    eccodes = require("eccodes", "reading GRIB files", "data")
    bar = require("tqdm", "a progress bar").tqdm
    files = find_files(source)
    headers = [
        _header(m, eccodes, f) for f, m in bar(_messages(files, eccodes), desc="index", unit="msg", disable=None)
    ]
    if not headers:
        raise DataError(f"{source} holds no GRIB message")
    names = _channel_names(headers)
    found = list(dict.fromkeys(names))
    wanted = tuple(found if channels is None else channels)
    if absent := [c for c in wanted if c not in found]:
        raise DataError(f"{source} has no channel {', '.join(absent)}; it has {', '.join(found)}")
    times = np.array(sorted({h.time for h, n in zip(headers, names, strict=True) if n in wanted}))
    members = sorted({h.member for h, n in zip(headers, names, strict=True) if n in wanted})
    _check_complete(source, headers, names, wanted, times, members)
    latitude, longitude = _coordinates(files, eccodes)
    units = {n: h.units for h, n in zip(headers, names, strict=True)}
    labels = tuple(map(str, members)) if len(members) > 1 else ()
    contents = Contents(times, wanted, headers[0].grid, latitude, longitude, labels, units=units)
    with GridWriter(destination, contents, {"source": [f.name for f in files]}, slabs) as writer:
        order = [(t, m) for t in times for m in members]
        progress = bar(total=len(order), initial=writer.done, unit="field", disable=None)
        with progress:
            for field in _fields(files, eccodes, headers, names, wanted, order, writer.done):
                writer.write(field)
                progress.update()
    return len(order)


def find_files(source: Path) -> list[Path]:
    """The GRIB files at a path: itself, or those directly in a folder, by name."""
    if source.is_file():
        return [source]
    found = sorted(p for p in source.iterdir() if p.suffix in SUFFIXES) if source.is_dir() else []
    if not found:
        raise DataError(f"{source} is no GRIB file and no folder of them ({', '.join(SUFFIXES)})")
    return found


@contextmanager
def _multi_fields(eccodes: Any) -> Iterator[None]:
    """GRIB 2 messages of several fields (u and v) are read as several; the switch is global, so it is turned back."""
    eccodes.codes_grib_multi_support_on()
    try:
        yield
    finally:
        eccodes.codes_grib_multi_support_off()


def _messages(files: Sequence[Path], eccodes: Any) -> Iterator[tuple[Path, Any]]:
    with _multi_fields(eccodes):
        for file in files:
            with file.open("rb") as stream:
                while True:
                    try:
                        message = eccodes.codes_grib_new_from_file(stream)
                    except eccodes.CodesInternalError as error:
                        raise DataError(f"{file} is damaged or not a GRIB file ({error}): copy it again") from error
                    if message is None:
                        break
                    try:
                        yield file, message
                    finally:
                        eccodes.codes_release(message)


def _header(message: Any, eccodes: Any, file: Path) -> Header:
    def get(key: str, kind: type | None = None, default: Any = None) -> Any:
        try:
            return eccodes.codes_get(message, key, kind)
        except eccodes.CodesInternalError as error:
            if default is None:
                raise DataError(f"{file}: a message has no {key} ({error})") from error
            return default

    short = get("shortName")
    name = get("cfVarName", default=short)
    name = short if name == "unknown" else name
    if get("jPointsAreConsecutive", int, 0):
        raise DataError(f"{file}: {name} is stored column by column; repack it row by row")
    date, clock = f"{get('validityDate', int):08d}", f"{get('validityTime', int):04d}"
    time = np.datetime64(f"{date[:4]}-{date[4:6]}-{date[6:]}T{clock[:2]}:{clock[2:]}", "s")
    grid = get("Nj", int), get("Ni", int)
    units = get("units", default="")
    return Header(name, get("typeOfLevel"), get("level", int, 0), time, get("number", int, 0), grid, units)


def _channel_names(headers: Sequence[Header]) -> list[str]:
    kinds: dict[str, set[tuple[str, int]]] = {}
    for h in headers:
        kinds.setdefault(_short_name(h), set()).add((h.kind, h.level))
    return [
        _short_name(h) if len(kinds[_short_name(h)]) == 1 else f"{_short_name(h)}_{h.kind}{h.level}" for h in headers
    ]


def _short_name(header: Header) -> str:
    return f"{header.name}{header.level}" if header.kind == "isobaricInhPa" else header.name


def _check_complete(
    source: Path,
    headers: Sequence[Header],
    names: Sequence[str],
    wanted: Sequence[str],
    times: np.ndarray,
    members: Sequence[int],
) -> None:
    kept = [(h, n) for h, n in zip(headers, names, strict=True) if n in wanted]
    grids = {h.grid: n for h, n in kept}
    if len(grids) > 1:
        told = ", ".join(f"{n} on {g[0]} x {g[1]}" for g, n in grids.items())
        raise DataError(f"{source} has fields on several grids: {told}; choose channels of one grid")
    have = Counter((n, h.time, h.member) for h, n in kept)
    for channel in wanted:
        for time in times:
            for member in members:
                count = have[channel, time, member]
                if count != 1:
                    what = "is missing" if count == 0 else f"is there {count} times"
                    raise DataError(
                        f"{source}: {channel} {what} at {time}, member {member}; choose channels that every time has "
                        "once, or convert times apart"
                    )


def _coordinates(files: Sequence[Path], eccodes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Degrees; per row and column on a regular grid, else per point."""
    messages = _messages(files, eccodes)
    _, message = next(messages)
    grid = eccodes.codes_get(message, "Nj", int), eccodes.codes_get(message, "Ni", int)
    latitude = eccodes.codes_get_array(message, "latitudes").reshape(grid)
    longitude = eccodes.codes_get_array(message, "longitudes").reshape(grid)
    regular = eccodes.codes_get(message, "gridType") in ("regular_ll", "regular_gg")
    messages.close()  # type: ignore[attr-defined]
    return (latitude[:, 0], longitude[0]) if regular else (latitude, longitude)


def _fields(
    files: Sequence[Path],
    eccodes: Any,
    headers: Sequence[Header],
    names: Sequence[str],
    wanted: Sequence[str],
    order: Sequence[tuple[np.datetime64, int]],
    done: int,
) -> Iterator[np.ndarray]:
    """Whole fields `(channel, y, x)` in order, from `done` on."""
    waiting: dict[tuple[np.datetime64, int], dict[str, np.ndarray]] = {}
    at = done
    skipped = set(order[:done])
    for header, name, (_, message) in zip(headers, names, _messages(files, eccodes), strict=True):
        key = header.time, header.member
        if name not in wanted or key in skipped:
            continue
        values = eccodes.codes_get_values(message).reshape(header.grid)
        if eccodes.codes_get(message, "bitmapPresent", int):
            values[values == eccodes.codes_get(message, "missingValue", float)] = np.nan
        waiting.setdefault(key, {})[name] = values.astype(np.float32)
        while at < len(order) and len(waiting.get(order[at], ())) == len(wanted):
            ready = waiting.pop(order[at])
            yield np.stack([ready[c] for c in wanted])
            at += 1
