"""What the JSON beside or inside a file says about the model that the weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

EMBEDDERS = ("patch_embed", "x_embedder")
"""What the zoo's models call the module that makes patches, beside their ``pos_embed``."""


def grid_to_note(model: nn.Module) -> list[int] | None:
    """Patches along each dim of a model's position embedding, for ``"position_grid"`` of its config; or None.

    The rows of the embedding do not tell it, nor do arguments that were left to the defaults of a named model.
    """
    found = set()
    for module in model.modules():
        if isinstance(getattr(module, "pos_embed", None), Tensor):
            sizes = (getattr(getattr(module, name, None), "grid_size", None) for name in EMBEDDERS)
            found |= {tuple(size) for size in sizes if size is not None}
    return list(found.pop()) if len(found) == 1 else None


def grid_of_config(config: Mapping[str, Any] | None, patch: Sequence[int]) -> tuple[int, ...] | None:
    """Patches along each dim, from what the writers of timm, diffusers, PhysicsNeMo and dpzoo files note; or None."""
    if config is None:
        return None
    if isinstance(config.get("position_grid"), list | tuple):
        return tuple(config["position_grid"])
    for size in _noted_sizes(config):
        sizes = (size,) * len(patch) if isinstance(size, int) else tuple(size)
        if len(sizes) == len(patch) and patch and not any(s % p for s, p in zip(sizes, patch, strict=True)):
            return tuple(s // p for s, p in zip(sizes, patch, strict=True))
    return None


def _noted_sizes(config: Mapping[str, Any]) -> Iterator[Any]:
    """Input sizes that a config notes, the surest first."""
    for part in ("arguments", "model_args"):
        if isinstance(config.get(part), Mapping) and "img_size" in config[part]:
            yield config[part]["img_size"]
    if config.get("_class_name") and "sample_size" in config:
        yield config["sample_size"]
    args = config.get("args")
    if isinstance(args, Mapping):
        yield from (a["input_size"] for _, a in _modules(args) if "input_size" in a)
    pretrained = config.get("pretrained_cfg")
    if isinstance(pretrained, Mapping) and "input_size" in pretrained:
        yield pretrained["input_size"][1:]


def module_arguments(config: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """Constructor arguments that a PhysicsNeMo file notes for the module of that name, at any depth; or None."""
    args = (config or {}).get("args")
    if not isinstance(args, Mapping):
        return None
    return next((found for module, found in _modules(args) if module == name), None)


def _modules(args: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and arguments of a PhysicsNeMo module and of those nested in it."""
    if isinstance(args.get("__args__"), Mapping):
        yield str(args.get("__name__")), args["__args__"]
    for name, value in args.items():
        if name.startswith("__physicsnemo.Module__") and isinstance(value, Mapping):
            yield from _modules(value)
