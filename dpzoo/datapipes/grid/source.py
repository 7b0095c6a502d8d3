"""One small protocol for gridded files: variables with named dims, and `read(variable, slices)`.

A source is opened for one read and closed again, in the thread or process that reads: nothing is shared between
workers, so no format has to be safe to fork.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpzoo.datapipes.errors import DataError

HDF5_SUFFIXES = (".nc", ".nc4", ".h5", ".hdf5", ".netcdf")


class Variable(NamedTuple):
    """One array: dim names, shape, element type, chunk shape (None: in one piece) and attributes as Python values."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None
    attributes: Mapping[str, Any]


class GridSource(Protocol):
    """A store of gridded variables on disk."""

    path: Path

    @property
    def bytes_read(self) -> int:
        """Bytes of data taken from the file so far, whole chunks as they are stored."""

    @property
    def variables(self) -> Mapping[str, Variable]:
        """All arrays, those without dims too, from metadata alone."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attributes of the store."""

    def read(self, variable: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part of a variable that the slices (one per dim, step 1) name, as stored: nothing is decoded."""

    def close(self) -> None:
        """Let go of the file."""


def kind_of(path: Path) -> str:
    """`"zarr"`, `"hdf5"`, `"netcdf3"` or `"npy"`, by the name of the file, and for NetCDF its first bytes.

    Raises:
        DataError: the path is not there or is none of these.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir() and (path.suffix == ".zarr" or any((path / n).is_file() for n in ("zarr.json", ".zgroup"))):
        return "zarr"
    if path.is_file() and path.suffix in HDF5_SUFFIXES:
        with path.open("rb") as file:
            return "netcdf3" if file.read(3) == b"CDF" else "hdf5"
    if path.is_dir() and any(path.glob("*.npy")):
        return "npy"
    raise DataError(
        f"{path} is not a grid store: expected a *.zarr store, a NetCDF or HDF5 file ({', '.join(HDF5_SUFFIXES)}), or "
        "a folder of *.npy files; GRIB files cannot be read in parts, convert them with `dpzoo convert grib SRC DST`"
    )


def open_grid(path: Path) -> GridSource:
    """Open a store with the reader that its path asks for; see `kind_of`."""
    kind = kind_of(path)
    if kind == "zarr":
        from dpzoo.datapipes.grid.zarr_source import ZarrGrid

        return ZarrGrid(path)
    if kind == "hdf5":
        from dpzoo.datapipes.grid.netcdf_source import HDF5Grid

        return HDF5Grid(path)
    if kind == "netcdf3":
        from dpzoo.datapipes.grid.netcdf_source import ClassicGrid

        return ClassicGrid(path)
    from dpzoo.datapipes.grid.npy_source import NpyGrid

    return NpyGrid(path)


def as_python(value: Any) -> Any:
    """An attribute as plain Python: numpy scalars, arrays of one value and bytes become numbers and text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.ndarray):
        return as_python(value.reshape(-1)[0]) if value.size == 1 else [as_python(item) for item in value.tolist()]
    return value.item() if isinstance(value, np.generic) else value
