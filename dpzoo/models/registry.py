"""Names of models: register one, list them, build one.

The registry is a dict from a name to a function that builds the model. Packages outside dpzoo add their own names by an
entry point of the group ``dpzoo.models`` that points at a module; importing that module runs its ``@register_model``
lines. Such modules are imported only when a list is asked for, or a name is not among dpzoo's own.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, overload

from torch import nn

ENTRY_POINT_GROUP = "dpzoo.models"

ModelBuilder = Callable[..., nn.Module]
BuilderT = TypeVar("BuilderT", bound=ModelBuilder)

_BUILDERS: dict[str, ModelBuilder] = {}


class UnknownModelError(ValueError):
    """No model of that name is registered."""


@overload
def register_model(builder: BuilderT) -> BuilderT: ...
@overload
def register_model(*, name: str) -> Callable[[BuilderT], BuilderT]: ...
def register_model(builder: ModelBuilder | None = None, *, name: str | None = None) -> Any:
    """Decorator: make a function (or class) that returns an ``nn.Module`` known to :func:`create_model`.

    Args:
        builder: Called with the keyword arguments given to :func:`create_model`.
        name: The model's name; the function's own name without it.

    Raises:
        ValueError: the name already belongs to another builder.

    Example::

        @register_model
        def vit_my_patch4(**kwargs) -> ViT:
            return ViT(**{"patch_size": 4, "embed_dim": 96, "depth": 6, "num_heads": 3, **kwargs})
    """

    def add(function: ModelBuilder) -> ModelBuilder:
        key = name or function.__name__
        present = _BUILDERS.get(key)
        if present is not None and _origin(present) != _origin(function):
            raise ValueError(
                f"model name {key!r} is already registered by {_origin(present)}; "
                f"{_origin(function)} must choose another name"
            )
        _BUILDERS[key] = function
        return function

    return add if builder is None else add(builder)


def create_model(name: str, **kwargs: Any) -> nn.Module:
    """Build the model registered under ``name``; ``kwargs`` override the variant's arguments.

    The weights are random. The model is ordinary single-device code: it runs domain-parallel when its *input* is cut.

    Raises:
        UnknownModelError: no such name; the message lists the closest ones.

    Example::

        model = create_model("vit_small_patch16", img_size=(64, 128), in_chans=5, num_classes=10)
    """
    if name not in _BUILDERS:
        _load_entry_points()
    if name not in _BUILDERS:
        raise UnknownModelError(_unknown_name(name))
    return _BUILDERS[name](**kwargs)


def list_models(pattern: str = "") -> list[str]:
    """Names of all registered models, sorted as people count (patch8 before patch16).

    Args:
        pattern: With one of ``* ? [`` a shell pattern for the whole name (``"vit_*_patch16"``), otherwise a part of it.
    """
    _load_entry_points()
    if any(c in pattern for c in "*?["):
        names = fnmatch.filter(_BUILDERS, pattern)
    else:
        names = [n for n in _BUILDERS if pattern in n]
    return sorted(names, key=_natural_key)


def _natural_key(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _origin(builder: ModelBuilder) -> str:
    return f"{getattr(builder, '__module__', '?')}.{getattr(builder, '__qualname__', repr(builder))}"


def _unknown_name(name: str) -> str:
    close = difflib.get_close_matches(name, _BUILDERS, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"{len(_BUILDERS)} names are known."
    return f"no model is named {name!r}; {hint} dpzoo.models.list_models() lists them all"


@lru_cache(maxsize=1)
def _load_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            point.load()
        except Exception as error:  # one broken package must not hide every other model
            warnings.warn(
                f"models of entry point {point.name!r} ({point.value}) are left out: {type(error).__name__}: {error}",
                stacklevel=3,
            )
