"""Read a block of some channels at some times from an open store, decoded: what every layout comes down to."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.cf import decode_values
from dpzoo.datapipes.grid.source import GridSource
from dpzoo.datapipes.grid.store import Channel


class Box(NamedTuple):
    """Rows `[top, bottom)` and columns `[left, right)` of a store's grid."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.bottom - self.top, self.right - self.left


def read_channels(
    source: GridSource,
    channels: Sequence[Channel],
    times: Sequence[int],
    member: int,
    box: Box,
    invalid_values: Sequence[float] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Values `(time, channel, row, column)` in float32 and a mask of the same shape, True where they are valid.

    Args:
        channels: of this store, in the order wanted; static ones are repeated for every time.
        times: indices along the time dim.
        member: index along the ensemble dim.
        box: rows and columns.
        invalid_values: numbers that mean "no value", as stored.
    """
    values = np.empty((len(times), len(channels), *box.shape), np.float32)
    valid = np.empty(values.shape, bool)
    if 0 in values.shape:
        return values, valid
    by_variable: dict[str, list[int]] = {}
    for position, channel in enumerate(channels):
        by_variable.setdefault(channel.variable, []).append(position)
    for variable, positions in by_variable.items():
        of_variable = [channels[p] for p in positions]
        for frames, indices in _runs(times):
            part = _read_run(source, variable, of_variable, indices, member, box, invalid_values)
            for frame, index in frames:
                values[frame, positions], valid[frame, positions] = part[0][index], part[1][index]
    return values, valid


def _runs(times: Sequence[int]) -> list[tuple[list[tuple[int, int]], tuple[int, int]]]:
    """Ranges of time indices to read at once, each with (position in `times`, index inside the range)."""
    out: list[tuple[list[tuple[int, int]], tuple[int, int]]] = []
    for position in sorted(range(len(times)), key=lambda p: times[p]):
        index = times[position]
        if out and index <= out[-1][1][1]:
            frames, (lo, hi) = out[-1]
            frames.append((position, index - lo))
            out[-1] = (frames, (lo, max(hi, index + 1)))
        else:
            out.append(([(position, 0)], (index, index + 1)))
    return out


def _read_run(
    source: GridSource,
    variable: str,
    channels: Sequence[Channel],
    times: tuple[int, int],
    member: int,
    box: Box,
    invalid_values: Sequence[float],
) -> tuple[np.ndarray, np.ndarray]:
    """`(time, channel, row, column)` of channels of one variable at the time indices `[lo, hi)`."""
    like = channels[0]
    places = [c.place for c in channels]
    span = {
        "time": slice(*times),
        "member": slice(member, member + 1),
        "channel": slice(min(places), max(places) + 1),
        "level": slice(min(places), max(places) + 1),
        "y": slice(box.top, box.bottom),
        "x": slice(box.left, box.right),
    }
    index = tuple(
        slice(f, f + 1) if role == "fixed" else span[role] for role, f in zip(like.roles, like.fixed, strict=True)
    )
    raw = source.read(variable, index)
    attributes = source.variables[variable].attributes
    if source.attributes.get("decoding") and "packed" in source.variables:
        decoded = _unpacked(source, raw, like, index)
        valid = np.isfinite(decoded)
    else:
        decoded, valid = decode_values(raw, attributes, invalid_values)
    picked = [p - min(places) for p in places]
    return tuple(_ordered(a, like.roles, times)[:, picked] for a in (decoded, valid))  # type: ignore[return-value]


def _unpacked(source: GridSource, raw: np.ndarray, channel: Channel, index: tuple[slice, ...]) -> np.ndarray:
    """Lossless 16-bit fields: a reference and a step per field, over the leading dims."""
    leading = len(source.variables["reference"].dims)
    if channel.roles[leading:] != ("y", "x"):
        raise DataError(f"{source.path}: a packed store has its grid last, found {source.variables['packed'].dims}")
    reference, step = (source.read(n, index[:leading])[..., None, None] for n in ("reference", "step"))
    return (reference + step * raw.astype(np.float64)).astype(np.float32)


def _ordered(array: np.ndarray, roles: tuple[str, ...], times: tuple[int, int]) -> np.ndarray:
    """Dims as `(time, channel, y, x)`; static variables are repeated, dims of one value vanish."""
    where: Mapping[str, int] = {role: dim for dim, role in enumerate(roles)}
    depth = where.get("channel", where.get("level"))
    wanted = [where.get("time"), depth, where["y"], where["x"]]
    kept = [dim for dim in wanted if dim is not None]
    others = [dim for dim in range(array.ndim) if dim not in kept]
    out: np.ndarray = array.transpose(*others, *kept).reshape([array.shape[dim] for dim in kept])
    if depth is None:
        out = np.expand_dims(out, 0 if wanted[0] is None else 1)
    if wanted[0] is None:
        out = np.broadcast_to(out, (times[1] - times[0], *out.shape))
    return out


def check_chunks(source: Any, channels: Sequence[str], fill_is_allowed: bool) -> None:
    """Raise `DataError` when a zarr store handed out fill values for chunks that should be there."""
    absent = getattr(source, "absent", [])
    if not absent or (fill_is_allowed and not source.writes_all_chunks):
        return
    advice = (
        "it was written whole, so this one is lost: write the store again"
        if source.writes_all_chunks
        else "either the store is damaged, or its writer leaves out chunks that hold only the fill value: then pass "
        'absent_chunks="fill"'
    )
    raise DataError(
        f"{source.path}: chunk {absent[0]} is missing ({len(absent)} in this read of {', '.join(channels[:5])}), zarr "
        f"would read fill values; {advice}"
    )
