"""Folders of ``torch.distributed.checkpoint``: chunks of tensors in files, and ``.metadata``, which says where.

``.metadata`` is a pickle. It is read by an unpickler that knows the few classes such a file has, as empty records of
its own, and can neither import nor call anything else. A slab is put together from the chunks that overlap it.
"""

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from dpzoo.weights.archives import Member
from dpzoo.weights.regions import Region, bounds_of, read_region
from dpzoo.weights.selection import select
from dpzoo.weights.source import DamagedWeightsError, Slab, UnsafeWeightsError, WeightsError
from dpzoo.weights.torch_file import read_tree

METADATA = ".metadata"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and the bytes it is stored in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    member: Member


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class DcpSource:
    """Tensors of a DCP folder, behind the protocol :class:`~dpzoo.weights.source.WeightSource`."""

    def __init__(
        self, tensors: Mapping[str, StoredTensor], origin: str, config: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors, self.origin, self.config = dict(tensors), origin, config
        self._places: dict[Member, Region] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def sliceable(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        stored = self._tensors[name]
        bounds = bounds_of(slab, stored.shape)
        out = torch.empty([b - a for a, b in bounds], dtype=stored.dtype)
        for chunk in stored.chunks:
            common = [
                (max(a, o), min(b, o + n)) for (a, b), o, n in zip(bounds, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(a < b for a, b in common):
                inside = tuple(slice(a - o, b - o) for (a, b), o in zip(common, chunk.offsets, strict=True))
                target = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(common, bounds, strict=True))
                out[target] = read_region(self._place(name, chunk), inside)
        return out

    def _place(self, name: str, chunk: Chunk) -> Region:
        if chunk.member not in self._places:
            region = read_tree(chunk.member)
            if not isinstance(region, Region) or region.shape != chunk.sizes:
                raise DamagedWeightsError(f"{chunk.member.archive}: the chunk of {name} is not a tensor {chunk.sizes}")
            self._places[chunk.member] = region
        return self._places[chunk.member]


def open_dcp(
    folder: Path, *, config: Mapping[str, Any] | None = None, key: str | None = None, ema: bool = True
) -> DcpSource:
    """Open a DCP folder.

    Raises:
        UnsafeWeightsError: ``.metadata`` holds what such a file never does, or names files outside the folder.
        DamagedWeightsError: files missing, truncated, or chunks that do not make up their tensor.
    """
    metadata = _read_metadata(folder / METADATA)
    try:
        places = {
            (index.fqn, _ints(getattr(index, "offset", None))): info for index, info in metadata.storage_data.items()
        }
        tensors = {
            name: _stored(folder, name, entry, places)
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
        paths = getattr(metadata, "planner_data", None) or {}
        tree: dict[str, Any] = {}
        for name, tensor in tensors.items():
            _put(tree, paths.get(name, (name,)), tensor)
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedWeightsError(f"{folder / METADATA} is incomplete: {type(error).__name__}: {error}") from None
    chosen = select(tree, str(folder), key, ema)
    return DcpSource(chosen.tensors, f"{folder}[{chosen.key}]" if chosen.key else str(folder), config)


def _stored(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> StoredTensor:
    shape, found = _ints(entry.size), []
    for box in entry.chunks:
        offsets, sizes = _ints(box.offsets), _ints(box.sizes)
        assert offsets is not None and sizes is not None
        info = places[name, offsets]
        if math.prod(sizes):
            found.append(Chunk(offsets, sizes, _member(folder, name, info)))
    assert shape is not None
    if sum(math.prod(chunk.sizes) for chunk in found) != math.prod(shape):
        raise DamagedWeightsError(f"{folder}: the chunks of {name} do not make up its shape {shape}")
    return StoredTensor(shape, entry.properties.dtype, tuple(found))


def _member(folder: Path, name: str, info: Any) -> Member:
    relative = str(info.relative_path)
    if PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts or "\\" in relative:
        raise UnsafeWeightsError(f"{folder}: {name} is said to lie in {relative!r}, outside the folder")
    path = folder / relative
    if getattr(info, "transform_descriptors", None):
        raise WeightsError(f"{path}: stored with {info.transform_descriptors}; only untransformed chunks can be read")
    if not path.is_file():
        raise DamagedWeightsError(f"{path}, where {name} lies, is missing")
    if info.offset < 0 or info.offset + info.length > path.stat().st_size:
        raise DamagedWeightsError(f"{path} ends before {name} does (byte {info.offset + info.length}); was it cut off?")
    return Member(path, name, info.offset, info.length)


def _put(tree: dict[str, Any], path: Any, tensor: StoredTensor) -> None:
    *above, last = (str(part) for part in path)
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = tensor


def _ints(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(int(n) for n in value)


# ---------------------------------------------------------------------- the pickle
class _Record:
    """Stands for every class of the metadata: takes its fields, does nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        fields = state if isinstance(state, dict) else {}
        if isinstance(state, tuple) and state and isinstance(state[0], torch.dtype):  # TensorProperties
            fields = {"dtype": state[0]}
        self.__dict__.update(fields)


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint.") or (module, name) == (
            "torch.serialization",
            "_get_layout",
        ):
            return _Record
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "pathlib" or module.startswith("pathlib."):
            return _path
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise UnsafeWeightsError(f"it names {module}.{name}, which no file of this kind needs")


def _read_metadata(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file).load()
    except UnsafeWeightsError as error:
        raise UnsafeWeightsError(f"{path}: {error}; refused") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedWeightsError(f"{path} cannot be read ({type(error).__name__}: {error}); was it cut off?") from None
