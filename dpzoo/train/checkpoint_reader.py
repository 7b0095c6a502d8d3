"""Reading checkpoints: is it whole, what does it hold, and its parts into tensors that are cut in any way.

All functions that read are called on all ranks, or in one process, and come to the same end on each.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dpzoo.train.checkpoint_files import find_damage
from dpzoo.train.checkpoint_writer import CheckpointError

T = TypeVar("T")


class Stored:
    """What a checkpoint holds, as a tree of places to load it into."""

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.state_dict_metadata
        self._paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}

    def has(self, section: str) -> bool:
        """Whether there is anything in it."""
        return any(path[0] == section for path in self._paths.values())

    def section(
        self,
        name: str,
        place: Callable[[tuple[Any, ...], torch.Size, torch.dtype], Tensor] | None = None,
        only: tuple[str, ...] | None = None,
    ) -> dict[str, Any]:
        """Nested dicts of empty tensors, and None where a value is no tensor.

        Args:
            place: path in the section, shape, dtype -> tensor; by default a plain one.
            only: paths that one of these names is in.
        """
        tree: dict[str, Any] = {}
        for key, (section, *path) in self._paths.items():
            if section != name or (only is not None and not set(only) & set(path)):
                continue
            entry, inside = self._entries[key], tree
            for step in path[:-1]:
                inside = inside.setdefault(step, {})
            if not isinstance(entry, TensorStorageMetadata):
                inside[path[-1]] = None
            elif place is None:
                inside[path[-1]] = torch.empty(entry.size, dtype=entry.properties.dtype)
            else:
                inside[path[-1]] = place(tuple(path), entry.size, entry.properties.dtype)
        return tree


def whole_metadata(path: Path) -> Metadata | None:
    """Of a checkpoint whose files are as they were written; None, with a warning, of another."""
    share = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        found = find_damage(path, *share)
    except OSError as error:
        found = str(error)
    metadata, damage = None, _first_of(found)
    if damage is None:
        try:
            with _no_news():
                metadata = dcp.FileSystemReader(path).read_metadata()
        except Exception as error:  # a pickle that is damaged can raise anything
            damage = f"its metadata cannot be read ({error})"
        damage = _first_of(damage)
    if damage is not None:
        _warn_of(path, damage)
        return None
    return metadata


def _first_of(damage: str | None) -> str | None:
    """What any rank has found, the same on all of them."""
    return next((text for text in on_every_rank(damage) if text), None)


def read_into(state: dict[str, Any], path: Path) -> bool:
    """Fill the tensors and values in `state`, in place; False, with a warning, if the files are damaged."""
    try:
        with _no_news():
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError) as error:
        _warn_of(path, str(error))
        return False
    return True


def check_model(weights: Mapping[str, Any], metadata: Metadata, path: Path) -> None:
    """Raise CheckpointError if the checkpoint has other weights than these, in name or shape."""
    ours = {f"model.{name}": tuple(value.shape) for name, value in weights.items() if hasattr(value, "shape")}
    theirs = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if ours == theirs:
        return
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    listed = ", ".join(
        f"{name.removeprefix('model.')} {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in differing[:5]
    )
    raise CheckpointError(f"{path} is of another model; {len(differing)} weights differ: {listed}")


def on_every_rank(value: T) -> list[T]:
    """What every rank passed in, on all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _warn_of(path: Path, damage: str) -> None:
    warnings.warn(f"{path} is damaged: {damage}; trying the one before", stacklevel=5)


def _no_news() -> warnings.catch_warnings:
    """Torch's checkpoint code warns of its own deprecated parts; they are not the user's to change."""
    return warnings.catch_warnings(action="ignore")
