"""What is known about one library's way to keep the weights of one of our models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from dpzoo.weights.dialects.fitting import Step
from dpzoo.weights.dialects.rule import Rule
from dpzoo.weights.dialects.template import match, matches

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Context:
    """What the rules of a dialect may depend on.

    Attributes:
        ours: Names and shapes of our network.
        theirs: Names and shapes in the file, prefixes removed; empty when our weights are written in the dialect.
        network: Our network.
        inner: It stands inside a preconditioner.
        resolution: For names that tell the grid (EDM): the finest one, when our weights are written.
    """

    ours: Shapes
    theirs: Shapes = field(default_factory=dict)
    network: nn.Module | None = None
    inner: bool = False
    resolution: int | None = None

    def has(self, template: str) -> bool:
        """Does our network have such a name?"""
        return any(matches(template, name) for name in self.ours)

    def count(self, template: str) -> int:
        """One more than the largest number in the blank ``{i}`` among our names."""
        found = (match(template, name) for name in self.ours)
        return max((int(blanks["i"]) for blanks in found if blanks is not None), default=-1) + 1


@dataclass(frozen=True)
class Upstream:
    """A library's names for one of our model classes.

    Attributes:
        name: "timm ViT", for messages and for ``get_dialect``.
        family: Name of our class.
        present: Templates of names that all stand in such a file, any name each.
        absent: Templates of names that do not.
        rules: Builds the table.
        tells: A further test, on names and shapes.
        steps: How weights are made to fit, before the steps of our class.
        own_names: Our names are theirs: what no rule knows has the same name there.
        nest: Prefix of all names but ``sigma_data`` when a network inside a preconditioner is written.
    """

    name: str
    family: str
    present: tuple[str, ...]
    rules: Callable[[Context], tuple[Rule, ...]]
    absent: tuple[str, ...] = ()
    tells: Callable[[Shapes], bool] | None = None
    steps: tuple[Step, ...] = ()
    own_names: bool = False
    nest: str = ""

    def recognises(self, theirs: Shapes) -> bool:
        """Are these the names of such a file?"""

        def any_like(template: str) -> bool:
            return any(matches(template, name) for name in theirs)

        if not all(map(any_like, self.present)) or any(map(any_like, self.absent)):
            return False
        return self.tells is None or self.tells(theirs)
