"""A DrivAerML folder as a `PointSource`: a file is read whole when a field of it is first asked for."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.drivaerml.folder import CarFolder
from dpzoo.datapipes.drivaerml.meshes import read_geometry, read_surface, read_volume
from dpzoo.datapipes.points.source import FieldInfo


class DrivAerMLSource:
    """See the module. Parts of a volume file are joined beside them, in a temporary folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        self._folder = CarFolder(path)

    @cached_property
    def fields(self) -> Mapping[str, FieldInfo]:
        """The arrays of the files that are there."""
        return _Fields(self)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """What the CSV files say; units are kinematic."""
        return {"shuffled": False, "kinematic": True, **self._folder.attributes()}

    @cached_property
    def surface(self) -> dict[str, np.ndarray]:
        """Arrays of `boundary_i.vtp`."""
        file = self._folder.boundary()
        self.bytes_read += file.stat().st_size
        return read_surface(file)[0]

    @cached_property
    def volume(self) -> dict[str, np.ndarray]:
        """Arrays of `volume_i.vtu`."""
        with self._folder.volume(scratch=self.path) as file:
            self.bytes_read += file.stat().st_size
            return read_volume(file)[0]

    @cached_property
    def geometry(self) -> dict[str, np.ndarray]:
        """Arrays of `drivaer_i.stl`; empty when there is none."""
        file = self._folder.geometry()
        if file is None:
            return {}
        self.bytes_read += file.stat().st_size
        return read_geometry(file)

    def arrays_with(self, field: str) -> dict[str, np.ndarray]:
        """The arrays of the file that has this field, by the first word of its name."""
        kind = field.partition("_")[0]
        if kind == "surface":
            return self.surface
        if kind == "volume" and self._folder.has_volume():
            return self.volume
        return self.geometry if kind == "stl" else {}

    def read(self, field: str, start: int, stop: int) -> np.ndarray:
        """Rows `[start, stop)`."""
        return self.arrays_with(field)[field][start:stop]

    def close(self) -> None:
        """Forget the arrays."""
        for name in ("surface", "volume", "geometry"):
            self.__dict__.pop(name, None)


class _Fields(Mapping[str, FieldInfo]):
    """Sizes by name; looking up a surface field reads the surface file, not the volume."""

    def __init__(self, source: DrivAerMLSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> FieldInfo:
        array = self._source.arrays_with(name)[name]
        return FieldInfo(array.shape[0], array.shape[1:], array.dtype)

    def __iter__(self):  # type: ignore[no-untyped-def]
        for kind in ("surface", "volume", "stl"):
            yield from self._source.arrays_with(f"{kind}_")

    def __len__(self) -> int:
        return sum(1 for _ in self)
