"""One line of a dialect: which names there are which names here, and how the tensors change, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dpzoo.weights.dialects.lazy import Constant, Joined, Lazy, Permuted, Same, is_all_zero, split
from dpzoo.weights.source import WeightsMismatchError

Kind = Literal["renamed", "resampled", "dropped", "split", "merged"]
Convert = Callable[..., Sequence[Lazy]]


def _unchanged(*tensors: Lazy) -> Sequence[Lazy]:
    return tensors


@dataclass(frozen=True)
class Rule:
    """Templates of names on both sides, and the functions between their tensors.

    Attributes:
        theirs, ours: Templates (:mod:`~dpzoo.weights.dialects.template`); all of one side are filled with the same
            blanks. The side that is read decides whether the rule applies: all of its names are there, or any of them
            with ``any_of``.
        to_ours, to_theirs: From the tensors of one side, in order, to those of the other.
        check: Called with the tensors of their side before anything is loaded; reads them, and raises
            :class:`~dpzoo.weights.WeightsMismatchError`.
        refusal: What the weights need and our model lacks: the rule is an error wherever it applies.
        kind, detail: For the report.
        any_of: Their names are copies of one tensor, of which some may be missing.
        both_ways: False: only from theirs to ours (old spellings, things to drop).
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Convert = _unchanged
    to_theirs: Convert = _unchanged
    kind: Kind = "renamed"
    detail: str = ""
    check: Callable[..., None] | None = None
    refusal: str = ""
    any_of: bool = False
    both_ways: bool = True

    def below(self, theirs: str, ours: str) -> Rule:
        """The same rule where each side's names stand below a prefix."""
        return replace(
            self, theirs=tuple(theirs + name for name in self.theirs), ours=tuple(ours + name for name in self.ours)
        )


def rename(theirs: str, ours: str, *, both_ways: bool = True) -> Rule:
    """The same tensor under another name."""
    return Rule((theirs,), (ours,), both_ways=both_ways)


def same(*templates: str) -> tuple[Rule, ...]:
    """Names that both sides share."""
    return tuple(rename(t, t) for t in templates)


def permuted(theirs: str, ours: str, dims: Sequence[int]) -> Rule:
    """``ours = theirs.permute(dims)``."""
    there = tuple(dims)
    back = tuple(there.index(d) for d in range(len(there)))
    return Rule((theirs,), (ours,), lambda t: (Permuted(t, there),), lambda t: (Permuted(t, back),))


def merged(theirs: Sequence[str], ours: str, dim: int = 0) -> Rule:
    """Several equal tensors there are one here, side by side along ``dim``."""
    count = len(theirs)
    return Rule(
        tuple(theirs), (ours,), lambda *t: (Joined(t, dim),), lambda t: split(t, count, dim), kind="merged"
    )  # fmt: skip


def parted(theirs: str, ours: Sequence[str], dim: int = 0, detail: str = "") -> Rule:
    """One tensor there is several equal ones here."""
    count = len(ours)
    return Rule(
        (theirs,),
        tuple(ours),
        lambda t: split(t, count, dim),
        lambda *t: (Joined(t, dim),),
        kind="split",
        detail=detail,
    )


def copies(theirs: Sequence[str], ours: str, detail: str = "") -> Rule:
    """The same tensor several times there (some may be missing), once here. Reading it shows that they are equal."""
    count = len(theirs)

    def first(*tensors: Lazy) -> Sequence[Lazy]:
        return (Same(tensors),)

    return Rule(tuple(theirs), (ours,), first, lambda t: (t,) * count, kind="merged", detail=detail, any_of=True)


def dropped(theirs: str, why: str) -> Rule:
    """Something that our model has no use for."""
    return Rule((theirs,), (), lambda _: (), kind="dropped", detail=why, both_ways=False)


def refused(theirs: str, feature: str) -> Rule:
    """Something that only a model with a feature that ours lacks can use."""
    return Rule((theirs,), (), refusal=feature, both_ways=False)


def dropped_if_zero(theirs: str, feature: str) -> Rule:
    """Something that changes nothing while it is zero, and that our model lacks."""

    def zero(tensor: Lazy) -> None:
        if not is_all_zero(tensor):
            raise WeightsMismatchError(f"the weights need {feature}, which the model does not have")

    return Rule((theirs,), (), lambda _: (), kind="dropped", detail="all zero", check=zero, both_ways=False)


def constant_here(ours: str, value: float, why: str) -> Rule:
    """Something of ours that they have as a constant: left out when our weights are written, if it has that value."""

    def leave_out(tensor: Lazy) -> Sequence[Lazy]:
        if not bool((tensor.read() == value).all()):
            raise WeightsMismatchError(f"{ours} must be {value:g} everywhere to be written: {why}")
        return ()

    return Rule((), (ours,), to_theirs=leave_out, kind="dropped", detail=why)


def computed_there(ours: str, why: str) -> Rule:
    """Something of ours that they compute: left out when our weights are written."""
    return Rule((), (ours,), to_theirs=lambda _: (), kind="dropped", detail=why)


def with_zeros(theirs: str, ours: str, zeros: str, shape: Callable[[Lazy], tuple[int, ...]], fold: Convert) -> Rule:
    """Theirs has no counterpart of ``zeros``, which adds nothing here while it is zero.

    Args:
        shape: Of the zeros, from the tensor that both have.
        fold: The way back: their tensor from both of ours.
    """
    return Rule((theirs,), (ours, zeros), lambda t: (t, Constant(shape(t), t.dtype)), fold)
