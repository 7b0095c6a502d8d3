"""How a model was built, kept with it, so that its configuration can be written beside its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_ATTRIBUTE = "_dpzoo_build"


@dataclass(frozen=True)
class BuildRecord:
    """The call that made a model.

    Attributes:
        builder: Registered name, or the name of a class of the zoo.
        positional, named: Its arguments.
    """

    builder: str
    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def remember(model: nn.Module, record: BuildRecord) -> None:
    """Keep the record with the model; also before ``nn.Module.__init__`` has run."""
    model.__dict__[_ATTRIBUTE] = record


def recall(model: nn.Module) -> BuildRecord | None:
    """The record of a model, None if it has none."""
    return model.__dict__.get(_ATTRIBUTE)
