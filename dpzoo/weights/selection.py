"""Which of the state dicts in a training file are meant: the averaged weights, else the weights themselves."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dpzoo.weights.source import WeightsError

# In this order; the names are those of timm, DeiT, DiT, DINO, physicsnemo, nnU-Net, Lightning and dpzoo's own runs.
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "average", "teacher")
TRAINED = ("state_dict", "model_state_dict", "network_weights", "model", "student")


class Selection(NamedTuple):
    """The tensors (anything with a shape) chosen by name, and the key they were found under ("" for the top)."""

    tensors: dict[str, Any]
    key: str


def select(tree: Any, origin: str, key: str | None = None, ema: bool = True) -> Selection:
    """Choose a state dict in what a file holds.

    Args:
        tree: Nested mappings; leaves that are no tensors are passed over.
        key: Dotted name of the state dict to take, ``"optimizer.ema"``; found by the usual names without it.
        ema: Prefer averaged weights where there are some.

    Raises:
        WeightsError: no tensors there; the message lists what is.
    """
    if not isinstance(tree, Mapping):
        raise WeightsError(f"{origin} holds a {type(tree).__name__}, not a dict of tensors")
    if key is not None:
        found, key = _at(tree, key), key
    else:
        present = [k for k in (*(AVERAGED if ema else ()), *TRAINED) if _has_tensors(tree.get(k))]
        key = present[0] if present else ""
        found = tree[key] if present else tree
        if key in AVERAGED and (rest := [k for k in present if k in TRAINED]):
            # An average of the parameters alone is completed by the buffers beside it.
            found = {**dict(_leaves(tree[rest[0]])), **dict(_leaves(found))} if key == "average" else found
    tensors = dict(_leaves(found)) if isinstance(found, Mapping) else {}
    if not tensors:
        raise WeightsError(f"{origin}: no tensors under key={key!r}; it holds {_contents(tree)}")
    return Selection(tensors, key)


def _at(tree: Any, key: str) -> Any:
    """The value at a dotted key, whose parts may hold dots themselves."""
    if not isinstance(tree, Mapping):
        return None
    if key in tree:
        return tree[key]
    for name, value in tree.items():
        if isinstance(name, str) and key.startswith(name + "."):
            found = _at(value, key[len(name) + 1 :])
            if found is not None:
                return found
    return None


def _is_leaf(value: Any) -> bool:
    return isinstance(getattr(value, "dtype", None), torch.dtype)  # a tensor, or a place where one lies


def _leaves(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if _is_leaf(value):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and next(_leaves(value), None) is not None


def _contents(tree: Mapping[Any, Any]) -> str:
    shown = [f"{name} ({type(value).__name__})" for name, value in list(tree.items())[:8]]
    return ", ".join(shown) + (f" and {len(tree) - 8} more" if len(tree) > 8 else "") or "nothing"
