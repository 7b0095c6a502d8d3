"""What a sample consists of, and the part of it that one rank reads."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpzoo.datapipes.agreement import as_data_error
from dpzoo.datapipes.csv_row import read_one_row
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.points.draw import Draw, make_draw, shard_sizes
from dpzoo.datapipes.points.source import PointSource, field_of, kind_of, open_source, reads_whole_file

BLOCK_ROWS = 1 << 20


@dataclass(frozen=True)
class Cloud:
    """Rows that belong together, and how they are laid out over the domain ranks.

    Args:
        fields: names of arrays with the same number of rows.
        points: how many rows to draw in every epoch; None for all of them.
        draw: "window" needs a file whose rows are shuffled, "strata" fits any order; "auto" takes a window if the file
            says of itself that it is shuffled.
        replicated: every rank holds all rows.
        weights: share of the rows per domain rank; equal shares if None.
    """

    fields: tuple[str, ...]
    points: int | None = None
    draw: Literal["auto", "window", "strata"] = "auto"
    replicated: bool = False
    weights: tuple[float, ...] | None = None


SURFACE = Cloud(("surface_mesh_centers", "surface_normals", "surface_areas", "surface_fields"))
"""The surface of a car: pressure and wall shear stress (4 columns) on cells with centres, normals and areas."""
VOLUME = Cloud(("volume_mesh_centers", "volume_fields"))
"""The air around it: velocity, pressure and turbulent viscosity (5 columns) at cell centres."""
GEOMETRY = ("stl_coordinates", "stl_faces", "stl_centers", "stl_areas")
"""The triangles of the body, whole on every rank: pass these, or some of them, as `whole`."""


@dataclass(frozen=True)
class CarRequest:
    """One rank's part of one car in one epoch: all that a worker, in whatever process, has to know."""

    name: str
    path: Path
    clouds: Mapping[str, Cloud]
    whole: tuple[str, ...]
    seed: int
    epoch: int
    rank: int
    ranks: int


@dataclass
class CarPart:
    """What a worker gives back: plain arrays of this rank's rows, and how all ranks hold the rest."""

    name: str
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    """Field -> rows per domain rank; None for what every rank holds whole."""
    totals: dict[str, int] = field(default_factory=dict)
    """Cloud -> rows in the file, of which the sample may be a part."""
    attributes: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0
    one_reader: bool = False
    """The format cannot be read in parts: domain rank 0 holds all rows, the others nothing yet."""


@dataclass(frozen=True)
class PointDataset:
    """Cars with the clouds to read of each; holds paths and numbers only, so that it is cheap to send to a process.

    Args:
        cars: name -> path, see `find_cars`.
        clouds: name -> `Cloud`, for example `{"surface": SURFACE, "volume": replace(VOLUME, points=100_000)}`.
        whole: fields that every rank holds whole, such as `GEOMETRY`.
        seed: with the epoch and the name of the car, it decides which rows are drawn.

    Raises:
        DataError: two clouds want the same field, or there is no car or no field.
    """

    cars: Mapping[str, Path]
    clouds: Mapping[str, Cloud]
    whole: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        fields = [f for cloud in self.clouds.values() for f in cloud.fields] + list(self.whole)
        if not self.cars or not fields:
            raise DataError(f"a dataset of {len(self.cars)} cars and {len(fields)} fields holds nothing")
        if twice := sorted({f for f in fields if fields.count(f) > 1}):
            raise DataError(f"{', '.join(twice)}: wanted twice; a field belongs to one cloud")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Car names, in order."""
        return tuple(self.cars)

    def __len__(self) -> int:
        return len(self.cars)

    def request(self, index: int, epoch: int = 0, rank: int = 0, ranks: int = 1) -> CarRequest:
        """The part of car `index` that domain rank `rank` of `ranks` reads in an epoch."""
        name = self.names[index]
        return CarRequest(name, self.cars[name], self.clouds, self.whole, self.seed, epoch, rank, ranks)


def read_part(request: CarRequest) -> CarPart:
    """Read one rank's rows of a car.

    Raises:
        DataError: naming the file: a field is absent, lengths do not match, a value is not finite, a file is damaged.
    """
    try:
        if reads_whole_file(kind_of(request.path)):
            return _read_as_the_one_reader(request)
        with closing(open_source(request.path)) as source:
            return _read(source, request, request.rank, request.ranks)
    except ImportError:
        raise
    except DataError as error:
        raise error if str(request.path) in str(error) else DataError(f"{request.path}: {error}") from error
    except Exception as error:
        raise DataError(f"{request.path}: {as_data_error(error)}") from error


def _read_as_the_one_reader(request: CarRequest) -> CarPart:
    if request.rank:
        return CarPart(request.name, one_reader=True)
    with closing(open_source(request.path)) as source:
        part = _read(source, request, 0, 1)
    part.one_reader = True
    for cloud in request.clouds.values():
        for name in cloud.fields:
            part.sizes[name] = _sizes(cloud, len(part.arrays[name]), request.ranks)
    return part


def _read(source: PointSource, request: CarRequest, rank: int, ranks: int) -> CarPart:
    draws = {name: _draw(source, name, cloud, request) for name, cloud in request.clouds.items()}
    part = CarPart(request.name, attributes={**source.attributes, **_forces_beside(request)})
    for name, cloud in request.clouds.items():
        draw = draws[name]
        # The one reader keeps all rows, whatever the weights of the ranks that it will send them to.
        sizes = _sizes(cloud, draw.points, ranks) if ranks == request.ranks else (draw.points,)
        lo = 0 if sizes is None else sum(sizes[:rank])
        hi = draw.points if sizes is None else lo + sizes[rank]
        part.totals[name] = draw.total
        for name_of_field in cloud.fields:
            part.sizes[name_of_field] = sizes
            part.arrays[name_of_field] = _read_rows(source, name_of_field, draw, lo, hi)
    for name in request.whole:
        part.sizes[name] = None
        part.arrays[name] = checked_rows(source, name, 0, field_of(source, name).rows)
    part.bytes_read = source.bytes_read
    return part


def _sizes(cloud: Cloud, points: int, ranks: int) -> tuple[int, ...] | None:
    return None if cloud.replicated else shard_sizes(points, ranks, cloud.weights)


def _draw(source: PointSource, name: str, cloud: Cloud, request: CarRequest) -> Draw:
    rows = {f: field_of(source, f).rows for f in cloud.fields}
    if len(set(rows.values())) > 1:
        raise DataError(f"{source.path}: the fields of cloud {name!r} have different lengths {rows}; write it again")
    kind = cloud.draw if cloud.draw != "auto" else "window" if source.attributes.get("shuffled") else "strata"
    total = next(iter(rows.values()), 0)
    return make_draw(total, cloud.points, kind, request.seed, request.epoch, request.name, name)


def _read_rows(source: PointSource, name: str, draw: Draw, lo: int, hi: int) -> np.ndarray:
    """The drawn rows `[lo, hi)`, block by block: a thin draw from a long file stays small in memory."""
    info = field_of(source, name)
    out, at = np.empty((hi - lo, *info.row_shape), info.dtype), 0
    picked = draw.rows(lo, hi) if draw.kind == "strata" else None
    for first, last in draw.intervals(lo, hi):
        here = None if picked is None else picked[(picked >= first) & (picked < last)]
        for start in range(first, last, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, last)
            block = checked_rows(source, name, start, stop)
            if here is not None:
                block = block[here[np.searchsorted(here, start) : np.searchsorted(here, stop)] - start]
            out[at : at + len(block)] = block
            at += len(block)
    assert at == hi - lo
    return out


def checked_rows(source: PointSource, name: str, start: int, stop: int) -> np.ndarray:
    """Rows `[start, stop)`; raises `DataError` unless all values are finite."""
    rows = source.read(name, start, stop)
    if rows.dtype.kind == "f" and not np.isfinite(rows).all():
        bad = np.unique(np.argwhere(~np.isfinite(rows))[:, 0])
        raise DataError(
            f"{source.path}: {name} has values that are not finite in {len(bad)} of rows [{start}, {stop}), the first "
            f"is row {start + bad[0]}: repair the file or leave this car out"
        )
    return rows


def _forces_beside(request: CarRequest) -> dict[str, Any]:
    """Force coefficients of `force_mom_<i>.csv` beside the file, for stores that do not hold them themselves."""
    number = request.name.rpartition("_")[2]
    file = (request.path if request.path.suffix == "" else request.path.parent) / f"force_mom_{number}.csv"
    return dict(read_one_row(file)) if file.is_file() else {}
