"""Gridded variables in a zarr store, version 2 or 3, as xarray or `dpzoo convert` write it."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dpzoo.datapipes.grid.source import Variable
from dpzoo.datapipes.watched_zarr import MARKER, WatchedGroup


class ZarrGrid(WatchedGroup):
    """A `GridSource` over one zarr group.

    zarr leaves out chunks that hold only the fill value, unless told otherwise, and reads a lost chunk as one of these.
    `absent` lists the chunks that were asked for and are not there; whether that is a fault, the caller knows.
    """

    extra = "data"
    write_again = "run what wrote it again"

    @property
    def absent(self) -> list[str]:
        """Chunks that were asked for and are not in the store."""
        return list(self._store.absent)

    @property
    def writes_all_chunks(self) -> bool:
        """True for stores of this project, which hold every chunk: there an absent one is lost."""
        return MARKER in self.attributes

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """All arrays of the group."""
        return {name: _describe(name, array) for name, array in self._group.arrays()}

    def read(self, variable: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part that the slices name; chunks outside it are not touched."""
        return np.asarray(self._group[variable][index])


def _describe(name: str, array: Any) -> Variable:
    attributes = dict(array.attrs)
    named = getattr(array.metadata, "dimension_names", None) or attributes.pop("_ARRAY_DIMENSIONS", None)
    dims = tuple(named or ((name,) if array.ndim == 1 else (f"dim_{i}" for i in range(array.ndim))))
    fill = array.fill_value
    packed = "scale_factor" in attributes or "add_offset" in attributes
    # In zarr 2 xarray keeps the missing value of packed integers as the fill value; zero is zarr's own default.
    if array.metadata.zarr_format == 2 and packed and fill is not None and fill != 0:
        attributes.setdefault("_FillValue", fill.item() if hasattr(fill, "item") else fill)
    return Variable(dims, tuple(array.shape), np.dtype(array.dtype), tuple(array.chunks), attributes)
