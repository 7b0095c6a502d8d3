"""Take the tensors out of a pickle that holds a whole module: ``python -m dpzoo.weights.unpickle_apart IN OUT``.

Such files (``torch.save(model)``; Transolver's, EDM's) name classes and functions of their author. Here every name but
those that rebuild a tensor stands for an empty class, so that nothing is imported or called; what remains is the tree
of modules with their parameters and buffers, which is written as safetensors. It is meant to be run as a process of its
own, for files whose author one trusts: a pickle can still ask for any amount of memory and time.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dpzoo.weights.source import WeightsError
from dpzoo.weights.writing import distinct_tensors

REBUILDS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")


_CONTAINERS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    **{(home, kind.__name__): kind for home in ("builtins", "__builtin__") for kind in (set, frozenset, dict, list)},
}


class Stub:
    """Stands for whatever a pickle names; keeps what it is given."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.given = values

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                self.__dict__.update(part)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a class that derives from dict."""

    def append(self, value: Any) -> None:
        """Of a class that derives from list."""

    extend = append


class StubbingUnpickler(pickle.Unpickler):
    """Finds nothing but what rebuilds tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in REBUILDS:
            return getattr(torch._utils, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in (("torch", "Size"), ("torch", "device")):
            return getattr(torch, name)
        if (module, name) in _CONTAINERS:
            return _CONTAINERS[module, name]
        return type(name, (Stub,), {"__module__": module})


def _storage_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _load(file: Any, **options: Any) -> Any:
    return StubbingUnpickler(file, **options).load()


# What torch.load asks of the module it is given.
_PICKLE = types.SimpleNamespace(
    Unpickler=StubbingUnpickler, load=_load, __name__="pickle", PickleError=pickle.PickleError
)


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Parameters and buffers of the modules in a file, and tensors in its dicts, by dotted name.

    Raises:
        WeightsError: it cannot be unpickled, or has no tensors.
    """
    try:
        tree = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PICKLE)
    except Exception as first:  # no file of torch.save: a plain pickle
        try:
            with open(path, "rb") as file:
                tree = _load(file)
        except Exception as error:
            raise WeightsError(f"{path} cannot be unpickled: {error} (as a torch file: {first})") from None
    found = dict(_walk(tree, "", frozenset()))
    if not found:
        raise WeightsError(f"{path} holds no tensors in modules or dicts")
    return found


def _walk(value: Any, name: str, above: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
        return
    if id(value) in above:
        return
    above |= {id(value)}
    dot = f"{name}." if name else ""
    if isinstance(value, Stub):
        fields = vars(value)
        if "_modules" not in fields:  # EDM's files keep the state of a module among the arguments of a function
            kept: list[Any] = [g["state"] for g in fields.get("given", ()) if isinstance(g, Mapping) and "state" in g]
            fields = kept[0] if kept and isinstance(kept[0], dict) else {}
        passing = fields.get("_non_persistent_buffers_set", ())
        for kind in ("_parameters", "_buffers", "_modules"):
            for key, item in (fields.get(kind) or {}).items():
                if kind != "_buffers" or key not in passing:
                    yield from _walk(item, f"{dot}{key}", above)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{dot}{key}", above)


def main(source: str, destination: str) -> int:
    """Convert one file; 0 if it went well."""
    try:
        tensors = tensors_in(Path(source))
        save_file(distinct_tensors(tensors), destination, metadata={"format": "pt"})
    except WeightsError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{destination}: {len(tensors)} tensors", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
