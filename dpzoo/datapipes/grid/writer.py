"""Write `fields (time, channel, y, x)` as zarr 3: chunks are slabs of rows, one file (a zarr shard) holds one time.

A rank that reads its rows decodes the slabs that hold them and nothing else, and a store of a year has as many files as
times. Names of dims and coordinates are those that xarray reads.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.watched_zarr import MARKER, state_of

FIELDS = "fields"


@dataclass(frozen=True)
class Contents:
    """What a store will hold.

    Args:
        times: datetime64, ascending.
        channels: names.
        grid: rows and columns.
        latitude, longitude: degrees, `(y)` and `(x)`, or both `(y, x)`; None if unknown.
        members: ensemble labels; empty for none.
        static: fields `(y, x)` without a time.
        units: channel or field -> units.
        attributes: of the store.
    """

    times: np.ndarray
    channels: tuple[str, ...]
    grid: tuple[int, int]
    latitude: np.ndarray | None = None
    longitude: np.ndarray | None = None
    members: tuple[str, ...] = ()
    static: Mapping[str, np.ndarray] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def horizontal(self) -> tuple[str, str]:
        """Names of the grid's dims."""
        regular = self.latitude is not None and self.latitude.ndim == 1
        return ("latitude", "longitude") if regular else ("y", "x")


class GridWriter:
    """A store that is marked finished when the `with` block ends without an error.

    A store that the same settings began is continued: `done` says how many fields `(member, time)` it has.

    Args:
        path: the store.
        contents: what it will hold.
        settings: how it is made, kept in the marker; JSON values.
        slabs: pieces of a field along y; the number of ranks that read without waste.

    Raises:
        DataError: something else is at `path`, or it was made with other settings.
    """

    def __init__(self, path: Path, contents: Contents, settings: Mapping[str, Any], slabs: int = 8) -> None:
        self.path, self.contents, self.done = path, contents, 0
        self._settings = {**settings, "slabs": slabs, "channels": list(contents.channels), "times": self._span}
        zarr = require("zarr", "writing a .zarr store", "data")
        state = state_of(path)
        if state is not None and self._same(state) and (state["state"] == "finished" or state["done"] > 0):
            self.done = state["done"]
            self._group = zarr.open_group(path, mode="r+")
            return
        if state is not None and state.get("state") != "writing":
            made = f"it was made with {state}" if state else "it is no store of this converter"
            raise DataError(f"{path} exists and {made}: delete it or write elsewhere")
        if state is not None:
            shutil.rmtree(path)
        attributes = {**contents.attributes, MARKER: {"state": "writing", **self._settings, "done": 0}}
        self._group = zarr.create_group(path, zarr_format=3, attributes=attributes)
        self._create(slabs)

    @property
    def _span(self) -> list[str]:
        return [str(t) for t in (self.contents.times[0], self.contents.times[-1], len(self.contents.times))]

    @property
    def _count(self) -> int:
        return len(self.contents.times) * max(1, len(self.contents.members))

    @property
    def finished(self) -> bool:
        """All fields are there already."""
        return self.done == self._count

    def write(self, values: np.ndarray) -> None:
        """Write the next field `(channel, y, x)`: time by time, and of each time member by member."""
        if values.shape != (len(self.contents.channels), *self.contents.grid):
            raise DataError(f"{self.path}: a field of shape {values.shape}, expected {self._group[FIELDS].shape[-3:]}")
        members = max(1, len(self.contents.members))
        time, member = divmod(self.done, members)
        place = (member, time) if self.contents.members else (time,)
        self._group[FIELDS][place] = values.astype(np.float32, copy=False)
        self.done += 1
        if self.done % 16 == 0:
            self._mark("writing")

    def _same(self, state: Mapping[str, Any]) -> bool:
        return all(state.get(key) == value for key, value in self._settings.items())

    def _mark(self, state: str) -> None:
        self._group.attrs[MARKER] = {"state": state, **self._settings, "done": self.done}

    def _create(self, slabs: int) -> None:
        c = self.contents
        ny, nx = c.grid
        rows = slab_rows(ny, slabs)
        leading = (len(c.members), len(c.times)) if c.members else (len(c.times),)
        ones = (1,) * len(leading)
        beside = {"coordinates": "latitude longitude"} if c.horizontal[0] == "y" and c.latitude is not None else {}
        self._group.create_array(
            FIELDS,
            shape=(*leading, len(c.channels), ny, nx),
            dtype="float32",
            chunks=(*ones, len(c.channels), rows, nx),
            shards=(*ones, len(c.channels), -(-ny // rows) * rows, nx),
            fill_value=float("nan"),
            compressors=_compressor(),
            config={"write_empty_chunks": True},  # so that a chunk that is absent was never written
            dimension_names=(*(("number",) if c.members else ()), "time", "channel", *c.horizontal),
            attributes={"channels": list(c.channels), "units": [c.units.get(n, "") for n in c.channels], **beside},
        )
        self._coordinate("time", *encode_times(c.times))
        self._group.create_array(
            "channel", data=np.array(c.channels, dtype=np.dtypes.StringDType()), dimension_names=("channel",)
        )
        if c.members:
            self._coordinate("number", _numbers(c.members), {"long_name": "ensemble member"}, ("number",))
        for name, values, units in (
            ("latitude", c.latitude, "degrees_north"),
            ("longitude", c.longitude, "degrees_east"),
        ):
            if values is not None:
                dims = (name,) if values.ndim == 1 else c.horizontal
                self._coordinate(name, values, {"units": units, "standard_name": name}, dims)
        for name, values in c.static.items():
            self._slabbed(name, values, rows)

    def _coordinate(
        self, name: str, values: np.ndarray, attributes: Mapping[str, Any], dims: Sequence[str] = ("time",)
    ) -> None:
        chunks = (
            values.shape if values.ndim == 1 else (slab_rows(values.shape[0], self._settings["slabs"]), values.shape[1])
        )
        array = self._group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=chunks,
            dimension_names=tuple(dims),
            attributes=dict(attributes),
            config={"write_empty_chunks": True},
        )
        array[...] = values

    def _slabbed(self, name: str, values: np.ndarray, rows: int) -> None:
        array = self._group.create_array(
            name,
            shape=values.shape,
            dtype="float32",
            chunks=(rows, values.shape[1]),
            compressors=_compressor(),
            config={"write_empty_chunks": True},
            dimension_names=self.contents.horizontal,
            attributes={"units": self.contents.units[name]} if name in self.contents.units else {},
        )
        array[...] = values.astype(np.float32, copy=False)

    def __enter__(self) -> "GridWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.finished:
            self._mark("finished")
        elif self.done:
            self._mark("writing")


def slab_rows(rows: int, slabs: int) -> int:
    """Rows per slab: `rows / slabs`, rounded up to a multiple of 4 where a slab has more than 8 rows."""
    exact = -(-rows // max(1, slabs))
    return exact if exact <= 8 else min(rows, -(-exact // 4) * 4)


def encode_times(times: np.ndarray) -> tuple[np.ndarray, dict[str, str]]:
    """Whole seconds since 1970 as int64, and the CF attributes that say so."""
    return (
        times.astype("datetime64[s]").astype(np.int64),
        {"units": "seconds since 1970-01-01", "calendar": "proleptic_gregorian", "standard_name": "time"},
    )


def _numbers(members: Sequence[str]) -> np.ndarray:
    return np.array([int(m) for m in members] if all(m.lstrip("-").isdigit() for m in members) else range(len(members)))


def _compressor() -> Any:
    codecs = require("zarr.codecs", "writing a .zarr store", "data")
    return codecs.BloscCodec(cname="zstd", clevel=3, shuffle="shuffle")
