"""Make the embedded data set: thin out full RANS solutions so that forces still come out right.

    python examples/drivaer/thin_cars.py SRC DST        (SRC: folders run_<i> with run_<i>.zarr and force_mom_<i>.csv)

Surface. Faces are parted by the direction that they look in and ordered along a Hilbert curve within each part; along
that line every k-th unit of area picks the face it falls into. Faces that stand for the same area get weights to match,
and these areas are then calibrated (Deville and Saerndal 1992): the smallest change, relative to each area, that gives
the sub-sample the full surface's total area, a closed surface (sum of n A = 0), and its pressure and friction forces.
Volume. Rows are taken from the start of the shuffled store: a uniform random part of the cells.
STL. Vertices and triangles are kept whole.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import zarr

from dpzoo.datapipes.csv_row import read_one_row
from dpzoo.datapipes.drivaerml.polygons import area_vectors
from dpzoo.datapipes.points.curves import curve_keys
from dpzoo.datapipes.points.zarr_writer import ZarrWriter

SURFACE_POINTS, VOLUME_POINTS, CHUNK_ROWS = 6144, 16384, 1024
CARS = {  # slant angle (degrees), ground clearance (m), length (m)
    "run_1": (25.0, 0.05, 1.044),
    "run_2": (12.0, 0.05, 1.044),
    "run_3": (35.0, 0.05, 1.044),
    "run_5": (20.0, 0.07, 1.044),
    "run_6": (30.0, 0.05, 0.944),
}
REFERENCE_AREA = 0.112032


def pick_faces(
    centers: np.ndarray, normals: np.ndarray, areas: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of about `count` faces (each at most once) and the area that each stands for."""
    steepest = np.argmax(np.abs(normals), axis=1)
    looks_along = 2 * steepest + (np.take_along_axis(normals, steepest[:, None], axis=1)[:, 0] > 0)
    line = np.lexsort((curve_keys(centers), looks_along))
    ends = np.cumsum(areas[line], dtype=np.float64)
    marks = (np.arange(count) + 0.5) * ends[-1] / count
    hit, times = np.unique(np.searchsorted(ends, marks), return_counts=True)
    return line[hit], times * ends[-1] / count


def totals(normals: np.ndarray, fields: np.ndarray) -> np.ndarray:
    """Per face, what its area multiplies in: total area, closure, pressure force and friction force, `(n, 10)`."""
    return np.hstack([np.ones((len(normals), 1)), normals, fields[:, :1] * normals, fields[:, 1:]]).astype(np.float64)


def calibrated(areas: np.ndarray, per_face: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Areas with `per_face.T @ areas == target` that differ least, in the sum of squared relative changes."""
    weighted = (per_face * areas[:, None]).T
    scale = np.linalg.norm(weighted, axis=1)
    missing = target - weighted.sum(1)
    change = np.linalg.lstsq(weighted / scale[:, None], missing / scale, rcond=1e-10)[0]
    return areas * (1 + change)


def thin(folder: Path, store: Path) -> None:
    """Write the sub-sample of one car; an existing store is replaced."""
    name = folder.name
    full = zarr.open_group(folder / f"{name}.zarr", mode="r")
    centers, normals, areas, fields = (
        full[f"surface_{key}"][...] for key in ("mesh_centers", "normals", "areas", "fields")
    )
    picked, stands_for = pick_faces(centers, normals, areas, SURFACE_POINTS)
    target = totals(normals, fields).T @ areas.astype(np.float64)
    target[1:4] = 0  # the normals and areas of warped faces sum to 1e-5 m2, a closed surface has none
    new_areas = calibrated(stands_for, totals(normals[picked], fields[picked]), target)
    shuffle = np.random.default_rng(int(name.partition("_")[2])).permutation(len(picked))
    if store.exists():
        shutil.rmtree(store)
    slant, clearance, length = CARS[name]
    attributes = {
        **{key: value for key, value in full.attrs.items() if key != "run"},
        "surface_fields": ["pMeanTrim", *(f"wallShearStressMeanTrim_{axis}" for axis in "xyz")],
        **read_one_row(folder / f"force_mom_{name.partition('_')[2]}.csv"),
        "reference_area": REFERENCE_AREA,
        "slant_angle": slant,
        "ground_clearance": clearance,
        "body_length": length,
        "faces_of_full_surface": len(areas),
        "cells_of_full_volume": int(full["volume_fields"].shape[0]),
        "licence": "CC-BY-4.0, see README.md beside this store",
    }
    made_with = {"script": "examples/drivaer/thin_cars.py"}
    with ZarrWriter(store, attributes, made_with, CHUNK_ROWS) as writer:
        for key, array in (("mesh_centers", centers), ("normals", normals), ("fields", fields)):
            writer.write(f"surface_{key}", array[picked], shuffle)
        writer.write("surface_areas", new_areas.astype(np.float32), shuffle)
        for key in ("volume_mesh_centers", "volume_fields"):
            writer.write(key, full[key][:VOLUME_POINTS])
        for key in ("stl_coordinates", "stl_faces", "stl_centers"):
            writer.write(key, full[key][...])
        vectors = area_vectors(
            full["stl_coordinates"][...], np.arange(0, full["stl_faces"].size + 1, 3), full["stl_faces"][...]
        )
        writer.write("stl_areas", np.linalg.norm(vectors, axis=1).astype(np.float32))
    low, high = np.quantile(new_areas / stands_for, (0, 1))
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    print(f"{name}: {len(picked)} of {len(areas)} faces, areas changed by {low:.4f} to {high:.4f}, {size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Thin out full RANS solutions to the embedded data set.")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    for name in CARS:
        thin(arguments.source / name, arguments.destination / f"{name}.zarr")


if __name__ == "__main__":
    main()
