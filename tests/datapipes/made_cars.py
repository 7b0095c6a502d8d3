"""Cars with known content, written to disk in every format; row i of every array says that it is row i."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from dpzoo.datapipes.points.zarr_writer import ZarrWriter

COLUMNS = {
    "surface_mesh_centers": 3,
    "surface_normals": 3,
    "surface_areas": 0,
    "surface_fields": 4,
    "volume_mesh_centers": 3,
    "volume_fields": 5,
}


def car_arrays(surface: int = 50, volume: int = 70, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 arrays; the first column of each (or the array itself) is the row number."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, columns in COLUMNS.items():
        rows = surface if name.startswith("surface") else volume
        array = rng.standard_normal((rows, columns) if columns else rows).astype(np.float32)
        (array if array.ndim == 1 else array[:, 0])[...] = np.arange(rows)
        arrays[name] = array
    return arrays | {
        "stl_coordinates": rng.standard_normal((6, 3)).astype(np.float32),
        "stl_faces": np.arange(6, dtype=np.int32),
        "stl_centers": rng.standard_normal((2, 3)).astype(np.float32),
        "stl_areas": np.ones(2, np.float32),
    }


ATTRIBUTES: dict[str, Any] = {"Cd": 0.3, "Cl": 0.05, "shuffled": True, "stream_velocity": 38.889, "units": "SI"}


def write_zarr(
    path: Path, arrays: dict[str, np.ndarray], chunk_rows: int = 8, attributes: dict[str, Any] = ATTRIBUTES
) -> Path:
    with ZarrWriter(path, attributes, {}, chunk_rows) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    return path


def write_plain_zarr(path: Path, arrays: dict[str, np.ndarray], version: int = 3, chunk_rows: int = 8) -> Path:
    """As the curator writes: no marker, no zarr shards."""
    group = zarr.create_group(path, zarr_format=version)
    group.attrs.update(ATTRIBUTES)
    for name, array in arrays.items():
        group.create_array(name, data=array, chunks=(chunk_rows, *array.shape[1:]))
    return path


def write_npy(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    (path / "attributes.json").write_text(json.dumps(ATTRIBUTES))
    return path


def write_hdf5(path: Path, arrays: dict[str, np.ndarray], chunk_rows: int | None = 8) -> Path:
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs.update(ATTRIBUTES)
        for name, array in arrays.items():
            chunks = None if chunk_rows is None else (min(chunk_rows, len(array)), *array.shape[1:])
            file.create_dataset(name, data=array, chunks=chunks)
    return path
