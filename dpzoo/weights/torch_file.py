"""Files of ``torch.save``: read with ``weights_only``, tensors left in the file until they are asked for.

A zip file (torch >= 1.6) is unpickled with fake tensors, which know where in the file their storage lies. The older
format has no such places and is read as a whole.
"""

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dpzoo.weights.archives import Member, zip_members
from dpzoo.weights.regions import Region, RegionSource
from dpzoo.weights.selection import Selection, select
from dpzoo.weights.source import DamagedWeightsError, UnsafeWeightsError, WeightsError, WeightSource
from dpzoo.weights.tensors import TensorSource

# Plain bags of values that training scripts put beside the weights; unpickling them calls nothing.
HARMLESS = (argparse.Namespace,)


def open_torch(
    path: Path, config: Mapping[str, Any] | None = None, key: str | None = None, ema: bool = True
) -> WeightSource:
    """Open a ``.pt``, ``.pth`` or ``.bin`` file; of training files, the state dict that :func:`select` chooses.

    Raises:
        UnsafeWeightsError: the file holds other objects than tensors and plain containers, such as a whole module.
        DamagedWeightsError: truncated or no such file.
        WeightsError: no tensors under ``key``, or of a kind that is not supported.
    """
    if not zipfile.is_zipfile(path):
        chosen = select(_unpickle(path, path), str(path), key, ema)
        return TensorSource({n: _plain(path, n, t) for n, t in chosen.tensors.items()}, _origin(path, chosen), config)
    return open_torch_zip(Member(path, path.name, 0, path.stat().st_size), config, key, ema)


def open_torch_zip(
    member: Member, config: Mapping[str, Any] | None = None, key: str | None = None, ema: bool = True
) -> RegionSource:
    """:func:`open_torch` for a torch zip file that lies inside another file."""
    chosen = select(read_tree(member), str(member.archive), key, ema)
    return RegionSource(chosen.tensors, _origin(member.archive, chosen), config)


def read_tree(member: Member) -> Any:
    """What a torch zip file holds, with a :class:`Region` for each tensor."""
    members = zip_members(member.archive, member.start, member.size)
    _check_kind(member.archive, members)
    with member.open() as file, FakeTensorMode():
        tree = _unpickle(member.archive, file)
    return _with_regions(tree, member, "")


def _unpickle(path: Path, file: Any) -> Any:
    try:
        with torch.serialization.safe_globals(list(HARMLESS)):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DamagedWeightsError(f"{path} cannot be read as a torch file ({reason}); was it cut off?") from None


def _refusal(path: Path, reason: str) -> WeightsError:
    named = re.search(r"GLOBAL ([\w.]+)", reason)
    if named is None and not re.search(r"[Cc]an only|Only persistent_load|persistent id|blocked", reason):
        return DamagedWeightsError(f"{path} cannot be unpickled ({reason[:120]}); is it a file of weights, and whole?")
    what = named[1] if named else "objects of other kinds"
    return UnsafeWeightsError(
        f"{path} holds {what}, not only tensors in plain containers: unpickling it runs code of its author, so it is "
        "refused. Ask for a file of the state dict; or, if you trust the author, take the tensors out with "
        f"`dpzoo convert pickle --unsafe-pickle {path.name} OUT.safetensors`"
    )


def _check_kind(path: Path, members: Mapping[str, Member]) -> None:
    names = {name.partition("/")[2] for name in members}
    if "constants.pkl" in names or any(name.startswith("code/") for name in names):
        raise UnsafeWeightsError(f"{path} is a TorchScript program; save its state_dict() with torch.save instead")
    if "data.pkl" not in names:
        raise DamagedWeightsError(f"{path} is a zip file without data.pkl: not written by torch.save, or damaged")
    order = next((m for name, m in members.items() if name.endswith("/byteorder")), None)
    if order is not None:
        with order.open() as file:
            if (file.read(16) or b"").strip() != b"little":
                raise WeightsError(f"{path} was written on a big-endian machine; save it again on a little-endian one")


def _with_regions(value: Any, member: Member, name: str) -> Any:
    if isinstance(value, Tensor):
        return _region(_plain(member.archive, name, value), member, name)
    if isinstance(value, Mapping):
        return {key: _with_regions(item, member, f"{name}.{key}" if name else str(key)) for key, item in value.items()}
    return value


def _region(tensor: Tensor, member: Member, name: str) -> Region:
    base = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if base is None:
        raise WeightsError(f"{member.archive}: {name} has no values in the file (device {tensor.device})")
    start = member.start + base + int(tensor.storage_offset()) * tensor.dtype.itemsize
    shape, stride = tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride())
    region = Region(member.archive, start, shape, stride, tensor.dtype)
    if start + region.span > member.start + member.size:
        raise DamagedWeightsError(f"{member.archive}: {name} {shape} reaches beyond the end of the file")
    return region


def _plain(path: Path, name: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        raise WeightsError(f"{path}: {name} is sparse, quantized or no tensor at all; only dense tensors can be loaded")
    return tensor


def _origin(path: Path, chosen: Selection) -> str:
    return f"{path}[{chosen.key}]" if chosen.key else str(path)
