import math

import numpy as np
import pytest

from dpzoo.datapipes import DataError
from dpzoo.datapipes.grid import aligned_sizes, cos_zenith
from dpzoo.datapipes.grid.cf import decode_times, decode_values


@pytest.mark.parametrize("total", [1024, 1056, 512, 60])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 20])
@pytest.mark.parametrize(
    ("multiple", "chunk", "start"), [(1, 1, 0), (4, 128, 0), (4, 66, 6), (12, 5, 0), (4, 10**6, 3)]
)
def test_borders_are_whole_patches_and_pieces_are_even(total, ranks, multiple, chunk, start):
    if total % multiple:
        with pytest.raises(DataError, match=f"not divisible by {multiple}"):
            aligned_sizes(total, ranks, multiple, chunk, start)
        return
    sizes = aligned_sizes(total, ranks, multiple, chunk, start)
    assert (sum(sizes), len(sizes)) == (total, ranks)
    assert all(size >= 0 and size % multiple == 0 for size in sizes)
    finest = -(-total // multiple // ranks) * multiple
    assert max(sizes) <= 1.0625 * finest


def test_chunk_borders_are_taken_where_they_cost_little():
    assert aligned_sizes(1024, 8, 8, chunk=128) == (128,) * 8
    assert aligned_sizes(1000, 4, 4, chunk=128, slack=0.1) == (256, 256, 256, 232)
    assert aligned_sizes(1000, 4, 4, chunk=128) == (256, 256, 256, 232)
    assert aligned_sizes(1000, 4, 4, chunk=300) == (252, 252, 248, 248)
    assert aligned_sizes(100, 2, 4, chunk=32, start=12) == (52, 48)  # the store's row 64
    assert aligned_sizes(8, 4, 4) == (4, 4, 0, 0)


@pytest.mark.parametrize(
    ("values", "units", "calendar", "truth"),
    [
        (np.array([0, 36]), "hours since 2020-02-28", "standard", ["2020-02-28T00", "2020-02-29T12"]),
        (np.array([0.5]), "days since 2020-01-01 12:00:00", "gregorian", ["2020-01-02T00"]),
        (np.array([-1]), "Seconds since 2020-01-01T00:00:00Z", "proleptic_gregorian", ["2019-12-31T23:59:59"]),
        (np.array([90.0]), "minutes since 2020-1-1 0:0:0.0", "standard", ["2020-01-01T01:30"]),
        # The day before 1582-10-15 is 1582-10-04 in the standard calendar; day 0 of 1-1-1 is two days earlier there.
        (np.array([0]), "days since 1-1-1", "standard", ["0000-12-30"]),
        (np.array([0]), "days since 0001-01-01", "proleptic_gregorian", ["0001-01-01"]),
        (np.array([1]), "days since 1582-10-04", "standard", ["1582-10-15"]),
    ],
)
def test_times(values, units, calendar, truth):
    found = decode_times(values, {"units": units, "calendar": calendar}, "a")
    np.testing.assert_array_equal(found, np.array(truth, "datetime64[s]"))


def test_values_and_what_marks_a_missing_one():
    raw = np.array([0, 7, -5, 100], np.int16)
    values, valid = decode_values(
        raw, {"scale_factor": 0.1, "add_offset": 2.0, "_FillValue": -5, "valid_max": 50}, (7,)
    )
    np.testing.assert_allclose(values, [2.0, 2.7, 1.5, 12.0], rtol=1e-6)
    assert valid.tolist() == [True, False, False, False]
    values, valid = decode_values(np.array([1.0, np.nan, np.inf, 9e30, 1e300]), {"missing_value": 9e30})
    assert valid.tolist() == [True, False, False, False, False]
    base64_of_minus_99 = "AAAAAADAWMA="
    _, valid = decode_values(np.array([-99, 0], np.float32), {"_FillValue": base64_of_minus_99})
    assert valid.tolist() == [False, True]
    _, valid = decode_values(np.array([1e20, 0], np.float32), {"_FillValue": 1e20})
    assert valid.tolist() == [False, True]
    _, valid = decode_values(np.array([3, 4], np.int8), {"valid_range": [0, 3]})
    assert valid.tolist() == [True, False]


def almanac(time: np.datetime64, latitude: float, longitude: float) -> float:
    """The low-precision formulas of the Astronomical Almanac (0.01 degrees), through the sun's right ascension."""
    n = (time - np.datetime64("2000-01-01T12:00:00", "s")) / np.timedelta64(1, "D")
    mean, anomaly = math.radians(280.460 + 0.9856474 * n), math.radians(357.528 + 0.9856003 * n)
    ecliptic = mean + math.radians(1.915 * math.sin(anomaly) + 0.020 * math.sin(2 * anomaly))
    tilt = math.radians(23.439 - 0.0000004 * n)
    ascension = math.atan2(math.cos(tilt) * math.sin(ecliptic), math.cos(ecliptic))
    declination = math.asin(math.sin(tilt) * math.sin(ecliptic))
    sidereal = math.radians((18.697374558 + 24.06570982441908 * n) * 15)
    hour = sidereal + math.radians(longitude) - ascension
    phi = math.radians(latitude)
    return math.sin(phi) * math.sin(declination) + math.cos(phi) * math.cos(declination) * math.cos(hour)


def test_the_sun_is_where_the_almanac_has_it():
    rng = np.random.default_rng(0)
    for _ in range(300):
        time = np.datetime64("1990-01-01T00:00:00", "s") + np.timedelta64(int(rng.integers(0, 40 * 365 * 86400)), "s")
        latitude, longitude = float(rng.uniform(-90, 90)), float(rng.uniform(-180, 360))
        found = cos_zenith(time, np.array(latitude), np.array(longitude))
        assert abs(float(found) - almanac(time, latitude, longitude)) < 0.01
