"""VTP, VTU and STL files as the arrays of the curator layout (float32), through VTK.

VTK reads a file whole. A full DrivAerML volume (50 GB, 1.5e8 cells) needs about twice its size in memory.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.datapipes.drivaerml.polygons import area_vectors
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.optional import require

SURFACE_FIELDS = ("pMeanTrim", "wallShearStressMeanTrim")
VOLUME_FIELDS = ("UMeanTrim", "pMeanTrim", "nutMeanTrim")
Arrays = dict[str, np.ndarray]


def read_surface(file: Path, fields: Sequence[str] = SURFACE_FIELDS) -> tuple[Arrays, list[str]]:
    """Arrays `surface_{mesh_centers,normals,areas,fields}` of a VTP file, and the names of the field columns.

    Normals are those of the polygons as they are stored: OpenFOAM's point out of the fluid, into the body. The area is
    the length of the area vector, so that the area vectors of a closed surface sum to zero, also with warped faces.

    Raises:
        DataError: a field is not there, or the file is damaged.
    """
    mesh = _read(file)
    table, columns = _cell_table(mesh, fields, file)
    polygons = mesh.GetPolys()
    offsets, corners = _numpy(polygons.GetOffsetsArray()), _numpy(polygons.GetConnectivityArray())
    if len(offsets) - 1 != len(table):
        raise DataError(
            f"{file}: {len(offsets) - 1} polygons, but {len(table)} cells: lines or strips are not supported"
        )
    vectors = area_vectors(_numpy(mesh.GetPoints().GetData()), offsets, corners)
    areas = np.linalg.norm(vectors, axis=1)
    normals = vectors / np.where(areas > 0, areas, 1.0)[:, None]
    arrays = {"mesh_centers": _centers(mesh), "normals": normals, "areas": areas, "fields": table}
    return {f"surface_{name}": array.astype(np.float32) for name, array in arrays.items()}, columns


def read_volume(file: Path, fields: Sequence[str] = VOLUME_FIELDS) -> tuple[Arrays, list[str]]:
    """Arrays `volume_{mesh_centers,fields}` of a VTU file, and the names of the field columns.

    Raises:
        DataError: a field is not there, or the file is damaged.
    """
    mesh = _read(file)
    table, columns = _cell_table(mesh, fields, file)
    return {"volume_mesh_centers": _centers(mesh).astype(np.float32), "volume_fields": table}, columns


def read_geometry(file: Path) -> Arrays:
    """Arrays `stl_coordinates (V, 3)`, `stl_faces (3F)`, `stl_centers (F, 3)`, `stl_areas (F)` of an STL file."""
    mesh = _read(file)
    points = _numpy(mesh.GetPoints().GetData())
    faces = _numpy(mesh.GetPolys().GetConnectivityArray()).reshape(-1, 3)
    vectors = area_vectors(points, np.arange(0, faces.size + 1, 3), faces.ravel())
    return {
        "stl_coordinates": points.astype(np.float32),
        "stl_faces": faces.ravel().astype(np.int32),
        "stl_centers": points[faces].mean(1, dtype=np.float64).astype(np.float32),
        "stl_areas": np.linalg.norm(vectors, axis=1).astype(np.float32),
    }


def _read(file: Path) -> Any:
    """The mesh; an error that VTK only prints becomes a `DataError`."""
    pyvista = require("pyvista", "reading VTK files")
    try:
        with pyvista.VtkErrorCatcher(raise_errors=True):
            mesh = pyvista.read(file)
    except Exception as error:
        said = str(error).rpartition("\n\t")[2].strip()[:300]  # pyvista names the reader before VTK's own words
        raise DataError(f"{file} is damaged, VTK says: {said}; copy it again") from error
    if mesh.n_cells == 0:
        raise DataError(f"{file} holds no cells; copy it again")
    return mesh


def _cell_table(mesh: Any, fields: Sequence[str], file: Path) -> tuple[np.ndarray, list[str]]:
    """Cell fields side by side as `(cells, columns)` float32, and the column names."""
    absent = [name for name in fields if name not in mesh.cell_data]
    if absent:
        at_points = [name for name in absent if name in mesh.point_data]
        raise DataError(
            f"{file} has no cell data {', '.join(absent)}; it has {', '.join(mesh.cell_data.keys()) or 'none'}"
            + (f" ({', '.join(at_points)} is point data: convert it to cell data)" if at_points else "")
            + "; name the fields that it should be with --surface-fields or --volume-fields"
        )
    widths = [1 if mesh.cell_data[name].ndim == 1 else mesh.cell_data[name].shape[1] for name in fields]
    table = np.empty((mesh.n_cells, sum(widths)), np.float32)
    columns: list[str] = []
    for name, width in zip(fields, widths, strict=True):
        values = np.asarray(mesh.cell_data[name])
        if len(values) != mesh.n_cells:
            raise DataError(f"{file}: {name} has {len(values)} values for {mesh.n_cells} cells; copy the file again")
        table[:, len(columns) : len(columns) + width] = values.reshape(-1, width)
        columns += [name] if width == 1 else [f"{name}_{'xyz'[i] if width == 3 else i}" for i in range(width)]
    return table, columns


def _centers(mesh: Any) -> np.ndarray:
    return np.asarray(mesh.cell_centers(vertex=False).points)


def _numpy(array: Any) -> np.ndarray:
    convert = require("vtkmodules.util.numpy_support", "reading VTK files").vtk_to_numpy
    return np.asarray(convert(array))
