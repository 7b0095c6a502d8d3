"""Predicted fields as a VTK file for ParaView: cell centres as points, with true and predicted fields on them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def require_pyvista() -> Any:
    """Import and return pyvista; raises ImportError with the command that installs it."""
    try:
        import pyvista
    except ImportError as error:
        raise ImportError(
            f'VTP files and renderer=pyvista need pyvista ({error}): pip install pyvista, or pip install "dpzoo[viz]"'
        ) from error
    return pyvista


def write_vtp(
    file: Path, centers: np.ndarray, truth: np.ndarray, predicted: np.ndarray, fields: Mapping[str, slice]
) -> None:
    """Write `centers (n, 3)` with `<field>`, `<field>_predicted` and `<field>_error` for each of `fields`."""
    cloud = require_pyvista().PolyData(centers)
    for name, columns in fields.items():
        for suffix, values in (("", truth), ("_predicted", predicted), ("_error", predicted - truth)):
            column = np.ascontiguousarray(values[:, columns])
            cloud.point_data[name + suffix] = column[:, 0] if column.shape[1] == 1 else column
    file.parent.mkdir(parents=True, exist_ok=True)
    cloud.save(file)
