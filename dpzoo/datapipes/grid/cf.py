"""The part of the CF conventions that readers need: times, packed values, and what marks a missing value."""

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpzoo.datapipes.errors import DataError

_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
    "nanoseconds": 1e-9,
}
_GREGORIAN = ("standard", "gregorian", "proleptic_gregorian")


def decode_times(values: np.ndarray, attributes: Mapping[str, Any], where: str) -> np.ndarray:
    """Times `(n,)` as datetime64[s], rounded to the second.

    Args:
        values: numbers with `units` such as "hours since 2020-01-01", or datetime64 already.
        attributes: of the variable (`units`, `calendar`).
        where: store and variable, for errors.

    Raises:
        DataError: no units, unknown units, or a calendar that is not Gregorian.
    """
    if values.dtype.kind == "M":
        return values.astype("datetime64[s]")
    units, calendar = str(attributes.get("units", "")), str(attributes.get("calendar", "standard")).lower()
    unit, since, reference = units.partition(" since ")
    if not since or unit.strip().lower() not in _SECONDS:
        raise DataError(f"{where}: times need units such as 'hours since 2020-01-01 00:00', found {units!r}")
    if calendar not in _GREGORIAN:
        raise DataError(f"{where}: calendar {calendar!r} is not Gregorian: write the times as Gregorian dates")
    seconds = np.rint(values.astype(np.float64) * _SECONDS[unit.strip().lower()]).astype("timedelta64[s]")
    if values.dtype.kind in "iu" and isinstance(_SECONDS[unit.strip().lower()], int):
        seconds = (values.astype(np.int64) * _SECONDS[unit.strip().lower()]).astype("timedelta64[s]")
    return _reference(reference, calendar, where) + seconds


def _reference(text: str, calendar: str, where: str) -> np.datetime64:
    date, _, clock = text.strip().replace("T", " ").removesuffix("Z").removesuffix(" UTC").strip().partition(" ")
    try:
        year, month, day = (int(part) for part in date.split("-"))
        hours, minutes, seconds = ([*map(float, clock.split(":")), 0.0, 0.0] if clock.strip() else [0.0] * 3)[:3]
    except ValueError as error:
        raise DataError(f"{where}: cannot read the reference time {text!r} ({error})") from error
    of_day = np.timedelta64(round(hours * 3600 + minutes * 60 + seconds), "s")
    if calendar != "proleptic_gregorian" and (year, month, day) < (1582, 10, 15):
        # The standard calendar is Julian until 1582; its day numbers count from 4713 BC (Julian day of 1970-01-01).
        a = (14 - month) // 12
        y, m = year + 4800 - a, month + 12 * a - 3
        julian_day = day + (153 * m + 2) // 5 + 365 * y + y // 4 - 32083
        return np.datetime64(julian_day - 2440588, "D").astype("datetime64[s]") + of_day
    return np.datetime64(f"{year:04d}-{month:02d}-{day:02d}", "s") + of_day


def decode_values(
    raw: np.ndarray, attributes: Mapping[str, Any], invalid_values: Sequence[float] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Physical values in float32, and a mask that is True where a value is valid.

    Invalid is what is not finite, equals `_FillValue`, `missing_value` or one of `invalid_values` (as stored), or lies
    outside `valid_range` / `valid_min` / `valid_max`.
    """
    raw, attributes = _unsigned(raw, attributes)
    valid = np.isfinite(raw) if raw.dtype.kind == "f" else np.ones(raw.shape, bool)
    for marker in (*_markers(attributes), *invalid_values):
        valid &= raw != (np.asarray(marker).astype(raw.dtype) if raw.dtype.kind == "f" else marker)
    low, high = _valid_range(attributes)
    if low is not None:
        valid &= raw >= low
    if high is not None:
        valid &= raw <= high
    scale, offset = attributes.get("scale_factor", 1), attributes.get("add_offset", 0)
    if scale != 1 or offset != 0:
        return (raw.astype(np.float64) * scale + offset).astype(np.float32), valid
    with np.errstate(over="ignore", invalid="ignore"):
        values = raw.astype(np.float32)
    # A double beyond the range of float32 is no number that a model can use.
    return values, valid & np.isfinite(values) if raw.dtype == np.float64 else valid


def _unsigned(raw: np.ndarray, attributes: Mapping[str, Any]) -> tuple[np.ndarray, Mapping[str, Any]]:
    """NetCDF 3 and GOES keep unsigned integers as signed ones and say so; the markers are meant unsigned too."""
    if raw.dtype.kind != "i" or str(attributes.get("_Unsigned", "")).lower() != "true":
        return raw, attributes
    bits = 8 * raw.dtype.itemsize
    markers = ("_FillValue", "missing_value", "valid_min", "valid_max", "valid_range")
    told = {k: np.asarray(v) % (1 << bits) for k, v in attributes.items() if k in markers}
    return raw.view(f"u{raw.dtype.itemsize}"), {**attributes, **{k: v.tolist() for k, v in told.items()}}


def _markers(attributes: Mapping[str, Any]) -> list[float]:
    out: list[float] = []
    for name in ("_FillValue", "missing_value"):
        given = attributes.get(name)
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, str):
                value = _from_base64(value)
            if isinstance(value, (int, float)) and value == value:
                out.append(value)
    return out


def _from_base64(text: str) -> float | None:
    """xarray keeps floating-point fill values of zarr 3 as base64 of a little-endian double."""
    try:
        return float(struct.unpack("<d", base64.b64decode(text, validate=True))[0])
    except (ValueError, struct.error):
        return None


def _valid_range(attributes: Mapping[str, Any]) -> tuple[float | None, float | None]:
    pair = attributes.get("valid_range")
    if isinstance(pair, (list, tuple)) and len(pair) == 2:
        return pair[0], pair[1]
    return attributes.get("valid_min"), attributes.get("valid_max")
