"""Fields that a model made, back to files and labels: zarr in parts, xarray in memory."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.agreement import together
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.layout import GridLayout
from dpzoo.datapipes.grid.writer import FIELDS, encode_times
from dpzoo.datapipes.optional import require
from dpzoo.datapipes.watched_zarr import MARKER, state_of
from dpzoo.shard import ShardTensor


def to_xarray(
    fields: Tensor | np.ndarray,
    channels: Sequence[str],
    times: np.ndarray,
    latitude: np.ndarray,
    longitude: np.ndarray,
    members: Sequence[str] = (),
) -> Any:
    """An `xarray.DataArray` with dims ([number,] time, channel, latitude, longitude) or (..., y, x).

    Args:
        fields: `(time, channel, y, x)`, or with members in front; gather a ShardTensor first (`full_tensor()`).
        channels, times, members: labels of the dims.
        latitude, longitude: degrees, `(y)` and `(x)`, or both `(y, x)`.
    """
    xarray = require("xarray", "labelled arrays", "data")
    if isinstance(fields, ShardTensor):
        raise DataError("to_xarray needs whole fields: pass fields.full_tensor(), or write_fields() to write in parts")
    values = fields.detach().cpu().numpy() if isinstance(fields, Tensor) else fields
    regular = latitude.ndim == 1
    grid = ("latitude", "longitude") if regular else ("y", "x")
    dims = (*(("number",) if members else ()), "time", "channel", *grid)
    coordinates: dict[str, Any] = {"time": times.astype("datetime64[ns]"), "channel": list(channels)}
    coordinates |= {
        "latitude": (grid[:1] if regular else grid, latitude),
        "longitude": (grid[1:] if regular else grid, longitude),
    }
    if members:
        coordinates["number"] = list(members)
    return xarray.DataArray(values, dims=dims, coords=coordinates)


def write_fields(
    path: Path,
    fields: Tensor,
    channels: Sequence[str],
    times: np.ndarray,
    layout: GridLayout,
    mesh: DeviceMesh | None = None,
    latitude: np.ndarray | None = None,
    longitude: np.ndarray | None = None,
) -> None:
    """Write `(time, channel, y, x)` fields as a zarr 3 store, each rank its own block; xarray and `Stream` read it.

    Args:
        path: the store; must not be there yet, except unfinished.
        fields: a plain tensor, or a ShardTensor cut as `layout` says (`loader.layout`).
        channels, times: labels.
        mesh: of the ShardTensor; one rank makes the store.
        latitude, longitude: degrees, `(y)` and `(x)`, or both `(y, x)`, whole on every rank.

    Raises:
        DataError: on all ranks, when the shapes do not fit or something is at `path`.
    """
    placed = layout if isinstance(fields, ShardTensor) else None
    first = mesh is None or torch.distributed.get_rank() == int(mesh.mesh.flatten()[0])

    def create() -> None:
        _check(fields, channels, times, placed)
        if first:
            _create(path, tuple(fields.shape), channels, times, placed, latitude, longitude)

    together(create, mesh)
    group = together(lambda: _fill(path, fields, placed), mesh)

    def finish() -> None:
        if first:
            group.attrs[MARKER] = {"state": "finished"}

    together(finish, mesh)


def _fill(path: Path, fields: Tensor, layout: GridLayout | None) -> Any:
    """Write this rank's block; the store that was opened."""
    local = fields.to_local() if isinstance(fields, ShardTensor) else fields
    group = require("zarr", "writing a .zarr store", "data").open_group(path, mode="r+")
    box = layout.box if layout is not None else None
    rows, columns = (slice(box.top, box.bottom), slice(box.left, box.right)) if box else (slice(None), slice(None))
    if local.numel():
        group[FIELDS][:, :, rows, columns] = local.detach().float().cpu().numpy()
    return group


def _check(fields: Tensor, channels: Sequence[str], times: np.ndarray, layout: GridLayout | None) -> None:
    if fields.ndim != 4 or fields.shape[:2] != (len(times), len(channels)):
        raise DataError(f"fields {tuple(fields.shape)} are not ({len(times)} times, {len(channels)} channels, y, x)")
    if layout is not None and isinstance(fields, ShardTensor):
        block = tuple(fields.to_local().shape[-2:])
        if block != layout.box.shape:
            raise DataError(f"this rank's block is {block}, the layout says {layout.box.shape}: redistribute first")


def _create(
    path: Path,
    shape: tuple[int, ...],
    channels: Sequence[str],
    times: np.ndarray,
    layout: GridLayout | None,
    latitude: np.ndarray | None,
    longitude: np.ndarray | None,
) -> None:
    state = state_of(path)
    if state is not None and state.get("state") != "writing":
        raise DataError(f"{path} exists: delete it or write elsewhere")
    if state is not None:
        shutil.rmtree(path)
    zarr = require("zarr", "writing a .zarr store", "data")
    group = zarr.create_group(path, zarr_format=3, attributes={MARKER: {"state": "writing"}})
    grid = ("latitude", "longitude") if latitude is not None and latitude.ndim == 1 else ("y", "x")
    group.create_array(
        FIELDS,
        shape=shape,
        dtype="float32",
        chunks=(1, shape[1], *_own_chunks(shape[-2:], layout)),
        config={"write_empty_chunks": True},
        dimension_names=("time", "channel", *grid),
        attributes={"channels": list(channels)},
    )
    values, attributes = encode_times(times)
    group.create_array("time", data=values, dimension_names=("time",), attributes=attributes)
    group.create_array("channel", data=np.array(channels, dtype=np.dtypes.StringDType()), dimension_names=("channel",))
    for name, coordinate, own in (("latitude", latitude, grid[:1]), ("longitude", longitude, grid[1:])):
        if coordinate is not None:
            dims = own if coordinate.ndim == 1 else grid
            group.create_array(name, data=coordinate, dimension_names=dims, attributes={"standard_name": name})


def _own_chunks(grid: Sequence[int], layout: GridLayout | None) -> tuple[int, int]:
    """The largest chunk on whose borders all ranks meet, so that no two of them write the same chunk."""
    chunk = {"y": grid[0], "x": grid[1]}
    if layout is not None:
        for dim, sizes in zip(layout.dims, layout.sizes, strict=True):
            borders = np.cumsum(sizes)[:-1]
            inner = [int(b) for b in borders if 0 < b < chunk[dim]]
            chunk[dim] = math.gcd(*inner) if inner else chunk[dim]
    return chunk["y"], chunk["x"]
