"""Names of models: register one, list them, build one.

The registry is a dict from a name to a function that builds the model. Packages outside dpzoo add their own names by an
entry point of the group ``dpzoo.models`` that points at a module; importing that module runs its ``@register_model``
lines. Such modules are imported only when a list is asked for, or a name is not among dpzoo's own.

Beside the builder stands how small the model can be made (``tiny``) and which dim of each example input a domain mesh
cuts (``cut_dims``): with these, a model is tested by being registered, also domain-parallel.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, TypeVar, overload

from torch import Tensor, nn

from dpzoo.models.build_record import BuildRecord, remember

ENTRY_POINT_GROUP = "dpzoo.models"

ModelBuilder = Callable[..., nn.Module]
BuilderT = TypeVar("BuilderT", bound=ModelBuilder)

_BUILDERS: dict[str, ModelBuilder] = {}
_EXAMPLES: dict[str, Example] = {}


@dataclass(frozen=True)
class Example:
    """How a registered model is tried out; see :func:`register_model`."""

    tiny: Mapping[str, Any] = field(default_factory=dict)
    cut_dims: tuple[int | None, ...] | None = None


class UnknownModelError(ValueError):
    """No model of that name is registered."""


@overload
def register_model(builder: BuilderT) -> BuilderT: ...
@overload
def register_model(
    *, name: str | None = None, tiny: Mapping[str, Any] | None = None, cut_dims: Sequence[int | None] | None = None
) -> Callable[[BuilderT], BuilderT]: ...
def register_model(
    builder: ModelBuilder | None = None,
    *,
    name: str | None = None,
    tiny: Mapping[str, Any] | None = None,
    cut_dims: Sequence[int | None] | None = None,
) -> Any:
    """Decorator: make a function (or class) that returns an ``nn.Module`` known to :func:`create_model`.

    Args:
        builder: Called with the keyword arguments given to :func:`create_model`.
        name: The model's name; the function's own name without it.
        tiny: Keyword arguments that leave the model all its kinds of parts but few and narrow ones, for tests and
            trials: :func:`create_tiny_model`.
        cut_dims: For each tensor of the model's ``example_inputs()`` the dim that a domain mesh cuts, None for one
            that is not cut. Without it: dim 2 of tensors of 3 and more dims, ``(B, C, *grid)``; see :func:`cut_dims`.

    Raises:
        ValueError: the name already belongs to another builder.

    Example::

        @register_model(tiny={"depth": 1, "embed_dim": 24})
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
        _EXAMPLES[key] = Example(dict(tiny or {}), None if cut_dims is None else tuple(cut_dims))
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
    _check_known(name)
    model = _BUILDERS[name](**kwargs)
    remember(model, BuildRecord(name, (), kwargs))
    return model


def is_registered(name: str) -> bool:
    """Can :func:`create_model` build a model of this name?"""
    if name not in _BUILDERS:
        _load_entry_points()
    return name in _BUILDERS


def create_tiny_model(name: str, **kwargs: Any) -> nn.Module:
    """The model registered under ``name``, made as small as its registration says; for tests and trials.

    Args:
        kwargs: Go before those of the registration.

    Raises:
        UnknownModelError: no such name.
    """
    _check_known(name)
    return create_model(name, **{**_EXAMPLES[name].tiny, **kwargs})


def cut_dims(name: str, inputs: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    """For each of ``model.example_inputs()`` the dim that a domain mesh cuts; None: whole on every rank.

    Raises:
        UnknownModelError: no such name.
        ValueError: the registration tells dims of another number of inputs.
    """
    _check_known(name)
    told = _EXAMPLES[name].cut_dims
    if told is None:
        return tuple(2 if x is not None and x.ndim > 2 else None for x in inputs)
    if len(told) != len(inputs):
        raise ValueError(
            f"{name} is registered with cut_dims={told}, but example_inputs() gives {len(inputs)} tensors; "
            "tell one dim (or None) for each"
        )
    return told


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


def _check_known(name: str) -> None:
    if name not in _BUILDERS:
        _load_entry_points()
    if name not in _BUILDERS:
        raise UnknownModelError(_unknown_name(name))


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
