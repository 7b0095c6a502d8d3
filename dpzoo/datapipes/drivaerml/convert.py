"""`dpzoo convert drivaer`: DrivAerML folders into zarr stores of which each rank can read its rows alone. Once.

A car is finished when its store says so: run the same command again after a stop and it goes on with the cars that are
not. Memory: VTK holds one whole file; what is added to that is one copy in float32 and a block of rows.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpzoo.datapipes.drivaerml.folder import CarFolder
from dpzoo.datapipes.drivaerml.meshes import SURFACE_FIELDS, VOLUME_FIELDS, read_geometry, read_surface, read_volume
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.points.cars import natural_key
from dpzoo.datapipes.points.curves import curve_order
from dpzoo.datapipes.points.zarr_writer import ZarrWriter, state_of


@dataclass(frozen=True)
class Settings:
    """How cars are converted; a store remembers it.

    Args:
        order: "shuffled" makes any contiguous window a random sample; "hilbert" and "morton" make it a compact piece of
            space (then sub-samples are drawn by strata).
        surface_fields, volume_fields: cell data to keep, in this order.
        chunk_rows: rows per chunk.
        seed: of the shuffle.
        stream_velocity: m/s, kept as an attribute; the files do not say it.
    """

    order: Literal["shuffled", "hilbert", "morton"] = "shuffled"
    surface_fields: tuple[str, ...] = SURFACE_FIELDS
    volume_fields: tuple[str, ...] = VOLUME_FIELDS
    chunk_rows: int = 1 << 16
    seed: int = 0
    stream_velocity: float = 38.889


@dataclass(frozen=True)
class Outcome:
    """What became of one car: "written", "kept" (it was finished before), or "failed" with the reason."""

    car: str
    state: Literal["written", "kept", "failed"]
    reason: str = ""


def convert(
    source: Path, destination: Path, settings: Settings | None = None, cars: Sequence[str] | None = None
) -> Iterator[Outcome]:
    """Convert every car folder in `source` (or `source` itself) to `destination/<name>.zarr`, one after the other.

    A car that cannot be converted is reported and the next one is tried; its store stays marked as unfinished.

    Args:
        cars: names of folders; all by default.

    Raises:
        DataError: no car was found, or a named one is absent.
    """
    settings = settings or Settings()
    folders = find_folders(source, cars)
    destination.mkdir(parents=True, exist_ok=True)
    bar = require("tqdm", "a progress bar").tqdm
    with bar(folders, unit="car", disable=None) as cars_bar:
        for folder in cars_bar:
            cars_bar.set_description(folder.name)
            try:
                yield convert_car(folder, destination / f"{folder.name}.zarr", settings, bar)
            except DataError as error:
                named = str(error) if str(folder) in str(error) else f"{folder}: {error}"
                yield Outcome(folder.name, "failed", named)


def find_folders(source: Path, cars: Sequence[str] | None = None) -> list[Path]:
    """The car folders, in natural order."""
    if not source.is_dir():
        raise DataError(f"{source} is not a folder")
    candidates = [source, *sorted(source.iterdir(), key=lambda path: natural_key(path.name))]
    found = {
        path.name: path
        for path in candidates
        if path.is_dir() and (any(path.glob("boundary_*.vtp")) or any(path.glob("volume_*.vtu*")))
    }
    if not found:
        raise DataError(f"{source} holds no folder with boundary_*.vtp or volume_*.vtu")
    if absent := [name for name in cars or () if name not in found]:
        raise DataError(f"{source} has no car folder {', '.join(absent)}; it has {', '.join(list(found)[:20])}")
    return [found[name] for name in cars] if cars else list(found.values())


def convert_car(folder: Path, store: Path, settings: Settings, bar: Callable[..., Any]) -> Outcome:
    """Convert one car folder.

    Raises:
        DataError: a file is absent or bad, or a store that was made in another way is in the place.
    """
    made_with = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(settings).items()}
    state = state_of(store)
    if state is not None and state.get("state") == "finished":
        if {key: state.get(key) for key in made_with} != made_with:
            raise DataError(f"{store} was converted with other settings ({state}): delete it or choose another folder")
        return Outcome(folder.name, "kept")
    car = CarFolder(folder)
    attributes = {
        "shuffled": settings.order == "shuffled",
        "order": settings.order,
        "kinematic": True,
        "units": "p, wall shear stress: m2/s2 (kinematic); U: m/s; nut: m2/s; lengths: m",
        "stream_velocity": settings.stream_velocity,
        "air_density": 1.0,
        **car.attributes(),
    }
    with ZarrWriter(store, attributes, made_with, settings.chunk_rows) as writer:
        arrays, columns = read_surface(car.boundary(), settings.surface_fields)
        _write_cloud("surface", arrays, columns, writer, settings, bar)
        if car.has_volume():
            with car.volume(scratch=store.parent) as file:
                arrays, columns = read_volume(file, settings.volume_fields)
            _write_cloud("volume", arrays, columns, writer, settings, bar)
        if (stl := car.geometry()) is not None:
            for name, array in read_geometry(stl).items():
                writer.write(name, array)
    return Outcome(folder.name, "written")


def _write_cloud(
    kind: str,
    arrays: dict[str, np.ndarray],
    columns: list[str],
    writer: ZarrWriter,
    settings: Settings,
    bar: Callable[..., Any],
) -> None:
    """All arrays of one cloud, in one order."""
    centers = arrays[f"{kind}_mesh_centers"]
    if settings.order == "shuffled":
        order = np.random.default_rng([settings.seed, zlib.crc32(f"{writer.path.stem}/{kind}".encode())]).permutation(
            len(centers)
        )
    else:
        order = curve_order(centers, settings.order)
    writer.annotate({f"{kind}_fields": columns})
    with bar(total=len(order) * len(arrays), desc=kind, unit="row", unit_scale=True, leave=False, disable=None) as rows:
        for name, array in arrays.items():
            writer.write(name, array, order, rows.update)
