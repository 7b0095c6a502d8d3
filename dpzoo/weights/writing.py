"""Write a folder that loads anywhere: ``config.json`` and plain safetensors, one file or several with an index."""

import json
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dpzoo.weights.source import WeightsError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000


def model_config(
    model: str, arguments: Mapping[str, Any], dtype: torch.dtype | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The contents of ``config.json``: how to build the model that the weights belong to.

    Args:
        model: A registered name, or the name of one of the zoo's classes.
        arguments: Keyword arguments of either; all that JSON can hold.
        dtype: Of the floating-point weights.
        extra: Anything else that a reader may want to know; loading ignores it.

    Raises:
        WeightsError: arguments that JSON cannot hold; the message names them.
    """
    config: dict[str, Any] = {"library_name": "dpzoo", "dpzoo_version": _version(), "model": model}
    config["arguments"] = {name: _jsonable(name, value) for name, value in arguments.items()}
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    if extra:
        config["extra"] = _jsonable("extra", dict(extra))
    return config


def write_folder(
    folder: str | Path,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write weights and configuration; a reader never sees half a file.

    Args:
        state: Plain whole tensors by name. Names that share one tensor are stored once each under the first name, and
            found again on loading if the model ties them.
        max_shard_bytes: Weights of more bytes are split into several files.

    Returns:
        The folder.

    Raises:
        WeightsError: a tensor that is sharded over ranks, sparse, or without values (meta).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = distinct_tensors(state)
    shards = list(_split(tensors, max_shard_bytes))
    names = [WEIGHTS] if len(shards) == 1 else [_part(i, len(shards)) for i in range(len(shards))]
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):  # of an earlier writing, split in another way
        if old.name not in names:
            old.unlink(missing_ok=True)
    for file, shard in zip(names, shards, strict=True):
        _replace(folder / file, lambda path, shard=shard: save_file(shard, path, metadata={"format": "pt"}))
    if len(shards) > 1:
        table = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        size = sum(t.nbytes for t in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": table})
    _write_json(folder / CONFIG, config)
    return folder


def distinct_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU, each storage once, which is all that safetensors takes."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        if hasattr(tensor, "device_mesh") or tensor.layout is not torch.strided or tensor.is_meta:
            raise WeightsError(f"{name} is sharded, sparse or on the meta device; gather it first (full_tensor())")
        value = tensor.detach()
        place = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, str(value.device))
        if value.numel() and place in seen:
            continue
        seen.add(place)
        plain = value.to("cpu", memory_format=torch.contiguous_format).contiguous()
        shares = plain.untyped_storage().nbytes() != plain.nbytes
        found[name] = plain.clone() if shares else plain
    return found


def _split(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _part(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _replace(path: Path, write: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=False) + "\n"
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _jsonable(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_jsonable(name, item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _jsonable(f"{name}.{key}", item) for key, item in value.items()}
    raise WeightsError(f"the argument {name} is a {type(value).__name__}, which config.json cannot hold")


def _version() -> str:
    try:
        return version("dpzoo")
    except PackageNotFoundError:
        return "unknown"
