"""The demo's samples: the state of the atmosphere, and its change over the next twelve hours.

A rank opens the store with the rows of the grid that it owns and never reads the others: the shard of a sample is read
from disk as a shard, no rank holds the whole sample.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpzoo.demo.optional import require

STORE = Path(__file__).parent / "data" / "era5_members.zarr"
GRID = (60, 120)
"""Rows and columns of the grid in use: the store's 61 rows without the south pole, so that patches of 4 rows fit."""


def patch_row_split(ranks: int, patch: int, rows: int = GRID[0]) -> list[int]:
    """Grid rows per rank: whole patch rows, cut as `torch.chunk` cuts (15 patch rows on 2 ranks are 8 + 7)."""
    patch_rows = rows // patch
    if rows % patch or not 1 <= ranks <= patch_rows:
        raise ValueError(
            f"cannot cut {rows} grid rows in patches of {patch} rows over {ranks} ranks: use a patch size that divides "
            f"{rows} and between 1 and {patch_rows} ranks."
        )
    most = -(-patch_rows // ranks)
    return [patch * max(0, min(most, patch_rows - rank * most)) for rank in range(ranks)]


@dataclass(frozen=True)
class Statistics:
    """Per channel, `(channel, 1, 1)`: mean and standard deviation of the state, standard deviation of the change."""

    mean: torch.Tensor
    std: torch.Tensor
    change_std: torch.Tensor


def open_store(path: Path = STORE) -> Any:
    """Open the zarr group of the demo, for reading; says what to install when zarr is missing."""
    return require("zarr").open_group(path, mode="r")


class ForecastPairs:
    """Pairs (state, change over the next 12 hours) of some ensemble members, on the grid rows `[start, stop)`.

    Item i is `(state, change)`, both `(1, 4, stop - start, 120)` in float32, normalised per channel; a batch of one, as
    domain parallelism prescribes. A change of zero is the forecast "it stays as it is" (persistence).
    """

    def __init__(self, members: list[int], start: int = 0, stop: int = GRID[0], path: Path = STORE) -> None:
        if not 0 <= start <= stop <= GRID[0]:
            raise ValueError(f"rows [{start}, {stop}) are not part of the grid, which has rows [0, {GRID[0]}).")
        self.rows = slice(start, stop)
        self.members = members
        self._store = open_store(path)
        self._packed, times = self._store["packed"], self._store["time"].shape[0]
        self._reference, self._step = self._store["reference"][...], self._store["step"][...]
        self._pairs = [(member, time) for member in members for time in range(times - 1)]
        table = self._store.attrs["statistics"]
        self.statistics = Statistics(
            *(torch.tensor(table[key])[:, None, None] for key in ("mean", "std", "change_std"))
        )
        self.channels: list[str] = self._store.attrs["channels"]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        member, time = self._pairs[index]
        now, later = self.fields(member, time), self.fields(member, time + 1)
        s = self.statistics
        return ((now - s.mean) / s.std)[None], ((later - now) / s.change_std)[None]

    def fields(self, member: int, time: int) -> torch.Tensor:
        """The physical fields `(channel, row, column)` of one member and time, float32; reads these rows only."""
        packed = self._packed[member, time, :, self.rows].astype(np.float64)
        scale = (member, time, slice(None), None, None)
        return torch.from_numpy((self._reference[scale] + self._step[scale] * packed).astype(np.float32))

    def label(self, index: int) -> str:
        """What sample `index` is, for a title: member, valid time."""
        member, time = self._pairs[index]
        valid = np.datetime64(int(self._store["time"][time + 1]), "h")
        return f"member {self._store['number'][member]}, valid {str(valid).replace('T', ' ')} UTC"

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """Latitudes of these rows and all longitudes, in degrees."""
        return self._store["latitude"][self.rows], self._store["longitude"][...]
