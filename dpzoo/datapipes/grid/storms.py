"""Made-up weather with the traits that make nowcasting hard: cells that drift, grow and decay, at any size of grid.

Cells are born all over the domain and its surroundings, live for an hour or two, and are carried by a wind that turns
over the domain. A cell's life is a function of the seed and the step of its birth alone, so frames do not depend on
each other or on the order in which they are made.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.writer import Contents, GridWriter
from dpzoo.datapipes.optional import require

CHANNELS = ("reflectivity", "brightness_temperature", "lightning")
UNITS = {"reflectivity": "dBZ", "brightness_temperature": "K", "lightning": "km-2 s-1", "orography": "m"}
_EARTH_KM = 6371.0


@dataclass(frozen=True)
class Storms:
    """A made-up domain.

    Args:
        rows, columns: of the grid.
        spacing: km between points; the domain is centred on 38.5 N, 97.5 W.
        frames: times.
        minutes: between two times.
        births: cells born per step and million km2.
        seed: decides everything.
        start: of the first frame.
        blind: km; within this distance of a point on the ridge no radar sees: reflectivity has no value (NaN) there.
    """

    rows: int = 256
    columns: int = 448
    spacing: float = 3.0
    frames: int = 24
    minutes: int = 10
    births: float = 12.0
    seed: int = 0
    start: str = "2024-06-01T12:00"
    blind: float = 0.0

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.frames, self.minutes) < 1 or self.spacing <= 0:
            raise DataError(f"{self} has no point, no time or a spacing that is not positive")
        if min(self.births, self.blind) < 0:
            raise DataError(f"{self}: births and blind are at least 0")


@dataclass(frozen=True)
class Cells:
    """Cells of one frame: position in km, age as a part of life, radius in km, strength (0 to 1), tilt of the anvil."""

    y: np.ndarray
    x: np.ndarray
    age: np.ndarray
    radius: np.ndarray
    strength: np.ndarray


def write_storms(path: Path, storms: Storms, slabs: int = 8) -> None:
    """Write the frames to a zarr store of y-slabs, with orography, latitude and longitude; a stopped one goes on.

    Raises:
        DataError: another store is at `path`.
    """
    start = np.datetime64(storms.start, "s")
    times = start + np.arange(storms.frames) * np.timedelta64(storms.minutes * 60, "s")
    latitude, longitude = coordinates(storms)
    contents = Contents(
        times,
        CHANNELS,
        (storms.rows, storms.columns),
        latitude.astype(np.float32),
        longitude.astype(np.float32),
        static={"orography": orography(storms)},
        units=UNITS,
        attributes={"title": "made-up storms, not observations"},
    )
    bar = require("tqdm", "a progress bar").tqdm
    with GridWriter(path, contents, {"storms": asdict(storms)}, slabs) as writer:
        for number in bar(range(writer.done, storms.frames), unit="frame", disable=None):
            writer.write(frame(storms, number))


def frame(storms: Storms, number: int, top: int = 0, bottom: int | None = None) -> np.ndarray:
    """Frame `number`, `(3, rows, columns)` float32 in the order of `CHANNELS`; rows `[top, bottom)` only, if given."""
    bottom = storms.rows if bottom is None else bottom
    rain = np.zeros((bottom - top, storms.columns), np.float32)
    cloud = np.zeros_like(rain)
    flash = np.zeros_like(rain)
    cells = alive(storms, number)
    for y, x, age, radius, strength in zip(cells.y, cells.x, cells.age, cells.radius, cells.strength, strict=True):
        life = np.sin(np.pi * age) * strength
        _add(rain, storms, top, y, x, radius, 62 * life)
        # The anvil is wider, lags behind the rain and drifts ahead of it.
        _add(cloud, storms, top, y, x + 1.5 * radius * age, 2.5 * radius, 85 * np.sin(np.pi * age**0.7) * strength)
        _add(flash, storms, top, y, x, 0.6 * radius, 4e-3 * max(0.0, life - 0.35))
    ground = 295 - 0.0065 * orography(storms, top, bottom)
    rain = np.where(unseen(storms, top, bottom), np.nan, np.minimum(rain, 75))
    return np.stack([rain, np.maximum(ground - cloud, 190), flash]).astype(np.float32)


def unseen(storms: Storms, top: int = 0, bottom: int | None = None) -> np.ndarray:
    """Points `(rows, columns)` that no radar sees, bool."""
    y = np.arange(top, storms.rows if bottom is None else bottom)[:, None] + 0.5 - 0.5 * storms.rows
    x = np.arange(storms.columns)[None] + 0.5 - 0.22 * storms.columns
    return np.asarray(np.hypot(y, x) * storms.spacing < storms.blind)


def alive(storms: Storms, number: int) -> Cells:
    """The cells of a frame."""
    longest = int(np.ceil(150 / storms.minutes))
    height, width = storms.rows * storms.spacing, storms.columns * storms.spacing
    found = [c for birth in range(number - longest, number + 1) for c in _born(storms, birth, number, height, width)]
    table = np.array(found, np.float64).reshape(-1, 5)
    return Cells(*table.T)


def _born(storms: Storms, birth: int, now: int, height: float, width: float) -> Iterator[tuple[float, ...]]:
    """Cells born at a step that live at step `now`."""
    margin = 150.0
    rng = np.random.default_rng((storms.seed, birth + 1_000_000))
    count = rng.poisson(storms.births * (height + 2 * margin) * (width + 2 * margin) / 1e6)
    draw = rng.random((count, 5))
    minutes = (now - birth) * storms.minutes
    for a, b, c, d, e in draw:
        life = 40 + 100 * c
        if minutes >= life:
            continue
        y, x = -margin + a * (height + 2 * margin), -margin + b * (width + 2 * margin)
        # A jet from the west that bends with the latitude, in km per minute.
        east = 0.6 + 0.5 * np.sin(np.pi * y / max(height, 1.0))
        north = 0.35 * np.sin(2 * np.pi * x / max(width, 1.0) + storms.seed)
        age = minutes / life
        yield y - north * minutes, x + east * minutes, age, (6 + 14 * d) * (0.6 + 0.8 * age), 0.4 + 0.6 * e


def _add(field: np.ndarray, storms: Storms, top: int, y: float, x: float, radius: float, height: float) -> None:
    """Add a bump of Gaussian shape, cut off at three radii."""
    if height <= 0:
        return
    km = storms.spacing
    lo, hi = max(0, int((y - 3 * radius) / km) - top), min(len(field), int((y + 3 * radius) / km) + 2 - top)
    left, right = max(0, int((x - 3 * radius) / km)), min(field.shape[1], int((x + 3 * radius) / km) + 2)
    if lo >= hi or left >= right:
        return
    dy = (np.arange(lo, hi) + top) * km - y
    dx = np.arange(left, right) * km - x
    square = (dy[:, None] ** 2 + dx[None] ** 2) / radius**2
    field[lo:hi, left:right] += (height * np.exp(-square) * (square < 9)).astype(np.float32)


def orography(storms: Storms, top: int = 0, bottom: int | None = None) -> np.ndarray:
    """Heights of the ground `(rows, columns)`, m: a ridge in the west and rolling hills."""
    y = np.arange(top, storms.rows if bottom is None else bottom)[:, None] / storms.rows
    x = np.arange(storms.columns)[None] / storms.columns
    ridge = 2600 * np.exp(-(((x - 0.22 - 0.06 * np.sin(3 * y)) / 0.1) ** 2))
    return (200 + ridge + 150 * (1 + np.sin(9 * x + 5 * y) * np.cos(7 * y - 3 * x))).astype(np.float32)


def coordinates(storms: Storms) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude `(rows, columns)`, degrees, of a sphere unrolled around the centre; north is row 0."""
    north = (storms.rows / 2 - 0.5 - np.arange(storms.rows)) * storms.spacing
    east = (np.arange(storms.columns) - storms.columns / 2 + 0.5) * storms.spacing
    latitude = 38.5 + np.rad2deg(north / _EARTH_KM)[:, None] + 0 * east[None]
    longitude = -97.5 + np.rad2deg(east[None] / (_EARTH_KM * np.cos(np.deg2rad(latitude))))
    return latitude, longitude
