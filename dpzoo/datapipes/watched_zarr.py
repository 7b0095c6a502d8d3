"""A zarr store that counts the bytes it hands out and notices absent chunks, and the marker of finished conversions.

zarr hands out the fill value where a chunk is missing, so a store whose writer was stopped reads as zeros without an
error. Readers therefore wrap their stores, and writers leave a marker that says when a store is whole.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require

MARKER = "dpzoo_conversion"
"""Attribute of stores written by `dpzoo convert`: `{"state": "writing"}` until all is written, then `"finished"`."""
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


def state_of(path: Path) -> dict[str, Any] | None:
    """The marker of a store (`state`: "writing" or "finished"), `{}` for anything else, None when nothing is there."""
    if not path.exists():
        return None
    if path.is_dir() and not any(path.iterdir()):
        return {"state": "writing"}
    zarr = require("zarr", "writing a .zarr store")
    try:
        return dict(zarr.open_group(path, mode="r").attrs.get(MARKER, {}))
    except Exception:  # not ours, or damaged: nothing that may be deleted unasked
        return {}


def watching(store: Any) -> Any:
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


class WatchedGroup:
    """A zarr group opened for reading, if it is whole.

    Raises:
        DataError: it cannot be read, or its writing has not finished.
    """

    extra: ClassVar[str]
    """The extra of dpzoo that brings zarr, for this use of it."""
    write_again: ClassVar[str]
    """What to do about an unfinished store."""

    def __init__(self, path: Path) -> None:
        zarr = require("zarr", "reading a .zarr store", self.extra)
        self.path = path
        self._store = watching(zarr.storage.LocalStore(path, read_only=True))
        try:
            self._group = zarr.open_group(self._store, mode="r")
        except Exception as error:
            raise DataError(f"{path} is not a readable zarr group ({error}); was its writing stopped?") from error
        state = self.attributes.get(MARKER, {}).get("state", "finished")
        if state != "finished":
            raise DataError(f"{path} is unfinished (its state is {state!r}): {self.write_again}")

    @property
    def bytes_read(self) -> int:
        """Bytes of chunks read so far, as they are stored."""
        return int(self._store.chunk_bytes)

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the group."""
        return dict(self._group.attrs)

    def close(self) -> None:
        """Close the store."""
        self._store.close()
