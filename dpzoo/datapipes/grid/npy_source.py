"""A folder of `.npy` files, memory-mapped: only the pages of the part that is read leave the disk."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.source import Variable

_USUAL_DIMS = {2: ("y", "x"), 3: ("time", "y", "x"), 4: ("time", "channel", "y", "x")}


class NpyGrid:
    """A `GridSource` over `<variable>.npy` files.

    An optional `grid.json` says `{"dims": {variable: [...]}, "attributes": {variable: {...}}}`; without it, arrays of
    1 to 4 dims are taken as a coordinate, `(y, x)`, `(time, y, x)` and `(time, channel, y, x)`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        file = path / "grid.json"
        try:
            self._told: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
        except ValueError as error:
            raise DataError(f"{file} is not JSON ({error})") from error
        self._arrays = {name.stem: _open(name) for name in sorted(path.glob("*.npy"))}

    @cached_property
    def variables(self) -> Mapping[str, Variable]:
        """All files."""
        return {name: self._describe(name, array) for name, array in self._arrays.items()}

    def _describe(self, name: str, array: np.ndarray) -> Variable:
        usual = (name,) if array.ndim == 1 else _USUAL_DIMS.get(array.ndim, ())
        dims = tuple(self._told.get("dims", {}).get(name, usual))
        if len(dims) != array.ndim:
            raise DataError(f"{self.path}: {name}.npy has {array.ndim} dims, name as many in grid.json (found {dims})")
        return Variable(dims, array.shape, array.dtype, None, self._told.get("attributes", {}).get(name, {}))

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """What `grid.json` says beside dims and attributes of variables."""
        return {key: value for key, value in self._told.items() if key not in ("dims", "attributes")}

    def read(self, variable: str, index: tuple[slice, ...]) -> np.ndarray:
        """The part that the slices name, copied into memory."""
        part = np.array(self._arrays[variable][index])
        self.bytes_read += part.nbytes
        return part

    def close(self) -> None:
        """Let go of the maps."""
        self._arrays = {}


def _open(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} is not a complete .npy file ({error}): copy or write it again") from error
