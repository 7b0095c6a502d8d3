from pathlib import Path

import numpy as np
import pytest
import zarr

from dpzoo.cli import main
from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import GridDataset, GridLoader, Invariants, Stream, describe
from dpzoo.datapipes.grid.grib import convert_grib
from dpzoo.datapipes.grid.writer import GridWriter

eccodes = pytest.importorskip("eccodes")
NAM = Path(__file__).parent / "data/nam_excerpt.grib2"


def write_grib(path, messages):
    """Messages of (short name, level, hour, member, values (3, 4)) on a regular grid of 3 x 4."""
    with path.open("wb") as file:
        for name, level, hour, member, values in messages:
            message = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib1")
            keys = {"Ni": 4, "Nj": 3, "latitudeOfFirstGridPointInDegrees": 50, "latitudeOfLastGridPointInDegrees": 48}
            keys |= {"longitudeOfFirstGridPointInDegrees": 10, "longitudeOfLastGridPointInDegrees": 13}
            keys |= {"iDirectionIncrementInDegrees": 1, "jDirectionIncrementInDegrees": 1, "setLocalDefinition": 1}
            keys |= {"localDefinitionNumber": 1, "number": member, "dataDate": 20200101, "dataTime": 100 * hour}
            keys |= {"shortName": name, "level": level, "bitmapPresent": 1, "missingValue": -1e30, "bitsPerValue": 24}
            for key, value in keys.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, np.nan_to_num(values, nan=-1e30).ravel())
            eccodes.codes_write(message, file)
            eccodes.codes_release(message)
    return path


def made(members=(0, 1), hours=(0, 6), skip=()):
    rng = np.random.default_rng(0)
    out = []
    for member in members:  # member by member, so that times wait for their last channel
        for hour in hours:
            for name, level in (("t", 850), ("t", 500), ("z", 500)):
                values = rng.integers(0, 1000, (3, 4)).astype(np.float64)
                values[1, 2] = np.nan if name == "z" else values[1, 2]
                if (name, level, hour, member) not in skip:
                    out.append((name, level, hour, member, values))
    return out


def test_real_fields_of_a_lambert_grid(tmp_path, capsys):
    assert main(["convert", "grib", str(NAM), str(tmp_path / "nam.zarr"), "--slabs", "5"]) == 0
    assert "nam.zarr: 1 fields" in capsys.readouterr().out
    info = describe(tmp_path / "nam.zarr")
    kinds = ("surface0", "pressureFromGroundLayer18000", "pressureFromGroundLayer9000")
    assert set(info.channels) == {"gh500", "u500", "v500", "t2m", *(f"cape_{kind}" for kind in kinds)}
    assert (info.grid, str(info.times[0])) == ((65, 93), "2018-09-17T00:00:00")
    stream = Stream((tmp_path / "nam.zarr",), ("t2m", "u500", "gh500"))
    dataset = GridDataset({"x": stream}, invariants=Invariants((), ("latitude", "longitude")), cos_zenith=(0,))
    with GridLoader(dataset) as loader:
        (sample,) = loader
    low, high = sample["x"][0].amin((1, 2)), sample["x"][0].amax((1, 2))
    assert 269 < low[0] < high[0] < 315
    assert -40 < low[1] < 0 < 30 < high[1] < 60
    assert 5100 < low[2] < high[2] < 6000
    latitude, longitude = sample["invariants"]
    assert 12.1 < latitude.min() < 12.3 and 57 < latitude.max() < 62  # row 0 is the south
    assert latitude[0, 40] < latitude[64, 40]
    # Temperatures are those of the message, bit for bit in float32.
    with NAM.open("rb") as file:
        while (message := eccodes.codes_grib_new_from_file(file)) is not None:
            if eccodes.codes_get(message, "shortName") == "2t":
                values = eccodes.codes_get_values(message).reshape(65, 93).astype(np.float32)
                longitudes = eccodes.codes_get_array(message, "longitudes").reshape(65, 93)
            eccodes.codes_release(message)
    np.testing.assert_array_equal(sample["x"][0, 0], values)
    np.testing.assert_allclose(longitude, longitudes, rtol=1e-6)


def test_members_times_and_points_without_a_value(tmp_path):
    messages = made()
    (tmp_path / "in").mkdir()
    write_grib(tmp_path / "in" / "a.grib", messages[:7])
    write_grib(tmp_path / "in" / "b.grib", messages[7:])
    assert convert_grib(tmp_path / "in", tmp_path / "a.zarr", channels=("z500", "t850")) == 4
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert group["fields"].shape == (2, 2, 2, 3, 4)
    for name, level, hour, member, values in messages:
        if level == 850 or name == "z":
            place = (member, hour // 6, 0 if name == "z" else 1)
            np.testing.assert_allclose(group["fields"][place], values, rtol=1e-5)
    np.testing.assert_allclose(group["latitude"][...], [50, 49, 48])
    np.testing.assert_allclose(group["longitude"][...], [10, 11, 12, 13])
    assert group["fields"].attrs["units"] == ["m**2 s**-2", "K"]


def test_a_stopped_conversion_goes_on(tmp_path, monkeypatch):
    messages = made(hours=tuple(range(24)), members=(0,))
    source = write_grib(tmp_path / "a.grib", messages)
    write, written = GridWriter.write, []

    def stop_at_20(self, values):
        if len(written) == 20:
            raise KeyboardInterrupt
        written.append(self.done)
        write(self, values)

    monkeypatch.setattr(GridWriter, "write", stop_at_20)
    with pytest.raises(KeyboardInterrupt):
        convert_grib(source, tmp_path / "a.zarr", ("t500",))
    monkeypatch.setattr(GridWriter, "write", lambda self, values: (written.append(self.done), write(self, values)))
    convert_grib(source, tmp_path / "a.zarr", ("t500",))
    assert written == list(range(24))
    found = zarr.open_group(tmp_path / "a.zarr", mode="r")["fields"][:, 0]
    truth = np.stack([values for name, level, *_, values in messages if (name, level) == ("t", 500)])
    np.testing.assert_allclose(found, truth, rtol=1e-5)


def test_bad_input(tmp_path):
    absent = write_grib(tmp_path / "a.grib", made(skip=[("t", 500, 6, 1)]))
    with pytest.raises(DataError, match=r"a.grib: t500 is missing at 2020-01-01T06:00:00, member 1; choose channels"):
        convert_grib(absent, tmp_path / "a.zarr")
    assert not (tmp_path / "a.zarr").exists()
    assert convert_grib(absent, tmp_path / "a.zarr", channels=("t850",)) == 4
    doubled = write_grib(tmp_path / "b.grib", made() + made()[:1])
    with pytest.raises(DataError, match="t850 is there 2 times at 2020-01-01T00:00:00, member 0"):
        convert_grib(doubled, tmp_path / "b.zarr")
    with pytest.raises(DataError, match="has no channel w; it has t850, t500, z500"):
        convert_grib(absent, tmp_path / "b.zarr", channels=("w",))
    (tmp_path / "c.grib").write_bytes(absent.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"c.grib is damaged or not a GRIB file"):
        convert_grib(tmp_path / "c.grib", tmp_path / "c.zarr")
    (tmp_path / "d.grib").write_bytes(b"nothing here")
    with pytest.raises(DataError, match=r"d.grib holds no GRIB message"):
        convert_grib(tmp_path / "d.grib", tmp_path / "c.zarr")
    with pytest.raises(DataError, match="is no GRIB file and no folder of them"):
        convert_grib(tmp_path / "nothing", tmp_path / "c.zarr")
