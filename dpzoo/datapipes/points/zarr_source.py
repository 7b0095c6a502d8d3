"""A car in a zarr store (version 2 or 3) with the array names of the PhysicsNeMo curator.

The store is watched: absent chunks, which zarr would read as fill values, are noticed, and bytes are counted.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.points.source import FieldInfo
from dpzoo.datapipes.watched_zarr import MARKER as MARKER
from dpzoo.datapipes.watched_zarr import watching


class ZarrSource:
    """A `PointSource` over one zarr group; see the module."""

    def __init__(self, path: Path) -> None:
        zarr = require("zarr", "reading a .zarr store")
        self.path = path
        self._store = watching(zarr.storage.LocalStore(path, read_only=True))
        try:
            self._group = zarr.open_group(self._store, mode="r")
        except Exception as error:
            raise DataError(f"{path} is not a readable zarr group ({error}); was its writing stopped?") from error
        state = self.attributes.get(MARKER, {}).get("state", "finished")
        if state != "finished":
            raise DataError(f"{path} is unfinished (its state is {state!r}): run the same `dpzoo convert` again")

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read so far, as they are stored."""
        return int(self._store.chunk_bytes)

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

    def close(self) -> None:
        """Close the store."""
        self._store.close()
