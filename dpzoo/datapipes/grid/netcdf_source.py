"""NetCDF 4 and HDF5 through h5py, classic NetCDF 3 through scipy; only the asked part leaves the disk."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.source import Variable, as_python
from dpzoo.datapipes.optional import require

_INTERNAL = ("DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME", "_Netcdf4Dimid", "_Netcdf4Coordinates")


class HDF5Grid:
    """A `GridSource` over the root group of an HDF5 file; h5py serialises all calls, so threads are safe."""

    def __init__(self, path: Path) -> None:
        h5py = require("h5py", "reading a NetCDF 4 or HDF5 file", "data")
        self.path, self.bytes_read = path, 0
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise DataError(f"{path} is not a complete HDF5 file ({error}): copy or write it again") from error
        self._datasets = {
            name: d for name, d in self._file.items() if isinstance(d, h5py.Dataset) and d.shape is not None
        }

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """All datasets at the root."""
        return {
            name: Variable(_dims(name, d), tuple(d.shape), d.dtype, d.chunks, _attributes(d.attrs))
            for name, d in self._datasets.items()
        }

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file."""
        return _attributes(self._file.attrs)

    def read(self, variable: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part that the slices name."""
        dataset = self._datasets[variable]
        self.bytes_read += _stored_bytes(dataset, index)
        return np.asarray(dataset[index])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ClassicGrid:
    """A `GridSource` over a NetCDF 3 file, mapped into memory and not loaded."""

    def __init__(self, path: Path) -> None:
        io = require("scipy.io", "reading a classic NetCDF file", "data")
        self.path, self.bytes_read = path, 0
        try:
            self._file = io.netcdf_file(path, "r", mmap=True)
        except (TypeError, ValueError, OSError, IndexError) as error:
            raise DataError(f"{path} is not a complete NetCDF 3 file ({error}): copy or write it again") from error

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """All variables."""
        return {
            name: Variable(
                tuple(v.dimensions), tuple(v.shape), v.data.dtype.newbyteorder("="), None, _attributes(v._attributes)
            )
            for name, v in self._file.variables.items()
        }

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the file."""
        return _attributes(self._file._attributes)

    def read(self, variable: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part that the slices name."""
        part = np.array(self._file.variables[variable].data[index])
        self.bytes_read += part.nbytes
        return part.astype(part.dtype.newbyteorder("="), copy=False)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _attributes(given: Any) -> dict[str, Any]:
    return {name: as_python(value) for name, value in given.items() if name not in _INTERNAL}


def _dims(name: str, dataset: Any) -> tuple[str, ...]:
    """Names of the dimension scales; a coordinate is its own dim."""
    if dataset.is_scale and dataset.ndim == 1:
        return (name,)
    out = []
    for number, dim in enumerate(dataset.dims):
        scale = dim[0].name.rpartition("/")[2] if len(dim) else ""
        out.append(scale or dim.label or (name if dataset.ndim == 1 else f"dim_{number}"))
    return tuple(out)


def _stored_bytes(dataset: Any, index: tuple[slice, ...]) -> int:
    """Bytes that HDF5 takes from disk: whole chunks as stored, or the elements of a plain layout."""
    spans = [s.indices(n)[:2] for s, n in zip(index, dataset.shape, strict=True)]
    if dataset.chunks is None or any(stop <= start for start, stop in spans):
        return int(np.prod([max(0, stop - start) for start, stop in spans], dtype=np.int64)) * dataset.dtype.itemsize
    starts = [range(lo // c * c, hi, c) for (lo, hi), c in zip(spans, dataset.chunks, strict=True)]
    corners = np.stack(np.meshgrid(*starts, indexing="ij"), -1).reshape(-1, dataset.ndim)
    return sum(dataset.id.get_chunk_info_by_coord(tuple(map(int, corner))).size for corner in corners)
