"""A dialect: the names and shapes in which one library keeps the weights of one of our models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.weights.dialects.convert import Converted, to_ours, to_theirs
from dpzoo.weights.dialects.fitting import Fitting, fit
from dpzoo.weights.dialects.lazy import Lazy, Stored
from dpzoo.weights.dialects.prefixes import CONSTANT, clean_names
from dpzoo.weights.dialects.rule import Rule
from dpzoo.weights.source import Change, Slab, WeightsMismatchError, WeightSource


class ConvertedWeights:
    """A :class:`~dpzoo.weights.WeightSource` that reads through a dialect.

    Attributes:
        changes: What the dialect did.
        kept: Names of the model that the file leaves alone on purpose (another head, a table that is computed), each
            with the reason.
    """

    def __init__(
        self,
        source: WeightSource,
        tensors: Mapping[str, Lazy],
        changes: Sequence[Change],
        kept: Mapping[str, str] | None = None,
    ) -> None:
        self.origin, self.config = source.origin, source.config
        self._tensors = dict(tensors)
        self.changes, self.kept = tuple(changes), dict(kept or {})

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def sliceable(self, name: str) -> bool:
        return self._tensors[name].sliceable

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        return self._tensors[name].read(slab)


@dataclass(frozen=True)
class Dialect:
    """Rules between their names and ours, for one model and one set of names.

    Attributes:
        name: For messages: the library and its model.
        rules: Name by name, both ways.
        cleaned: Names in the file, each with its name without prefixes; names not in it stay.
        fitting: How weights follow another grid, other channels, another head.
        nest: Where theirs stands in the object that they save, when our weights are written.
        own_names: What no rule knows has the same name there; else it cannot be written.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    cleaned: Mapping[str, str] = field(default_factory=dict)
    fitting: Fitting = field(default_factory=Fitting)
    nest: str = ""
    own_names: bool = True

    def to_dpzoo(
        self,
        source: WeightSource,
        model: nn.Module,
        *,
        old_grid: Sequence[int] | None = None,
        check_values: bool = True,
    ) -> ConvertedWeights:
        """Their weights under the names of ``model``, read when asked for.

        Args:
            source: Weights with their names.
            model: The model that they are for; only shapes are looked at.
            old_grid: Patches of the file's position embedding along each dim, if neither its config nor its shape say.
            check_values: Read the small tensors that must hold known values (tables of frequencies, biases that must be
                zero); of several ranks that read one file, one is enough.

        Raises:
            WeightsMismatchError: names that collide (the message has both), a feature that the model lacks, a position
                embedding whose grid is not known.
        """
        with _naming(source.origin):
            cleaned = clean_names(source.names(), {n: self.cleaned.get(n, n) for n in source.names()})
            stored: dict[str, Lazy] = {new: Stored(source, name) for name, new in cleaned.items()}
            converted = to_ours(stored, self.rules, check_values)
            kept = fit(converted, model, self.fitting, source.config, old_grid)
        shown = {new: name for name, new in cleaned.items()}
        changes = [_as_in_file(change, shown) for change in converted.changes] + _unwrapped(cleaned, converted)
        told = [c for c in changes if c.kind != "renamed" or c.theirs != c.ours or c.detail]
        return ConvertedWeights(source, converted.tensors, told, kept)

    def from_dpzoo(self, source: WeightSource, model: nn.Module) -> ConvertedWeights:
        """Our weights under their names, read when asked for.

        Args:
            source: Weights with the names of ``model``, without wrappers' prefixes.
            model: The model that the dialect was found for.

        Raises:
            WeightsMismatchError: something of ours that they cannot hold.
        """
        with _naming(source.origin):
            converted = to_theirs({n: Stored(source, n) for n in source.names()}, self.rules)
            if converted.unknown and not self.own_names:
                raise WeightsMismatchError(f"{self.name} has no place for {', '.join(converted.unknown)}")
        tensors = {self._nested(name): tensor for name, tensor in converted.tensors.items()}
        changes = [replace(c, theirs=tuple(map(self._nested, c.theirs))) for c in converted.changes]
        return ConvertedWeights(source, tensors, changes)

    def _nested(self, name: str) -> str:
        """Their name, inside what they save; a constant of the preconditioner stands beside the network."""
        return name if name == CONSTANT else self.nest + name


class _naming:
    """Put the origin of the weights before the message of an error."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, WeightsMismatchError) and not str(error).startswith(self.origin):
            raise WeightsMismatchError(f"{self.origin}: {error}") from error


def _as_in_file(change: Change, shown: Mapping[str, str]) -> Change:
    """The change with the names that stand in the file."""
    return Change(change.kind, tuple(shown.get(n, n) for n in change.theirs), change.ours, change.detail)


def _unwrapped(cleaned: Mapping[str, str], converted: Converted) -> list[Change]:
    """Names that only lost a prefix."""
    told = {name for change in converted.changes for name in change.theirs}
    return [
        Change("renamed", (name,), (new,), "prefix removed")
        for name, new in cleaned.items()
        if name != new and new not in told and new in converted.tensors
    ]
