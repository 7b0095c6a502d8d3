"""Small DrivAerML folders: a box as surface (quads, one face of triangles), a grid of cells as volume, an STL, CSV."""

from pathlib import Path

import numpy as np
import pyvista

SURFACE_FIELDS = ("pMeanTrim", "wallShearStressMeanTrim", "CpMeanTrim")


def surface(seed: int = 0) -> pyvista.PolyData:
    """A closed 2 x 1 x 1 box of 24 quads whose normals point inwards, and one quad of it as two triangles."""
    mesh = pyvista.Box(bounds=(0, 2, 0, 1, 0, 1), level=1, quads=True).clean()
    quads = mesh.regular_faces[:, ::-1]
    faces = [[4, *quad] for quad in quads[1:]] + [[3, *quads[0][:3]], [3, quads[0][2], quads[0][3], quads[0][0]]]
    mesh = pyvista.PolyData(mesh.points, np.hstack(faces))
    rng = np.random.default_rng(seed)
    for name, width in zip(SURFACE_FIELDS, (1, 3, 1), strict=True):
        mesh.cell_data[name] = rng.standard_normal((mesh.n_cells, width) if width > 1 else mesh.n_cells).astype("f4")
    return mesh


def volume(seed: int = 0) -> pyvista.UnstructuredGrid:
    """4 x 3 x 2 hexahedra."""
    mesh = pyvista.ImageData(dimensions=(5, 4, 3)).cast_to_unstructured_grid()
    rng = np.random.default_rng(seed)
    for name, width in (("UMeanTrim", 3), ("pMeanTrim", 1), ("nutMeanTrim", 1), ("kMeanTrim", 1)):
        mesh.cell_data[name] = rng.standard_normal((mesh.n_cells, width) if width > 1 else mesh.n_cells).astype("f4")
    return mesh


def write_folder(path: Path, number: int, *, parts: int = 0, nan: bool = False) -> Path:
    """`path` as DrivAerML has it; the volume file in `parts` pieces if any are asked for."""
    path.mkdir(parents=True)
    body, air = surface(number), volume(number)
    if nan:
        body.cell_data["pMeanTrim"][5] = np.nan
    body.save(path / f"boundary_{number}.vtp")
    air.save(path / f"volume_{number}.vtu")
    body.triangulate().save(path / f"drivaer_{number}.stl")
    (path / f"force_mom_{number}.csv").write_text("Cd, Cl, Clf, Clr, Cs\n0.3, 0.05, 0.02, 0.03, 0.0\n")
    (path / f"geo_ref_{number}.csv").write_text("lRef,aRef\n2.8,2.17\n")
    (path / f"geo_parameters_{number}.csv").write_text(f"Run,Vehicle_Length\n{number},30.5\n")
    if parts:
        whole = path / f"volume_{number}.vtu"
        data = whole.read_bytes()
        whole.unlink()
        borders = [len(data) * i // parts for i in range(parts + 1)]
        for i in range(parts):
            (path / f"volume_{number}.vtu.{i:02d}.part").write_bytes(data[borders[i] : borders[i + 1]])
    return path
