"""A car as a folder of `.npy` files, memory-mapped: only the pages of the rows that are read leave the disk."""

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.points.source import FieldInfo


class NpySource:
    """A `PointSource` over `<field>.npy` files and an optional `attributes.json`."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        self._arrays = {file.stem: _open(file) for file in sorted(path.glob("*.npy"))}

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """All files that hold an array with dims."""
        return {name: FieldInfo(a.shape[0], a.shape[1:], a.dtype) for name, a in self._arrays.items() if a.shape}

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """What `attributes.json` says."""
        file = self.path / "attributes.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def read(self, field: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)`, copied into memory."""
        rows = np.array(self._arrays[field][start:stop])
        self.bytes_read += rows.nbytes
        return rows

    def close(self) -> None:
        """Let go of the maps."""
        self._arrays = {}


def _open(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{file} is not a complete .npy file ({error}): copy or write it again") from error
