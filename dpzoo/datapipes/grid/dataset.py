"""What a sample of gridded data consists of, and the part of it that one rank reads."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.cut import aligned_sizes
from dpzoo.datapipes.grid.read import Box
from dpzoo.datapipes.grid.statistics_table import GridStatistics
from dpzoo.datapipes.grid.store import StoreInfo, common_chunk
from dpzoo.datapipes.grid.stream import StoreRead, Stream, Timeline, check_same_grid, usual_step
from dpzoo.datapipes.grid.survey import describe

INVARIANTS = "invariants"
COS_ZENITH = "cos_zenith"


@dataclass(frozen=True)
class Invariants:
    """Fields without a time, read once.

    Args:
        stores: paths; a field is taken from the first store that has it.
        fields: names, in order; "latitude" and "longitude" (degrees) are made 2-D where the store has them per row and
            column.
    """

    stores: tuple[Path, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True)
class GridDataset:
    """Samples over time: each stream gives its frames around the sample's time.

    Holds paths and numbers only; nothing is opened before `index` is asked for.

    Args:
        streams: name -> `Stream`, for example `{"past": ..., "next": ...}`; all lie on one grid.
        step: length of one step of `offsets`; the usual step of the first stream by default.
        invariants: topography, land mask, coordinates.
        cos_zenith: frames for which the sun's height is a field of its own, as offsets; empty for none.
        statistics: `GridStatistics` to normalise with, by stream; streams that it does not name stay as they are.
        start, stop: times of the samples, from `start` to before `stop`.
        missing: times known to be missing or bad: no sample uses them.
        gaps: "error" when a time is neither there nor in `missing`, "skip" to leave out the samples that need it.
        crop: rows `[top, bottom)` and columns `[left, right)` in use.
        seed: of the order of samples.
    """

    streams: Mapping[str, Stream]
    step: np.timedelta64 | None = None
    invariants: Invariants | None = None
    cos_zenith: tuple[int, ...] = ()
    statistics: GridStatistics | None = None
    start: np.datetime64 | None = None
    stop: np.datetime64 | None = None
    missing: tuple[np.datetime64, ...] = ()
    gaps: Literal["error", "skip"] = "error"
    crop: tuple[int, int, int, int] | None = None
    seed: int = 0

    @cached_property
    def index(self) -> "GridIndex":
        """The survey of all stores.

        Raises:
            DataError: naming store, variable and time: a missing channel, a gap, stores that do not fit together,
                statistics of other channels.
        """
        return GridIndex(self)

    def __len__(self) -> int:
        return len(self.index)


@dataclass(frozen=True)
class StreamRequest:
    """One stream of one rank's part of a sample."""

    reads: tuple[StoreRead, ...]
    frames: int
    channels: tuple[str, ...]
    log1p: tuple[int, ...]
    masked: bool
    invalid_values: tuple[float, ...]
    absent_chunks: str
    mean: np.ndarray | None = None
    std: np.ndarray | None = None


@dataclass(frozen=True)
class GridRequest:
    """One rank's part of one sample: all that a worker, in whatever process, has to know."""

    time: np.datetime64
    member: int
    streams: Mapping[str, StreamRequest]
    box: Box
    sun: tuple[np.datetime64, ...] = ()
    coordinates: StoreInfo | None = None


@dataclass
class GridPart:
    """What a worker gives back: plain arrays of this rank's block."""

    time: np.datetime64
    member: int
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Stream -> `(frame, channel, row, column)` float32; masks are under the stream's name + "/mask"."""
    bytes_read: int = 0


class GridIndex:
    """The samples of a dataset and the grid they lie on.

    Attributes:
        times: datetime64[s] of the samples of one member.
        members: labels; one empty label without an ensemble.
        grid: rows and columns in use.
    """

    def __init__(self, dataset: GridDataset) -> None:
        if not dataset.streams:
            raise DataError("a dataset without a stream holds nothing")
        self.dataset = dataset
        self.timelines = {name: Timeline(name, stream) for name, stream in dataset.streams.items()}
        self.infos = tuple(info for line in self.timelines.values() for info in line.infos)
        self.static_infos = tuple(describe(Path(p)) for p in dataset.invariants.stores) if dataset.invariants else ()
        for info in (*self.infos[1:], *self.static_infos):
            check_same_grid(self.infos[0], info)
        self.window = self._window()
        self.grid = self.window.shape
        self.step = self._step()
        self.members = self._members()
        self.times = self._times()
        self.tables = self._tables()
        self.coordinates = self._coordinates()

    def __len__(self) -> int:
        return len(self.times) * len(self.members)

    @property
    def digest(self) -> int:
        """Equal on ranks that see the same samples."""
        lines = [(n, t.channels, t.stream.offsets) for n, t in self.timelines.items()]
        return zlib.crc32(repr((lines, self.members, self.window)).encode() + self.times.tobytes())

    def sizes(self, dim: Literal["y", "x"], ranks: int, multiple: int) -> tuple[int, ...]:
        """Rows or columns per rank; see `aligned_sizes`."""
        which = 0 if dim == "y" else 1
        chunk = common_chunk(self.infos)[which]
        try:
            return aligned_sizes(self.grid[which], ranks, multiple, chunk, (self.window.top, self.window.left)[which])
        except DataError as error:
            raise DataError(f"{self.infos[0].path}, dim {dim}: {error}") from error

    def request(self, number: int, box: Box) -> GridRequest:
        """The block `box` of the grid in use, of sample `number`."""
        member, place = divmod(number, len(self.times))
        time = self.times[place]
        streams = {name: self.stream_request(name, time) for name in self.timelines}
        sun = tuple(time + offset * self.step for offset in self.dataset.cos_zenith)
        return GridRequest(time, member, streams, self.in_store(box), sun, self.coordinates if sun else None)

    def stream_request(self, name: str, time: np.datetime64) -> StreamRequest:
        """One stream at its offsets from `time`, normalised."""
        offsets = self.timelines[name].stream.offsets
        request = self._raw_request(name, np.array([time + offset * self.step for offset in offsets]))
        mean, std = self.tables.get(name, (None, None))
        return replace(request, mean=mean, std=std)

    def frame_request(self, name: str, time: np.datetime64) -> StreamRequest:
        """One frame of a stream, not normalised."""
        return self._raw_request(name, np.array([time]))

    def _raw_request(self, name: str, frames: np.ndarray) -> StreamRequest:
        line = self.timelines[name]
        stream = line.stream
        return StreamRequest(
            line.reads(frames),
            len(frames),
            line.channels,
            tuple(line.channels.index(c) for c in stream.log1p),
            stream.masked,
            stream.invalid_values,
            stream.absent_chunks,
        )

    def in_store(self, box: Box) -> Box:
        """A block of the grid in use as rows and columns of the stores."""
        top, left = self.window.top, self.window.left
        return Box(box.top + top, box.bottom + top, box.left + left, box.right + left)

    def _window(self) -> Box:
        ny, nx = self.infos[0].grid
        box = Box(*(self.dataset.crop or (0, ny, 0, nx)))
        if not (0 <= box.top < box.bottom <= ny and 0 <= box.left < box.right <= nx):
            raise DataError(f"{self.infos[0].path}: crop {tuple(box)} is not a part of its grid of {ny} x {nx}")
        return box

    def _step(self) -> np.timedelta64:
        if self.dataset.step is not None:
            return self.dataset.step.astype("timedelta64[s]")
        first = next(iter(self.timelines.values()))
        step = usual_step(first.times)
        if step is None and any(offset for line in self.timelines.values() for offset in line.stream.offsets):
            raise DataError(f"{first.infos[0].path} has {len(first.times)} times: say what one step is with step=")
        return step if step is not None else np.timedelta64(0, "s")

    def _members(self) -> tuple[str, ...]:
        found = {name: line.members for name, line in self.timelines.items() if line.members}
        if len(set(found.values())) > 1:
            raise DataError(f"streams disagree on the ensemble members: {found}")
        return next(iter(found.values()), ("",))

    def _times(self) -> np.ndarray:
        missing = np.array(self.dataset.missing, "datetime64[s]")
        usable: np.ndarray | None = None
        for line in self.timelines.values():
            have = np.setdiff1d(line.times, missing)
            for offset in line.stream.offsets:
                anchors = have - offset * self.step
                usable = anchors if usable is None else np.intersect1d(usable, anchors)
        assert usable is not None
        if self.dataset.start is not None:
            usable = usable[usable >= self.dataset.start.astype("datetime64[s]")]
        if self.dataset.stop is not None:
            usable = usable[usable < self.dataset.stop.astype("datetime64[s]")]
        if self.dataset.gaps == "error":
            self._check_gaps(missing)
        if not len(usable):
            spans = {n: f"{line.times[0]} to {line.times[-1]}" if len(line.times) else "no common time"
                     for n, line in self.timelines.items()}  # fmt: skip
            raise DataError(f"no time has all frames at steps of {self.step.astype(object)}; streams cover {spans}")
        return usable

    def _check_gaps(self, missing: np.ndarray) -> None:
        for line in self.timelines.values():
            reach = [offset * self.step for offset in line.stream.offsets]
            edges = line.times if len(line.times) else np.array([0], "datetime64[s]")
            first = edges[0] if self.dataset.start is None else self.dataset.start.astype("datetime64[s]") + min(reach)
            last = edges[-1] if self.dataset.stop is None else self.dataset.stop.astype("datetime64[s]") + max(reach)
            if (gap := line.find_gap(missing, first, last)) is not None:
                raise DataError(
                    f'{gap}: list it in missing=, or pass gaps="skip" to leave out the samples that need it'
                )

    def _tables(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Mean and standard deviation, `(channel, 1, 1)` in float32, of the streams that are normalised."""
        given = self.dataset.statistics
        if given is None:
            return {}
        channels = {name: line.channels for name, line in self.timelines.items()}
        if self.dataset.invariants is not None:
            channels[INVARIANTS] = self.dataset.invariants.fields
        where = {name: str(line.infos[0].path) for name, line in self.timelines.items()}
        return {
            name: given.table(name, channels[name], where.get(name, INVARIANTS))
            for name in channels
            if name in given.streams
        }

    def _coordinates(self) -> StoreInfo | None:
        wanted = set(self.dataset.invariants.fields if self.dataset.invariants else ()) & {"latitude", "longitude"}
        for info in (*self.static_infos, *self.infos):
            if info.latitude is not None and info.longitude is not None:
                return info
        if wanted or self.dataset.cos_zenith:
            raise DataError(
                f"{self.infos[0].path}: no latitude and longitude for {', '.join(sorted(wanted)) or COS_ZENITH}; add "
                "them to the store, or name one that has them under invariants"
            )
        return None


def sample_title(index: GridIndex, number: int) -> str:
    """What a sample is, for messages and figures: its time, and its member if there is an ensemble."""
    member, place = divmod(number, len(index.times))
    label: Any = index.members[member]
    return f"{index.times[place]}" + (f", member {label}" if label else "")
