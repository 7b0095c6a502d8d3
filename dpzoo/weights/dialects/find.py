"""Which dialect a file is written in, for a model of ours."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpzoo.weights.dialects import diffusion_unet, dit, neighborhood, transolver, unet, vit
from dpzoo.weights.dialects.dialect import Dialect
from dpzoo.weights.dialects.fitting import Fitting, Step
from dpzoo.weights.dialects.prefixes import CONSTANT, spellings
from dpzoo.weights.dialects.rule import rename
from dpzoo.weights.dialects.upstream import Context, Shapes, Upstream
from dpzoo.weights.source import WeightsMismatchError

NATIVE = "dpzoo"
UPSTREAMS: tuple[Upstream, ...] = (
    *vit.UPSTREAMS,
    *dit.UPSTREAMS,
    *transolver.UPSTREAMS,
    *neighborhood.UPSTREAMS,
    *unet.UPSTREAMS,
    *diffusion_unet.UPSTREAMS,
)
STEPS: Mapping[str, tuple[Step, ...]] = {
    "ViT": vit.STEPS,
    "DiT": dit.STEPS,
    "Transolver": transolver.STEPS,
    "NeighborhoodTransformer": neighborhood.STEPS,
    "UNet": unet.STEPS,
    "ResidualUNet": unet.STEPS,
    "DiffusionUNet": diffusion_unet.STEPS,
}
INSIDE = "network"  # where a preconditioner holds its network


@dataclass(frozen=True)
class _Place:
    """Our network in a model: its class, and the prefix of its names."""

    family: str
    root: str
    network: nn.Module


def find_dialect(
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None,
    model: nn.Module,
    dialect: str = "auto",
) -> Dialect:
    """The dialect in which names and shapes of a file are to be read for ``model``. No value is read.

    Args:
        names: Of the file's tensors, prefixes of wrappers and all.
        shapes: Of those tensors.
        config: Parsed JSON beside the file. It is looked at when the weights are converted.
        model: The model that they are for. Models that are not of the zoo get their own names.
        dialect: A name of :func:`list_dialects`, or the library's part of it ("timm"): only these are tried.

    Raises:
        WeightsMismatchError: the file is another model's, or shares no name with this one.
        ValueError: an unknown ``dialect``.
    """
    place = _place(model)
    upstreams = UPSTREAMS if dialect == "auto" else _named(dialect)
    others: list[Upstream] = []
    for cleaned in spellings(tuple(names)):
        theirs = {new: tuple(shapes[name]) for name, new in cleaned.items()}
        recognised = [u for u in upstreams if u.recognises(theirs)]
        ours = next((u for u in recognised if place and u.family == place.family), None)
        if ours is not None and place is not None:
            return _build(ours, place, _context(model, place, theirs), cleaned)
        others += recognised
    native = None if others and place else _native(names, model, place)
    if native is None:
        raise WeightsMismatchError(_nothing_fits(names, model, others))
    return native


def get_dialect(name: str, model: nn.Module, *, resolution: int | None = None) -> Dialect:
    """A dialect by its name, to write the weights of ``model`` in it: ``get_dialect(...).from_dpzoo(...)``.

    Args:
        name: One of :func:`list_dialects`, or the library's part of it.
        resolution: Grid points a side of the finest level, which some names tell (EDM).

    Raises:
        ValueError: no such dialect.
        WeightsMismatchError: it has no names for such a model, or needs ``resolution``.
    """
    place = _place(model)
    if name == NATIVE:
        return Dialect(NATIVE, fitting=_fitting(place))
    upstream = next((u for u in _named(name) if place and u.family == place.family), None)
    if upstream is None or place is None:
        raise WeightsMismatchError(f"{name} has no names for a {type(model).__name__}")
    return _build(upstream, place, _context(model, place, {}, resolution), {})


def list_dialects() -> list[str]:
    """Names of all dialects."""
    return [NATIVE, *(upstream.name for upstream in UPSTREAMS)]


def _named(name: str) -> tuple[Upstream, ...]:
    found = tuple(u for u in UPSTREAMS if name in (u.name, u.name.split()[0]))
    if not found and name != NATIVE:
        close = difflib.get_close_matches(name, list_dialects(), n=1, cutoff=0.3)
        raise ValueError(
            f"no dialect is named {name!r}; {'did you mean ' + repr(close[0]) + '?' if close else ''} "
            f"known are {', '.join(list_dialects())}"
        )
    return found


def _build(upstream: Upstream, place: _Place, context: Context, cleaned: Mapping[str, str]) -> Dialect:
    rules = [rule.below("", place.root) for rule in upstream.rules(context)]
    if place.root:
        rules = [rename(CONSTANT, CONSTANT), *rules]
        rules += [rename("{rest}", place.root + "{rest}")] if upstream.own_names else []
    nest = upstream.nest if place.root else ""
    return Dialect(
        upstream.name,
        tuple(rules),
        cleaned,
        _fitting(place, upstream.steps),
        nest=nest,
        own_names=upstream.own_names,
    )


def _fitting(place: _Place | None, more: tuple[Step, ...] = ()) -> Fitting:
    return Fitting() if place is None else Fitting((*more, *STEPS[place.family]), place.root)


def _native(names: Collection[str], model: nn.Module, place: _Place | None) -> Dialect | None:
    """Our own names, below the prefixes that leave the most of them; None where no name is the model's."""
    wanted = set(model.state_dict())
    best: dict[str, str] = max(
        ({n: n for n in names}, *spellings(tuple(names))),
        key=lambda cleaned: len(wanted.intersection(cleaned.values())),
    )
    shared = wanted.intersection(best.values())
    return Dialect(NATIVE, cleaned=best, fitting=_fitting(place)) if shared or not wanted else None


def _place(model: nn.Module) -> _Place | None:
    """Our network, which is the model or stands inside it."""
    for root, network in _candidates(model):
        family = next((c.__name__ for c in type(network).__mro__ if c.__name__ in STEPS), None)
        if family is not None:
            return _Place(family, root, network)
    return None


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "", model
    inside = getattr(model, INSIDE, None)
    if isinstance(inside, nn.Module):
        yield INSIDE + ".", inside


def _context(model: nn.Module, place: _Place, theirs: Shapes, resolution: int | None = None) -> Context:
    state = {name: tuple(t.shape) for name, t in model.state_dict().items() if name.startswith(place.root)}
    ours = {name.removeprefix(place.root): shape for name, shape in state.items()}
    return Context(ours, theirs, place.network, bool(place.root), resolution)


def _nothing_fits(names: Collection[str], model: nn.Module, others: list[Upstream]) -> str:
    kind = type(model).__name__
    if others:
        return f"these are weights of another architecture ({others[0].name}); the model is a {kind}"
    few = ", ".join(sorted(names)[:3])
    own = ", ".join(list(model.state_dict())[:3])
    return (
        f"no name in the file is one of the {kind}'s, nor of a known library's: {few}, ... (the model has {own}, ...)"
    )
