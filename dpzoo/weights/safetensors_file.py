"""The header of a safetensors file: 8 bytes of length (little-endian), JSON, then the tensors without gaps.

Format: https://github.com/huggingface/safetensors. The header is checked as strictly as the format's own reader does:
it is the whole of what a file can say, so a file that passes cannot do harm.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpzoo.weights.regions import Region, RegionSource, row_major
from dpzoo.weights.source import DamagedWeightsError, WeightsError

MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def open_safetensors(path: Path, config: Mapping[str, Any] | None = None) -> RegionSource:
    """Open a safetensors file; only its header is read.

    Raises:
        DamagedWeightsError: truncated, or a header that does not describe the bytes behind it.
        WeightsError: a dtype that torch has no name for.
    """
    regions, _ = read_header(path)
    return RegionSource(regions, str(path), config)


def read_header(path: Path) -> tuple[dict[str, Region], dict[str, str]]:
    """Regions by name, and the file's own metadata."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedWeightsError(
                f"{path}: a header of {length} bytes does not fit into a file of {size}; it is cut off or no "
                "safetensors file"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
        metadata = header.pop("__metadata__", {})
        rows = [(name, _region(path, 8 + length, entry), entry["data_offsets"]) for name, entry in header.items()]
    except WeightsError as error:
        raise type(error)(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedWeightsError(f"{path}: the header cannot be read: {type(error).__name__}: {error}") from None
    end = 0
    for name, _, (first, last) in sorted(rows, key=lambda row: row[2]):
        if first != end:
            raise DamagedWeightsError(
                f"{path}: {name} begins at byte {first} of the data, the tensor before ends at {end}"
            )
        end = last
    if size != 8 + length + end:
        raise DamagedWeightsError(
            f"{path} has {size} bytes, its header describes {8 + length + end}; was it cut off while it was copied?"
        )
    return {name: region for name, region, _ in rows}, metadata


def _region(path: Path, base: int, entry: Mapping[str, Any]) -> Region:
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise DamagedWeightsError(f"sizes and offsets are whole numbers, got {shape} at {first}:{last}")
    if entry["dtype"] not in DTYPES:
        raise WeightsError(f"dtype {entry['dtype']} is not supported; known are {', '.join(DTYPES)}")
    dtype = DTYPES[entry["dtype"]]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise DamagedWeightsError(f"{entry['dtype']} {list(shape)} does not have the {last - first} bytes it is given")
    return Region(path, base + first, shape, row_major(shape), dtype)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DamagedWeightsError(f"the header names {name!r} twice")
        found[name] = value
    return found
