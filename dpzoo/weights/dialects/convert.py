"""Rules applied to all names of one side: the tensors of the other side, and what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dpzoo.weights.dialects.lazy import Lazy
from dpzoo.weights.dialects.rule import Convert, Rule
from dpzoo.weights.dialects.template import fill, match
from dpzoo.weights.source import Change, WeightsMismatchError


@dataclass
class Converted:
    """Tensors by their new names, where each came from, the changes, and the names that no rule knew."""

    tensors: dict[str, Lazy] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def put(self, name: str, tensor: Lazy, origin: tuple[str, ...]) -> None:
        """Add a tensor.

        Raises:
            WeightsMismatchError: the name is taken.
        """
        if name in self.tensors:
            raise WeightsMismatchError(
                f"{' and '.join(map(repr, self.origins[name]))} and {' and '.join(map(repr, origin))} both are {name!r}"
            )
        self.tensors[name], self.origins[name] = tensor, origin


@dataclass(frozen=True)
class _Oriented:
    """A rule seen from the side that is read."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    convert: Convert
    check: Callable[..., None] | None
    any_of: bool
    rule: Rule
    to_ours: bool


def to_ours(tensors: Mapping[str, Lazy], rules: Sequence[Rule], check_values: bool = True) -> Converted:
    """Their tensors as ours. Names without a rule stay as they are.

    Args:
        check_values: Read what the rules want to be checked.

    Raises:
        WeightsMismatchError: two tensors get one name, or a rule's check fails.
    """
    return _convert(
        tensors,
        [_Oriented(r.theirs, r.ours, r.to_ours, r.check if check_values else None, r.any_of, r, True) for r in rules],
    )


def to_theirs(tensors: Mapping[str, Lazy], rules: Sequence[Rule]) -> Converted:
    """Our tensors as theirs.

    Raises:
        WeightsMismatchError: two tensors get one name, or one cannot be expressed there.
    """
    return _convert(
        tensors,
        [_Oriented(r.ours, r.theirs, r.to_theirs, None, False, r, False) for r in rules if r.both_ways],
    )


def _convert(tensors: Mapping[str, Lazy], rules: Sequence[_Oriented]) -> Converted:
    left = dict(tensors)
    out = Converted()
    for rule in rules:
        for blanks in _groups(left, rule):
            names = tuple(n for n in (fill(t, blanks) for t in rule.old) if n in left)
            used = tuple(left.pop(name) for name in names)
            if rule.rule.refusal:
                raise WeightsMismatchError(f"{names[0]!r} needs {rule.rule.refusal}; the model does not have it")
            if rule.check is not None:
                rule.check(*used)
            made = tuple(fill(t, blanks) for t in rule.new)
            for name, tensor in zip(made, rule.convert(*used), strict=True):
                out.put(name, tensor, names)
            _note(out, rule, names, made)
    for name, tensor in left.items():
        out.put(name, tensor, (name,))
        out.unknown.append(name)
    return out


def _groups(names: Mapping[str, Lazy], rule: _Oriented) -> list[dict[str, str]]:
    """The blanks with which the rule's names are there."""
    complete: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for template in rule.old if rule.any_of else rule.old[:1]:
        for name in names:
            blanks = match(template, name)
            if blanks is not None and (rule.any_of or all(fill(t, blanks) in names for t in rule.old)):
                complete.setdefault(tuple(sorted(blanks.items())), blanks)
    return list(complete.values())


def _note(out: Converted, rule: _Oriented, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    if old == new and not rule.rule.detail:
        return
    theirs, ours = (old, new) if rule.to_ours else (new, old)
    out.changes.append(Change(rule.rule.kind, theirs, ours, rule.rule.detail))
