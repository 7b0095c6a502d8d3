"""What a store holds, whatever its layout: channels by name, times, members, one grid.

Three layouts are read alike:

* one variable per channel, `(time, y, x)`: the channel is called as the variable;
* `(time, channel, y, x)`: channels are called as the coordinate `channel` says;
* `(time, level, lat, lon)`: variable and level make the name, `temperature` at 850 becomes `temperature850`.

Rows are the dim `y`, columns the dim `x`, in whatever order the store has them. A dim `number` (or `member`) is an
ensemble. A variable without time is static: topography, a land mask.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError


@dataclass(frozen=True)
class Channel:
    """Where one channel is: its variable, the role of each dim, and the index along a channel or level dim.

    Attributes:
        roles: per dim of the variable "time", "member", "channel", "level", "y", "x", or "fixed" at `fixed`.
        place: index along the channel or level dim, 0 if there is none.
        fixed: index along dims that have one value or were selected.
        instant: the store is of one time, a number without a dim.
    """

    name: str
    variable: str
    roles: tuple[str, ...]
    place: int = 0
    fixed: tuple[int, ...] = ()
    instant: bool = False

    @property
    def static(self) -> bool:
        """Without a time."""
        return "time" not in self.roles and not self.instant


@dataclass(frozen=True)
class StoreInfo:
    """The contents of a store, from its metadata and coordinates; cheap to send to a process.

    Attributes:
        times: datetime64[s], strictly ascending; None without a time dim.
        members: labels along the ensemble dim; empty without one.
        grid: rows and columns.
        chunks: (rows, columns) of the chunks that channels lie in.
        latitude, longitude: names of the coordinates `(y)`, `(x)` or `(y, x)`.
        unusable: variable -> why it holds no channel.
        packed: fields are 16-bit integers with a reference and a step each (see `survey.PACKED`).
    """

    path: Path
    channels: Mapping[str, Channel]
    times: np.ndarray | None
    members: tuple[str, ...]
    grid: tuple[int, int]
    chunks: tuple[tuple[int, int], ...]
    latitude: str | None
    longitude: str | None
    axes: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)
    unusable: Mapping[str, str] = field(default_factory=dict)
    packed: bool = False

    def channel(self, name: str) -> Channel:
        """The channel of that name; raises `DataError` naming those that there are."""
        if name in self.channels:
            return self.channels[name]
        if name in self.unusable:
            raise DataError(f"{self.path}: no channel {name!r}: {self.unusable[name]}")
        raise DataError(f"{self.path} has no channel {name!r}; it has {_listed(self.channels)}")


def common_chunk(infos: tuple[StoreInfo, ...]) -> tuple[int, int]:
    """Chunk (rows, columns) on whose borders all stores can be cut: the least common multiple."""
    sizes = [chunk for info in infos for chunk in info.chunks]
    return math.lcm(1, *(c[0] for c in sizes)), math.lcm(1, *(c[1] for c in sizes))


def _listed(names: Mapping[str, Any], most: int = 30) -> str:
    shown = list(names)[:most]
    return ", ".join(shown) + (f", ... ({len(names)})" if len(names) > most else "")
