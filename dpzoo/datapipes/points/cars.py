"""Find the samples in a folder, and part them into training and validation."""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpzoo.datapipes.errors import DataError, DataWarning
from dpzoo.datapipes.points.source import kind_of


def find_cars(folder: Path) -> dict[str, Path]:
    """Name -> path of every sample directly in `folder`, in natural order (run_2 before run_10).

    A sample is `run_1.zarr`, `run_1.h5`, a folder `run_1` of `.npy` files, a DrivAerML folder `run_1`, or a folder
    `run_1` that holds `run_1.zarr` or `run_1.h5`, which is then preferred to VTK files beside it.

    Raises:
        DataError: the folder is not there or holds no sample, or two samples have the same name.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    found: dict[str, Path] = {}
    for entry in sorted(folder.iterdir(), key=lambda path: natural_key(path.name)):
        path = _sample_at(entry)
        if path is None:
            continue
        name = path.stem if path.suffix else path.name
        if name in found:
            raise DataError(f"{found[name]} and {path} are both called {name!r}; keep one of them in {folder}")
        found[name] = path
    if not found:
        raise DataError(f"{folder} holds no sample (run_1.zarr, run_1.h5, run_1/*.npy, run_1/boundary_1.vtp)")
    return found


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts run_2 before run_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _sample_at(entry: Path) -> Path | None:
    inside = [entry / f"{entry.name}{suffix}" for suffix in (".zarr", ".h5", ".hdf5")] if entry.is_dir() else []
    for path in (*inside, entry):
        try:
            kind_of(path)
        except DataError:
            continue
        return path
    return None


def select(cars: Mapping[str, Path], names: Sequence[str], what: str = "the split") -> dict[str, Path]:
    """The named cars, in the order of the names.

    Raises:
        DataError: a name is twice in the list or no such car was found.
    """
    absent = [name for name in names if name not in cars]
    if absent:
        folders = sorted({str(path.parent) for path in cars.values()})
        raise DataError(
            f"{what} names {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not among the "
            f"{len(cars)} cars found in {', '.join(folders[:3])}: add the data or take the name out of {what}"
        )
    if len(set(names)) < len(names):
        raise DataError(f"{what} names {', '.join(sorted({n for n in names if list(names).count(n) > 1}))} twice")
    return {name: cars[name] for name in names}


def read_names(file: Path) -> list[str]:
    """Car names of a split file: one a line, `#` starts a comment."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def split_by_lists(
    cars: Mapping[str, Path], training: Sequence[str], validation: Sequence[str]
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Training and validation cars by name; warns (`DataWarning`) of cars that are in neither list.

    Raises:
        DataError: a listed car was not found, or is in both lists.
    """
    parts = select(cars, training, "the training list"), select(cars, validation, "the validation list")
    if both := sorted(parts[0].keys() & parts[1].keys(), key=natural_key):
        raise DataError(f"{', '.join(both)}: in the training list and in the validation list; keep one")
    if unlisted := [name for name in cars if name not in parts[0] and name not in parts[1]]:
        warnings.warn(f"in no list, so not used: {', '.join(unlisted)}", DataWarning, stacklevel=2)
    return parts


def split_by_fraction(
    cars: Mapping[str, Path], validation: float, seed: int = 0
) -> tuple[dict[str, Path], dict[str, Path]]:
    """A random part of the cars for validation, at least one in each part; depends on names and seed alone.

    Raises:
        DataError: fewer than two cars, or a fraction outside (0, 1).
    """
    if not 0 < validation < 1 or len(cars) < 2:
        raise DataError(f"cannot keep a fraction {validation} of {len(cars)} cars for validation")
    names = _shuffled(cars, seed)
    count = min(len(names) - 1, max(1, round(len(names) * validation)))
    chosen = set(names[:count])
    return {n: p for n, p in cars.items() if n not in chosen}, {n: p for n, p in cars.items() if n in chosen}


def k_folds(cars: Mapping[str, Path], folds: int, seed: int = 0) -> Iterator[tuple[dict[str, Path], dict[str, Path]]]:
    """`folds` pairs (training, validation): every car is in one validation part.

    Raises:
        DataError: not between 2 and as many folds as cars.
    """
    if not 2 <= folds <= len(cars):
        raise DataError(f"{folds} folds of {len(cars)} cars: choose between 2 and {len(cars)}")
    names = _shuffled(cars, seed)
    for fold in range(folds):
        chosen = set(names[fold::folds])
        yield {n: p for n, p in cars.items() if n not in chosen}, {n: p for n, p in cars.items() if n in chosen}


def _shuffled(cars: Mapping[str, Path], seed: int) -> list[str]:
    names = sorted(cars, key=natural_key)
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
