"""Write one car as a zarr v3 store in the curator layout, in blocks, with a marker that says when it is whole."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.watched_zarr import MARKER
from dpzoo.datapipes.watched_zarr import state_of as state_of

CHUNKS_PER_FILE = 16


class ZarrWriter:
    """A store that is marked finished when the `with` block ends without an error.

    Args:
        path: the store; an unfinished one is replaced.
        attributes: kept with the store.
        settings: how it was made, kept in the marker.
        chunk_rows: rows per chunk, the unit that a rank reads; 16 chunks share a file.

    Raises:
        DataError: something else is at `path`.
    """

    def __init__(
        self, path: Path, attributes: Mapping[str, Any], settings: Mapping[str, Any], chunk_rows: int = 1 << 16
    ) -> None:
        self.path, self.settings, self.chunk_rows = path, dict(settings), chunk_rows
        state = state_of(path)
        if state is not None and state.get("state") != "writing":
            raise DataError(f"{path} exists and is no unfinished store of this converter: delete it or write elsewhere")
        if state is not None:
            shutil.rmtree(path)
        zarr = require("zarr", "writing a .zarr store")
        marker = {MARKER: {"state": "writing", **self.settings}}
        self._group = zarr.create_group(path, zarr_format=3, attributes={**attributes, **marker})

    def write(
        self, name: str, data: np.ndarray, order: np.ndarray | None = None, on_rows: Callable[[int], Any] | None = None
    ) -> None:
        """Write an array, its rows in the given order; `on_rows` hears of each block.

        Raises:
            DataError: a value is not finite.
        """
        rows = len(data)
        chunk = max(1, min(self.chunk_rows, rows))
        block = chunk * min(CHUNKS_PER_FILE, max(1, -(-rows // chunk)))
        array = self._group.create_array(
            name,
            shape=data.shape,
            dtype=data.dtype,
            chunks=(chunk, *data.shape[1:]),
            shards=(block, *data.shape[1:]),
            compressors=_compressor(),
            config={"write_empty_chunks": True},  # so that a chunk that is absent was never written
        )
        for start in range(0, rows, block):
            part = data[start : start + block] if order is None else data[order[start : start + block]]
            if part.dtype.kind == "f" and not np.isfinite(part).all():
                bad = int(np.argwhere(~np.isfinite(part))[0, 0]) + start
                found = bad if order is None else int(order[bad])
                raise DataError(f"{name} has a value that is not finite, in cell {found}")
            array[start : start + len(part)] = part
            if on_rows is not None:
                on_rows(len(part))

    def annotate(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes."""
        self._group.attrs.update(attributes)

    def __enter__(self) -> "ZarrWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._group.attrs[MARKER] = {"state": "finished", **self.settings}


def _compressor() -> Any:
    codecs = require("zarr.codecs", "writing a .zarr store")
    return codecs.BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
