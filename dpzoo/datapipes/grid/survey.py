"""Find out what a store holds, from its metadata and coordinates."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.cf import decode_times
from dpzoo.datapipes.grid.source import GridSource, Variable, open_grid
from dpzoo.datapipes.grid.store import Channel, StoreInfo

DIM_NAMES = {
    "time": ("time", "valid_time", "t"),
    "member": ("number", "member", "realization", "ensemble"),
    "channel": ("channel", "channels", "variable", "band"),
    "level": (
        "level",
        "levels",
        "lev",
        "plev",
        "pressure",
        "pressure_level",
        "isobaricInhPa",
        "model_level_number",
        "height",
    ),
    "y": ("y", "lat", "latitude", "south_north", "projection_y_coordinate", "grid_latitude"),
    "x": ("x", "lon", "longitude", "west_east", "projection_x_coordinate", "grid_longitude"),
}
"""Role of a dim -> the names under which stores have it."""
PACKED = "value = reference + step * packed"
"""Group attribute `decoding` of stores that keep a field's 16-bit integers with a reference and a step per field."""
_ROLE_OF = {name: role for role, names in DIM_NAMES.items() for name in names}


def describe(path: Path, select: Mapping[str, int] | None = None) -> StoreInfo:
    """Read what a store holds; `select` fixes the index along dims that are not time, channel, level, y or x.

    Raises:
        DataError: the store is unreadable, holds no field, or its variables lie on several grids.
    """
    return _describe(path, tuple(sorted((select or {}).items())), _stamp(path))


def _stamp(path: Path) -> tuple[int, ...]:
    """Changes when a store is written again, so that nothing stale is remembered of it."""
    marks = [
        p for p in (path, path / "zarr.json", path / ".zgroup", path / ".zmetadata", path / ".zattrs") if p.exists()
    ]
    return tuple(mark.stat().st_mtime_ns for mark in marks)


@lru_cache(maxsize=256)
def _describe(path: Path, select: tuple[tuple[str, int], ...], stamp: tuple[int, ...]) -> StoreInfo:
    with closing(open_grid(path)) as source:
        return _Survey(source, dict(select)).info()


class _Survey:
    """One pass over the variables of a store."""

    def __init__(self, source: GridSource, select: Mapping[str, int]) -> None:
        self.source, self.select, self.path = source, select, source.path
        self.packed = source.attributes.get("decoding") == PACKED
        self.channels: dict[str, Channel] = {}
        self.unusable: dict[str, str] = {}
        self.grids: dict[tuple[int, int], str] = {}

    def info(self) -> StoreInfo:
        for name, variable in sorted(self.source.variables.items()):  # a folder lists its files in any order
            self._add(name, variable)
        if not self.channels:
            raise DataError(
                f"{self.path} holds no variable over a grid; a grid has dims such as "
                f"{DIM_NAMES['y'][:3]} and {DIM_NAMES['x'][:3]}; left out: {self.unusable or 'nothing'}"
            )
        if len(self.grids) > 1:
            raise DataError(
                f"{self.path} holds variables on different grids: "
                f"{', '.join(f'{name} on {ny} x {nx}' for (ny, nx), name in self.grids.items())}; part the store"
            )
        latitude, longitude = (self._coordinate(k) for k in (("latitude", "lat"), ("longitude", "lon")))
        axes = {n: self._values(n) for n in {latitude, longitude} if n and len(self.source.variables[n].dims) == 1}
        members, times = self._labels("member"), self._times()
        channels = {n: c for n, c in self.channels.items() if n not in (latitude, longitude)}
        if times is None and (times := self._instant()) is not None:
            channels = {n: replace(c, instant=True) for n, c in channels.items()}
        return StoreInfo(
            self.path,
            channels,
            times,
            members,
            next(iter(self.grids)),
            self._chunks(channels),
            latitude,
            longitude,
            axes,
            self.unusable,
            self.packed,
        )

    def _chunks(self, channels: Mapping[str, Channel]) -> tuple[tuple[int, int], ...]:
        found = set()
        for channel in channels.values():
            if (chunks := self.source.variables[channel.variable].chunks) is not None:
                found.add((chunks[channel.roles.index("y")], chunks[channel.roles.index("x")]))
        return tuple(sorted(found))

    def _add(self, name: str, variable: Variable) -> None:
        roles = self._roles(variable)
        if "y" not in roles or "x" not in roles:
            return
        if doubled := [r for r in set(roles) - {"fixed"} if roles.count(r) > 1]:
            self.unusable[name] = f"its dims {variable.dims} have the role {doubled[0]} twice"
            return
        if unknown := [f"{d} ({n})" for d, n, r in zip(variable.dims, variable.shape, roles, strict=True) if not r]:
            self.unusable[name] = f"dim {', '.join(unknown)} of {name} has no known role; choose one with select="
            return
        y, x = roles.index("y"), roles.index("x")
        self.grids.setdefault((variable.shape[y], variable.shape[x]), name)
        fixed = tuple(self.select.get(d, 0) if r == "fixed" else 0 for d, r in zip(variable.dims, roles, strict=True))
        for place, label in enumerate(self._names(name, variable, roles)):
            if label in self.channels:
                other = self.channels[label].variable
                self.unusable[label] = f"it is in {other} and in {name}"
            self.channels[label] = Channel(label, name, roles, place, fixed)
        for label in self.unusable:
            self.channels.pop(label, None)

    def _roles(self, variable: Variable) -> tuple[str, ...]:
        out = []
        for dim, size in zip(variable.dims, variable.shape, strict=True):
            role = _ROLE_OF.get(dim, "")
            if dim in self.select or (size == 1 and role not in ("time", "y", "x", "channel")):
                role = "fixed"
            out.append(role)
        return tuple(out)

    def _names(self, name: str, variable: Variable, roles: tuple[str, ...]) -> list[str]:
        if "channel" in roles:
            dim, size = variable.dims[roles.index("channel")], variable.shape[roles.index("channel")]
            given = self._values(dim).tolist() if dim in self.source.variables else self._told_channels(variable, size)
            return [item.decode() if isinstance(item, bytes) else str(item) for item in given]
        if "level" in roles:
            dim, size = variable.dims[roles.index("level")], variable.shape[roles.index("level")]
            levels = self._values(dim).tolist() if dim in self.source.variables else range(size)
            return [f"{name}{level:g}" for level in levels]
        return [name]

    def _told_channels(self, variable: Variable, size: int) -> list[str]:
        told = variable.attributes.get("channels", self.source.attributes.get("channels", list(range(size))))
        if len(told) != size:
            raise DataError(f"{self.path}: attribute channels names {len(told)} channels, the variable has {size}")
        return [str(item) for item in told]

    def _values(self, name: str) -> np.ndarray:
        return self.source.read(name, (slice(None),) * len(self.source.variables[name].dims))

    def _dims_in_use(self, role: str) -> list[str]:
        used = {
            self.source.variables[c.variable].dims[c.roles.index(role)]
            for c in self.channels.values()
            if role in c.roles
        }
        return sorted(used)

    def _times(self) -> np.ndarray | None:
        dims = self._dims_in_use("time")
        if not dims:
            return None
        if len(dims) > 1 or dims[0] not in self.source.variables:
            raise DataError(f"{self.path}: expected one time dim with a coordinate of its name, found dims {dims}")
        times = decode_times(
            self._values(dims[0]), self.source.variables[dims[0]].attributes, f"{self.path}: {dims[0]}"
        )
        if len(times) > 1 and not (np.diff(times) > np.timedelta64(0, "s")).all():
            bad = int(np.argmin(np.diff(times)))
            raise DataError(
                f"{self.path}: {dims[0]} is not ascending: {times[bad]} is followed by {times[bad + 1]}; sort the store"
            )
        return times

    def _instant(self) -> np.ndarray | None:
        """The time of a store that holds one, as files of satellites do."""
        for name in DIM_NAMES["time"]:
            variable = self.source.variables.get(name)
            if variable is not None and variable.shape in ((), (1,)):
                return decode_times(self._values(name).reshape(1), variable.attributes, f"{self.path}: {name}")
        return None

    def _labels(self, role: str) -> tuple[str, ...]:
        dims = self._dims_in_use(role)
        if not dims:
            return ()
        if len(dims) > 1:
            raise DataError(f"{self.path}: two ensemble dims {dims}; fix one of them with select=")
        if dims[0] in self.source.variables:
            return tuple(str(v) for v in self._values(dims[0]).tolist())
        channel = next(c for c in self.channels.values() if role in c.roles)
        return tuple(map(str, range(self.source.variables[channel.variable].shape[channel.roles.index(role)])))

    def _coordinate(self, names: tuple[str, ...]) -> str | None:
        """The variable of geographic latitude or longitude: by name, or by its standard name."""
        for name, variable in sorted(self.source.variables.items()):
            if name in names or variable.attributes.get("standard_name") == names[0]:
                return name
        return None


def units_of(path: Path, info: StoreInfo) -> dict[str, str]:
    """Channel -> units, where the store says them."""
    with closing(open_grid(path)) as source:
        told: Any = source.attributes.get("units")
        out = {}
        for name, channel in info.channels.items():
            units = source.variables[channel.variable].attributes.get("units", told)
            if isinstance(units, list) and channel.place < len(units):
                units = units[channel.place]
            if isinstance(units, str):
                out[name] = units
        return out
