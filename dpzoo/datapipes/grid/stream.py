"""A stream: channels over time, from one or several stores that continue or complement each other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.store import Channel, StoreInfo
from dpzoo.datapipes.grid.survey import describe


@dataclass(frozen=True)
class Stream:
    """What one input (or target) of a model is read from.

    Args:
        stores: paths. Stores with the same channels are joined along time (one a year); stores with other channels add
            those (radar beside satellite), at the times that all of them have.
        channels: in this order; None for all: store by store, variables by name, channels and levels as stored.
        offsets: frames of a sample, in steps from its time: `(-2, -1, 0)` for three past ones, `(1,)` for the next.
        log1p: channels that become log(1 + x), before statistics and normalisation.
        masked: pixels without a value are allowed; the sample has a mask, and the pixels are 0 after normalisation.
            Without it such a pixel is an error.
        invalid_values: numbers that mean "no value", as stored (-99 and -999 in MRMS).
        absent_chunks: "fill" for stores whose writer leaves out chunks that hold only the fill value.
        select: index along dims that are not time, channel, level, y or x.
    """

    stores: tuple[Path, ...]
    channels: tuple[str, ...] | None = None
    offsets: tuple[int, ...] = (0,)
    log1p: tuple[str, ...] = ()
    masked: bool = False
    invalid_values: tuple[float, ...] = ()
    absent_chunks: Literal["error", "fill"] = "error"
    select: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.stores or not self.offsets:
            raise DataError(f"a stream of {len(self.stores)} stores and {len(self.offsets)} frames holds nothing")


@dataclass(frozen=True)
class StoreRead:
    """What to read from one store: these channels, which fill `positions`, at `times`, which fill `frames`."""

    path: Path
    channels: tuple[Channel, ...]
    positions: tuple[int, ...]
    times: tuple[int, ...]
    frames: tuple[int, ...]


class Timeline:
    """The stores of a stream, surveyed: which store has which channel at which time.

    Raises:
        DataError: a channel is in no store, stores disagree on the grid, two have the same channel at the same time.
    """

    def __init__(self, name: str, stream: Stream) -> None:
        self.name, self.stream = name, stream
        self.infos = tuple(describe(Path(path), stream.select) for path in stream.stores)
        self._check_grids()
        timed = [{n: c for n, c in info.channels.items() if not c.static} for info in self.infos]
        found = list(dict.fromkeys(n for channels in timed for n in channels))
        if stream.channels is None and (unclear := [n for info in self.infos for n in info.unusable]):
            self.infos[0].channel(unclear[0])
        self.channels = tuple(found) if stream.channels is None else tuple(stream.channels)
        if twice := sorted({n for n in self.channels if self.channels.count(n) > 1}):
            raise DataError(f"stream {name!r} wants {', '.join(twice)} twice")
        for channel in self.channels:
            if channel not in found:
                self._missing(channel)
        if not self.channels:
            raise DataError(f"{self.infos[0].path} holds no channel with a time")
        if absent := [n for n in stream.log1p if n not in self.channels]:
            raise DataError(f"stream {name!r}: log1p names {', '.join(absent)}, which is not among its channels")
        self.owners = {c: tuple(i for i, t in enumerate(timed) if c in t) for c in self.channels}
        self._tables = {stores: self._table(stores) for stores in set(self.owners.values())}

    def _missing(self, channel: str) -> None:
        for info in self.infos:
            if channel in info.unusable:
                info.channel(channel)
        static = [info for info in self.infos if channel in info.channels]
        hint = f"{static[0].path} has it without a time: read it as an invariant" if static else ""
        have = ", ".join(dict.fromkeys(n for info in self.infos for n in info.channels if not info.channels[n].static))
        where = ", ".join(str(info.path) for info in self.infos)
        raise DataError(
            f"{where}: no variable {channel!r} for stream {self.name!r} at any time; {hint or 'has ' + have}"
        )

    def _check_grids(self) -> None:
        first = self.infos[0]
        for info in self.infos[1:]:
            check_same_grid(first, info)
            if info.members and first.members and info.members != first.members:
                raise DataError(f"{first.path} has members {first.members}, {info.path} {info.members}")

    def _table(self, stores: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(time, store, index in the store) of all times of these stores, ascending."""
        parts = [(i, self.infos[i].times) for i in stores]
        times = np.concatenate([t for _, t in parts if t is not None])
        owner = np.concatenate([np.full(len(t), i) for i, t in parts if t is not None])
        index = np.concatenate([np.arange(len(t)) for _, t in parts if t is not None])
        order = np.argsort(times, kind="stable")
        times, owner, index = times[order], owner[order], index[order]
        if len(again := np.flatnonzero(times[1:] == times[:-1])):
            a, b = (self.infos[owner[again[0] + k]].path for k in (0, 1))
            channel = next(c for c, s in self.owners.items() if s == stores)
            raise DataError(f"{a} and {b} both have {channel} at {times[again[0]]}: leave one of them out")
        return times, owner, index

    @cached_property
    def times(self) -> np.ndarray:
        """Times at which every channel is there."""
        out: np.ndarray | None = None
        for times, _, _ in self._tables.values():
            out = times if out is None else np.intersect1d(out, times)
        return np.empty(0, "datetime64[s]") if out is None else out

    @property
    def members(self) -> tuple[str, ...]:
        """Ensemble members; empty without."""
        return next((info.members for info in self.infos if info.members), ())

    def find_gap(self, missing: np.ndarray, first: np.datetime64, last: np.datetime64) -> str | None:
        """The first time between `first` and `last` that a channel lacks, in words; times in `missing` may lack."""
        for stores, (times, owner, _) in self._tables.items():
            channel = next(c for c, s in self.owners.items() if s == stores)
            step = usual_step(times)
            if step is None:
                continue
            inside = times[(times >= first) & (times <= last)]
            if not len(inside):
                continue
            lacking = np.setdiff1d(np.setdiff1d(np.arange(inside[0], inside[-1] + step, step), inside), missing)
            if len(lacking):
                before = owner[np.searchsorted(times, lacking[0]) - 1]
                more = f" (and {len(lacking) - 1} more times)" if len(lacking) > 1 else ""
                return (
                    f"{self.infos[before].path}: {channel} has no time {lacking[0]}{more}, although there is one every "
                    f"{step.astype(object)}"
                )
        return None

    def reads(self, frames: np.ndarray) -> tuple[StoreRead, ...]:
        """What to read, from which store, for the given times of the frames; all of them must be there."""
        plan: dict[tuple[int, tuple[int, ...]], tuple[list[int], list[int]]] = {}
        for stores, (times, owner, index) in self._tables.items():
            at = np.searchsorted(times, frames)
            for frame, place in enumerate(at):
                where = plan.setdefault((int(owner[place]), stores), ([], []))
                where[0].append(int(index[place]))
                where[1].append(frame)
        out = []
        for (store, stores), (indices, at_frames) in plan.items():
            positions = tuple(p for p, c in enumerate(self.channels) if self.owners[c] == stores)
            info = self.infos[store]
            channels = tuple(info.channels[self.channels[p]] for p in positions)
            out.append(StoreRead(info.path, channels, positions, tuple(indices), tuple(at_frames)))
        return tuple(out)


def usual_step(times: np.ndarray) -> np.timedelta64 | None:
    """The most common distance of neighbouring times, the shortest of those; None for fewer than two times."""
    if len(times) < 2:
        return None
    steps, counts = np.unique(np.diff(times), return_counts=True)
    found: np.timedelta64 = steps[np.argmax(counts)]
    return found


def check_same_grid(first: StoreInfo, other: StoreInfo) -> None:
    """Raise `DataError` unless two stores have the same rows and columns and, where they say them, coordinates."""
    if first.grid != other.grid:
        a, b = next(iter(first.channels)), next(iter(other.channels))
        raise DataError(
            f"{first.path} ({a}) has a grid of {first.grid[0]} x {first.grid[1]}, {other.path} ({b}) one of "
            f"{other.grid[0]} x {other.grid[1]}: bring them to one grid first"
        )
    for mine, others in ((first.latitude, other.latitude), (first.longitude, other.longitude)):
        if mine in first.axes and others in other.axes:
            a_values, b_values = first.axes[mine or ""], other.axes[others or ""]
            if not np.allclose(a_values, b_values, atol=1e-4):
                row = int(np.argmax(np.abs(a_values - b_values)))
                raise DataError(
                    f"{first.path} and {other.path} lie on different grids: {mine} number {row} is {a_values[row]} in "
                    f"the first and {b_values[row]} in the second"
                )
