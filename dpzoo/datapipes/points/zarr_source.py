"""A car in a zarr store (version 2 or 3) with the array names of the PhysicsNeMo curator.

The store is watched: absent chunks, which zarr would read as fill values, are noticed, and bytes are counted.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.points.source import FieldInfo
from dpzoo.datapipes.watched_zarr import MARKER as MARKER
from dpzoo.datapipes.watched_zarr import WatchedGroup


class ZarrSource(WatchedGroup):
    """A `PointSource` over one zarr group; see the module."""

    extra = "points"
    write_again = "run the same `dpzoo convert` again"

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """All arrays of the group."""
        return {name: FieldInfo(a.shape[0], tuple(a.shape[1:]), a.dtype) for name, a in self._group.arrays() if a.shape}

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the group, and its arrays without dims."""
        scalars = {name: a[()].item() for name, a in self._group.arrays() if not a.shape}
        return {**scalars, **dict(self._group.attrs)}

    def read(self, field: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)`; chunks that hold other rows only are not touched."""
        rows = np.asarray(self._group[field][start:stop])
        if self._store.absent:
            raise DataError(
                f"{self.path}: chunk {self._store.absent[0]} is missing, zarr would read fill values: the store is "
                "unfinished or damaged, write it again (a writer that leaves out chunks of zeros must be told "
                "write_empty_chunks=True)"
            )
        return rows
