"""After the names: weights made to fit a model with another grid, other input channels, another head.

Each step (:mod:`dpzoo.weights.dialects.steps`) knows one place of our models by name; a list of them belongs to each of
our model classes. A shape that no step explains is left as it is: loading then reports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from dpzoo.weights.dialects.convert import Converted
from dpzoo.weights.dialects.lazy import Lazy
from dpzoo.weights.source import Change


class Step(Protocol):
    """One place of a model, and how weights are made to fit there."""

    def apply(self, job: Job) -> None: ...


@dataclass(frozen=True)
class Fitting:
    """The steps for a model class, and where such a model stands inside the one that is loaded."""

    steps: tuple[Step, ...] = ()
    root: str = ""


@dataclass
class Job:
    """What the steps look at and change. Names are given without the root."""

    converted: Converted
    model: nn.Module
    root: str
    config: Mapping[str, Any] | None
    old_grid: Sequence[int] | None
    shapes: dict[str, tuple[int, ...]]
    kept: dict[str, str] = field(default_factory=dict)

    @property
    def network(self) -> nn.Module:
        """The module below the root."""
        return self.model.get_submodule(self.root.rstrip("."))

    def file(self, name: str) -> Lazy | None:
        """The file's tensor for a name of ours."""
        return self.converted.tensors.get(self.root + name)

    def here(self, name: str) -> tuple[int, ...] | None:
        """The model's shape of it."""
        return self.shapes.get(self.root + name)

    def file_names(self, prefix: str) -> list[str]:
        """Names of the file's tensors below a prefix, whole."""
        return [n for n in self.converted.tensors if n.startswith(self.root + prefix)]

    def replace(self, name: str, tensor: Lazy, detail: str, kind: Any = "resampled") -> None:
        """Put another tensor in the place of the file's, or where it has none."""
        full = self.root + name
        origin = self.converted.origins.get(full, ())
        self.converted.tensors[full], self.converted.origins[full] = tensor, origin
        self.converted.changes.append(Change(kind, origin, (full,), detail))

    def drop(self, full_names: Sequence[str], kept: Sequence[str], why: str) -> None:
        """Leave the file's tensors out, and the model's as they are (both whole names)."""
        origins: list[str] = []
        for name in full_names:
            del self.converted.tensors[name]
            origins += self.converted.origins.pop(name)
        self.kept.update(dict.fromkeys(kept, why))
        self.converted.changes.append(Change("dropped", tuple(origins), tuple(kept), why))


def fit(
    converted: Converted,
    model: nn.Module,
    fitting: Fitting,
    config: Mapping[str, Any] | None,
    old_grid: Sequence[int] | None,
) -> dict[str, str]:
    """Run the steps; the names of the model that the file leaves alone, each with the reason."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    job = Job(converted, model, fitting.root, config, old_grid, shapes)
    for step in fitting.steps:
        step.apply(job)
    return job.kept
