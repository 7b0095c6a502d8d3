"""Judge a checkpoint against a model as a whole, before anything is written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpzoo.weights.dialects import ConvertedWeights, find_dialect
from dpzoo.weights.report import LoadReport, listed
from dpzoo.weights.source import DamagedWeightsError, WeightsError, WeightsMismatchError, WeightSource


@dataclass(frozen=True)
class LoadPlan:
    """A load that can be carried out.

    Attributes:
        view: The file under the model's names.
        targets: The model's parameters and persistent buffers by name, those that have a value in ``view``.
        others: Those that have none and keep what they hold.
        report: What to tell afterwards.
    """

    view: WeightSource
    targets: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    report: LoadReport
    computed: dict[str, Tensor] = field(default_factory=dict)

    def compute(self, names: Iterable[str]) -> None:
        """Read those of ``names`` that can only be had whole; whatever is wrong with their values shows here."""
        for name in names:
            if not self.view.sliceable(name):
                self.computed[name] = self.view.read(name)

    def read(self, name: str, slab: tuple[slice, ...]) -> Tensor:
        """Values of a part of a target."""
        return self.computed[name][slab] if name in self.computed else self.view.read(name, slab)


@contextmanager
def while_writing(origin: str) -> Iterator[None]:
    """Inside, whatever fails to be read leaves the model half filled; the error says so.

    Raises:
        DamagedWeightsError: for any error inside.
    """
    try:
        yield
    except Exception as error:
        text = f"{origin} could not be read on ({error}); the model holds a part of the new weights now"
        raise DamagedWeightsError(text) from error


def plan_load(
    model: nn.Module,
    source: WeightSource,
    *,
    dialect: str = "auto",
    strict: bool = True,
    old_grid: Sequence[int] | None = None,
    check_values: bool = True,
) -> LoadPlan:
    """Match a source with a model; only shapes are looked at, and the few values that must be equal.

    Args:
        dialect: Whose names the file uses; found out by ``"auto"``.
        strict: Refuse names that are missing or unexpected.
        old_grid: Patches per dim of the file's position embedding, where its configuration does not say.
        check_values: Read the tensors that a dialect must compare.

    Raises:
        WeightsMismatchError: another architecture; names or shapes that do not fit.
        WeightsError: parameters without memory (meta device).
    """
    tensors = model_tensors(model)
    name, view = _under_our_names(model, source, dialect, old_grid, check_values)
    theirs = set(view.names())
    kept = {name: reason for name, reason in view.kept.items() if name in tensors}
    targets = {name: t for name, t in tensors.items() if name in theirs}
    tied = {id(t) for t in targets.values()}
    missing = tuple(n for n, t in tensors.items() if n not in theirs and n not in kept and id(t) not in tied)
    unexpected = tuple(name for name in view.names() if name not in tensors)
    _check_names(model, source, missing, unexpected, bool(targets), strict)
    _check_tensors(model, source, view, targets)
    report = LoadReport(
        origin=source.origin,
        dialect=name,
        loaded=tuple(targets),
        missing=missing,
        unexpected=unexpected,
        kept=kept,
        changes=tuple(view.changes),
        cast={n: f"{_word(view.dtype(n))} -> {_word(t.dtype)}" for n, t in targets.items() if view.dtype(n) != t.dtype},
        model=model,
    )
    return LoadPlan(view, targets, {n: t for n, t in tensors.items() if n not in targets}, report)


def _under_our_names(
    model: nn.Module,
    source: WeightSource,
    dialect: str,
    old_grid: Sequence[int] | None,
    check_values: bool,
) -> tuple[str, ConvertedWeights]:
    """Name of the dialect, and the source read through it."""
    shapes = {name: tuple(source.shape(name)) for name in source.names()}
    try:
        found = find_dialect(tuple(shapes), shapes, source.config, model, dialect)
    except WeightsMismatchError as error:
        raise WeightsMismatchError(f"{source.origin}: {error}") from None
    return found.name, found.to_dpzoo(source, model, old_grid=old_grid, check_values=check_values)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: the very tensors, not copies."""
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}


def _check_names(
    model: nn.Module,
    source: WeightSource,
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    any_fits: bool,
    strict: bool,
) -> None:
    if not any_fits:
        raise WeightsMismatchError(
            f"{source.origin} does not hold weights of {type(model).__name__}: no name fits. It has "
            f"{listed(unexpected, 4)}; the model has {listed(missing, 4)}"
        )
    if strict and (missing or unexpected):
        parts = [f"{word} {listed(names)}" for word, names in (("lacks", missing), ("also has", unexpected)) if names]
        raise WeightsMismatchError(
            f"{source.origin} is not of this {type(model).__name__}: it {', and '.join(parts)}. Build the model with "
            "the arguments it was trained with, or pass strict=False to load what fits"
        )


def _check_tensors(model: nn.Module, source: WeightSource, view: WeightSource, targets: Mapping[str, Tensor]) -> None:
    wrong = []
    for name, target in targets.items():
        if target.is_meta:
            raise WeightsError(f"{name} has no memory (meta device); call model.to_empty(device=...) first")
        shape, dtype = view.shape(name), view.dtype(name)
        if tuple(shape) != tuple(target.shape):
            wrong.append(f"{name}: {tuple(shape)} in the file, {tuple(target.shape)} in the model")
        elif _kind(dtype) != _kind(target.dtype):
            wrong.append(f"{name}: {_word(dtype)} in the file, {_word(target.dtype)} in the model")
    if wrong:
        raise WeightsMismatchError(
            f"{source.origin} is not of this {type(model).__name__}; {len(wrong)} tensors differ: "
            + "; ".join(wrong[:5])
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "integer"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
