"""A car in an HDF5 file: one dataset per field. h5py serialises all calls, so threads are safe and do not add speed."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.points.source import FieldInfo


class HDF5Source:
    """A `PointSource` over the datasets at the root of one HDF5 file."""

    def __init__(self, path: Path) -> None:
        self._h5py = require("h5py", "reading an HDF5 file")
        self.path, self.bytes_read = path, 0
        try:
            self._file = self._h5py.File(path, "r")
        except OSError as error:
            raise DataError(f"{path} is not a complete HDF5 file ({error}): copy or write it again") from error

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """All datasets with dims."""
        found = {name: item for name, item in self._file.items() if isinstance(item, self._h5py.Dataset) and item.shape}
        return {name: FieldInfo(d.shape[0], tuple(d.shape[1:]), d.dtype) for name, d in found.items()}

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file as Python values."""
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in self._file.attrs.items()}

    def read(self, field: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)`."""
        dataset = self._file[field]
        self.bytes_read += _stored_bytes(dataset, start, stop)
        return np.asarray(dataset[start:stop])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _stored_bytes(dataset: Any, start: int, stop: int) -> int:
    """Bytes that HDF5 takes from disk for these rows: whole chunks as stored, or the rows of a plain layout."""
    row = int(np.prod(dataset.shape[1:], dtype=np.int64)) * dataset.dtype.itemsize
    if dataset.chunks is None or stop <= start:
        return max(0, stop - start) * row
    chunk = dataset.chunks[0]
    rest = [range(0, n, c) for n, c in zip(dataset.shape[1:], dataset.chunks[1:], strict=True)]
    corners = np.stack(np.meshgrid(range(start // chunk * chunk, stop, chunk), *rest, indexing="ij"), -1)
    return sum(dataset.id.get_chunk_info_by_coord(tuple(map(int, c))).size for c in corners.reshape(-1, dataset.ndim))
