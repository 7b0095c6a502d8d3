"""A GRIB file made on the spot goes through the converter and comes back bit for bit."""

import numpy as np
import pytest

from dpzoo.demo.convert_era5 import CHANNELS, convert
from dpzoo.demo.data import open_store

eccodes = pytest.importorskip("eccodes", reason="the converter reads GRIB with eccodes (extra: data)")

PARAMETERS = {"z": 129, "t": 130}


def write_message(stream, name, level, member, hour, values):
    message = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib1")
    settings = {"bitsPerValue": 16, "paramId": PARAMETERS[name], "level": level, "dataDate": 20170101, "dataTime": hour}
    settings |= {"localDefinitionNumber": 1, "number": member}
    for key, value in settings.items():
        eccodes.codes_set(message, key, value)
    eccodes.codes_set_values(message, values.ravel())
    eccodes.codes_write(message, stream)
    packed = eccodes.codes_get_values(message).reshape(values.shape)
    eccodes.codes_release(message)
    return packed


def make_grib(path, members=2, hours=(0, 1200), skip=None):
    generator = np.random.default_rng(0)
    written = np.empty((members, len(hours), len(CHANNELS), 31, 16))
    with path.open("wb") as stream:
        for member, (slot, hour), (channel, (name, level)) in (
            (m, h, c) for m in range(members) for h in enumerate(hours) for c in enumerate(CHANNELS)
        ):
            if (member, slot, channel) == skip:
                continue
            values = generator.normal(250, 20, (31, 16)) * (50 if name == "z" else 1)
            written[member, slot, channel] = write_message(stream, name, level, member, hour, values)
    return written


def test_store_decodes_to_the_values_of_the_grib(tmp_path):
    written = make_grib(tmp_path / "small.grib")
    convert(tmp_path / "small.grib", tmp_path / "small.zarr")
    store = open_store(tmp_path / "small.zarr")
    scale = (..., None, None)
    decoded = store["reference"][...][scale] + store["step"][...][scale] * store["packed"][...].astype(np.float64)
    assert np.array_equal(decoded, written)
    assert store["time"][...].tolist() == [412008, 412020]
    assert store["number"][...].tolist() == [0, 1]


def test_a_missing_field_is_an_error(tmp_path):
    make_grib(tmp_path / "short.grib", skip=(1, 1, 3))
    with pytest.raises(ValueError, match="found 15 fields for 2 members x 2 times x 4 channels"):
        convert(tmp_path / "short.grib", tmp_path / "short.zarr")


def test_a_file_without_the_fields_is_an_error(tmp_path):
    (tmp_path / "empty.grib").touch()
    with pytest.raises(ValueError, match="holds none of the fields"):
        convert(tmp_path / "empty.grib", tmp_path / "empty.zarr")
