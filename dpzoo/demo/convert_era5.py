"""Turn the ERA5 ensemble GRIB file into the small zarr store of the demo, without losing a bit.

A GRIB field is `reference + step * integer` with 16-bit integers. The store keeps exactly those integers (uint16) and,
per field, `reference` and `step` (float64): decoded values are the GRIB's own values, in 60 % of the bytes.

Layout: `packed (number, time, channel, latitude, longitude)`, chunks of one member, one time, all channels and
`CHUNK_ROWS` latitude rows, so that a rank that owns some rows reads and decompresses little else; the chunks of one
member lie in one zarr-3 shard, which keeps the store at one data file per member.

    python -m dpzoo.demo.convert_era5 SRC.grib DST.zarr        (needs cfgrib, which brings eccodes, and zarr)
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CHANNELS = (("z", 850), ("z", 500), ("t", 850), ("t", 500))
DIMS = ("number", "time", "channel", "latitude", "longitude")
UNITS = {"z": "m2 s-2", "t": "K"}
CHUNK_ROWS = 4
TRAINING_MEMBERS = 8
ATTRIBUTION = (
    "Contains modified Copernicus Climate Change Service information 2017. ERA5 ensemble of data assimilation, "
    "from the sample file of the cfgrib source distribution. See ATTRIBUTION.md beside this store."
)


@dataclass(frozen=True)
class Field:
    """One GRIB message: where it belongs, and its values `(latitude, longitude)` as `reference + step * integers`."""

    member: int
    time: np.datetime64
    channel: int
    integers: np.ndarray
    reference: float
    step: float


def read_fields(path: Path) -> tuple[list[Field], np.ndarray, np.ndarray]:
    """All fields of `CHANNELS` in a GRIB file, with the latitudes and longitudes (degrees) of its grid."""
    import eccodes

    fields, latitude, longitude = [], np.empty(0), np.empty(0)
    with path.open("rb") as stream:
        while (message := eccodes.codes_grib_new_from_file(stream)) is not None:
            key = (eccodes.codes_get(message, "shortName"), eccodes.codes_get(message, "level", int))
            if key in CHANNELS:
                fields.append(_read_field(message, CHANNELS.index(key), eccodes))
                grid = eccodes.codes_get(message, "Nj"), eccodes.codes_get(message, "Ni")
                latitude = eccodes.codes_get_array(message, "latitudes").reshape(grid)[:, 0]
                longitude = eccodes.codes_get_array(message, "longitudes").reshape(grid)[0]
            eccodes.codes_release(message)
    if not fields:
        raise ValueError(
            f"{path} holds none of the fields {CHANNELS}; it must be an ERA5 file with z and t at 850 and 500 hPa."
        )
    return fields, latitude, longitude


def _read_field(message: Any, channel: int, eccodes: Any) -> Field:
    get = eccodes.codes_get
    if get(message, "packingType") != "grid_simple" or get(message, "bitsPerValue") > 16:
        raise ValueError(
            f"expected fields in simple packing of at most 16 bits, found {get(message, 'packingType')} of "
            f"{get(message, 'bitsPerValue')} bits; repack with grib_set -r -s packingType=grid_simple,bitsPerValue=16"
        )
    decimal = 10.0 ** -get(message, "decimalScaleFactor")
    reference = get(message, "referenceValue", float) * decimal
    step = 2.0 ** get(message, "binaryScaleFactor") * decimal
    values = eccodes.codes_get_values(message).reshape(get(message, "Nj"), get(message, "Ni"))
    date, clock = get(message, "dataDate", str), f"{get(message, 'dataTime', int):04d}"
    time = np.datetime64(f"{date[:4]}-{date[4:6]}-{date[6:]}T{clock[:2]}:{clock[2:]}", "s")
    integers = np.rint((values - reference) / step).astype(np.uint16)
    if not np.array_equal(reference + step * integers.astype(np.float64), values):
        raise ValueError(f"channel {CHANNELS[channel]} at {time}: the integers do not give back the GRIB's values.")
    return Field(get(message, "number", int), time, channel, integers, reference, step)


def statistics(values: np.ndarray) -> dict[str, list[float]]:
    """Per channel: mean and standard deviation of the state, standard deviation of the 12-hour change.

    Over the training members of `values (number, time, channel, latitude, longitude)`, without the south pole's row,
    which the demo does not use.
    """
    train = values[:TRAINING_MEMBERS, :, :, :60]
    change = train[:, 1:] - train[:, :-1]
    axes = (0, 1, 3, 4)
    return {
        "mean": train.mean(axes).tolist(),
        "std": train.std(axes).tolist(),
        "change_std": change.std(axes).tolist(),
    }


def convert(source: Path, destination: Path) -> None:
    """Write `destination` (a zarr-3 group) from the GRIB file `source`; an existing store is replaced."""
    fields, latitude, longitude = read_fields(source)
    members = sorted({field.member for field in fields})
    times = sorted({field.time for field in fields})
    shape = (len(members), len(times), len(CHANNELS), len(latitude), len(longitude))
    if len(fields) != shape[0] * shape[1] * shape[2]:
        raise ValueError(f"found {len(fields)} fields for {shape[0]} members x {shape[1]} times x {shape[2]} channels.")
    packed, reference, step = np.zeros(shape, np.uint16), np.zeros(shape[:3]), np.zeros(shape[:3])
    for field in fields:
        place = members.index(field.member), times.index(field.time), field.channel
        packed[place], reference[place], step[place] = field.integers, field.reference, field.step
    values = reference[..., None, None] + step[..., None, None] * packed.astype(np.float64)
    group = _create_group(destination, statistics(values) | {"members": members[:TRAINING_MEMBERS]})
    _write_packed(group, packed)
    epoch = np.datetime64("1970-01-01T00:00:00", "s")
    hours = np.array([(time - epoch).astype(int) // 3600 for time in times], np.int32)
    levels = np.array([level for _, level in CHANNELS], np.int32)
    for name, data, dims, attributes in (
        ("reference", reference, DIMS[:3], {}),
        ("step", step, DIMS[:3], {}),
        ("number", np.array(members, np.int32), DIMS[:1], {"long_name": "ensemble member"}),
        ("time", hours, DIMS[1:2], {"units": "hours since 1970-01-01", "calendar": "proleptic_gregorian"}),
        ("level", levels, DIMS[2:3], {"units": "hPa"}),
        ("latitude", latitude.astype(np.float32), DIMS[3:4], {"units": "degrees_north"}),
        ("longitude", longitude.astype(np.float32), DIMS[4:], {"units": "degrees_east"}),
    ):
        group.create_array(name, data=data, dimension_names=dims, attributes=attributes)


def _create_group(destination: Path, table: dict[str, Any]) -> Any:
    import zarr

    group = zarr.create_group(destination, zarr_format=3, overwrite=True)
    group.attrs.update(
        title="ERA5 ensemble members, geopotential and temperature at 850 and 500 hPa, 3 degree grid, every 12 hours",
        attribution=ATTRIBUTION,
        channels=[f"{name}{level}" for name, level in CHANNELS],
        units=[UNITS[name] for name, _ in CHANNELS],
        decoding="value = reference + step * packed",
        statistics=table,
    )
    return group


def _write_packed(group: Any, packed: np.ndarray) -> None:
    from zarr.codecs import BloscCodec

    rows = -(-packed.shape[3] // CHUNK_ROWS) * CHUNK_ROWS
    array = group.create_array(
        "packed",
        shape=packed.shape,
        dtype="uint16",
        chunks=(1, 1, packed.shape[2], CHUNK_ROWS, packed.shape[4]),
        shards=(1, *packed.shape[1:3], rows, packed.shape[4]),
        compressors=BloscCodec(cname="zstd", clevel=9, shuffle="bitshuffle"),
        dimension_names=DIMS,
    )
    array[...] = packed


def main() -> None:
    """Parse SRC and DST, convert, and print the size of what was written."""
    parser = argparse.ArgumentParser(description="Convert the ERA5 ensemble GRIB file to the demo's zarr store.")
    parser.add_argument("source", type=Path, help="GRIB file with z and t at 850 and 500 hPa")
    parser.add_argument("destination", type=Path, help="zarr store to write; replaced if it exists")
    arguments = parser.parse_args()
    convert(arguments.source, arguments.destination)
    size = sum(path.stat().st_size for path in arguments.destination.rglob("*") if path.is_file())
    print(f"{arguments.destination}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
