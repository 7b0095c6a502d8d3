"""A car in a zarr store (version 2 or 3) with the array names of the PhysicsNeMo curator.

zarr hands out the fill value where a chunk is missing, so a store whose writer was stopped reads as zeros without an
error. The store is therefore wrapped: absent chunks are noticed, and bytes are counted as they leave the disk.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.points.source import FieldInfo

MARKER = "dpzoo_conversion"
"""Attribute of stores written by `dpzoo convert`: `{"state": "writing"}` until all is written, then `"finished"`."""
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


class ZarrSource:
    """A `PointSource` over one zarr group; see the module."""

    def __init__(self, path: Path) -> None:
        zarr = require("zarr", "reading a .zarr store")
        self.path = path
        self._store = _watching(zarr.storage.LocalStore(path, read_only=True))
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


def _watching(store: Any) -> Any:
    """`store`, counting the bytes of chunks and listing chunks that were asked for and are not there."""
    from zarr.storage import WrapperStore

    class WatchingStore(WrapperStore):  # a class of its own in here: zarr is imported only when it is used
        chunk_bytes = 0

        def __init__(self, store: Any) -> None:
            super().__init__(store)
            self.absent: list[str] = []

        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            return self._note(key, await self._store.get(key, prototype, byte_range))

        async def get_partial_values(self, prototype: Any, key_ranges: Iterable[Any]) -> Any:
            asked = list(key_ranges)
            found = await self._store.get_partial_values(prototype, asked)
            return [self._note(key, value) for (key, _), value in zip(asked, found, strict=True)]

        def _note(self, key: str, value: Any) -> Any:
            if key.rpartition("/")[2] in _METADATA:
                return value
            if value is None:
                self.absent.append(key)
            else:
                self.chunk_bytes += len(value)
            return value

    return WatchingStore(store)
