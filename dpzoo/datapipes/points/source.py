"""One small protocol for all file formats: fields with row counts, and `read(field, start, stop)`.

A source is opened for one read and closed again, in the thread or process that reads: nothing is shared between
workers, so no format has to be safe to fork.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpzoo.datapipes.errors import DataError


class FieldInfo(NamedTuple):
    """Size of one field: `rows` along dim 0, the shape of a row, and the element type."""

    rows: int
    row_shape: tuple[int, ...]
    dtype: np.dtype[Any]


class PointSource(Protocol):
    """One sample (a car) on disk."""

    path: Path

    @property
    def bytes_read(self) -> int:
        """Bytes of data taken from the file so far, whole chunks as they are stored."""

    @property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The arrays of the sample, from metadata alone."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Everything else that is known of the sample: force coefficients, units, whether the rows are shuffled."""

    def read(self, field: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)` of a field."""

    def close(self) -> None:
        """Let go of the file."""


def open_source(path: Path) -> PointSource:
    """Open a sample with the reader that its path asks for.

    `*.zarr` (curator layout), `*.h5` or `*.hdf5`, a folder of `.npy` files, or a DrivAerML folder (`boundary_*.vtp`).

    Raises:
        DataError: the path is none of these, or is not there.
    """
    kind = kind_of(path)
    if kind == "zarr":
        from dpzoo.datapipes.points.zarr_source import ZarrSource

        return ZarrSource(path)
    if kind == "hdf5":
        from dpzoo.datapipes.points.hdf5_source import HDF5Source

        return HDF5Source(path)
    if kind == "npy":
        from dpzoo.datapipes.points.npy_source import NpySource

        return NpySource(path)
    from dpzoo.datapipes.drivaerml.source import DrivAerMLSource

    return DrivAerMLSource(path)


def kind_of(path: Path) -> str:
    """`"zarr"`, `"hdf5"`, `"npy"` or `"drivaerml"`: decided by the names of files, without opening one."""
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.suffix == ".zarr":
        return "zarr"
    if path.suffix in (".h5", ".hdf5"):
        return "hdf5"
    if path.is_dir() and any(path.glob("*.npy")):
        return "npy"
    if path.is_dir() and (any(path.glob("boundary_*.vtp")) or any(path.glob("volume_*.vtu*"))):
        return "drivaerml"
    raise DataError(
        f"{path} is not a sample: expected a *.zarr store, an *.h5 file, a folder of *.npy files, or a DrivAerML "
        "folder with boundary_*.vtp or volume_*.vtu"
    )


def reads_whole_file(kind: str) -> bool:
    """True for formats of which no part can be read alone: one rank reads, the others are sent their rows."""
    return kind == "drivaerml"


def field_of(source: PointSource, name: str) -> FieldInfo:
    """Size of one field; raises `DataError` naming the fields that there are."""
    if name not in source.fields:
        raise DataError(f"{source.path} has no field {name!r}; it has {', '.join(sorted(source.fields))}")
    return source.fields[name]
