"""What every dialect is tried with: all of a file's tensors arrive, and go back to what they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.weights import TensorSource
from dpzoo.weights.dialects import ConvertedWeights, find_dialect, get_dialect


def converted(source: TensorSource, model: nn.Module, **options: Any) -> ConvertedWeights:
    """The source in the names of the model."""
    dialect = find_dialect(source.names(), {n: source.shape(n) for n in source.names()}, source.config, model)
    return dialect.to_dpzoo(source, model, **options)


def load(weights: dict[str, Tensor] | TensorSource, model: nn.Module, **options: Any) -> ConvertedWeights:
    """Convert and load; every name of the model is filled or kept on purpose, and none is left over."""
    source = weights if isinstance(weights, TensorSource) else TensorSource(weights)
    view = converted(source, model, **options)
    state = {name: view.read(name) for name in view.names()}
    for name, tensor in state.items():
        assert (tuple(tensor.shape), tensor.dtype) == (view.shape(name), view.dtype(name)), name
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys, found.unexpected_keys
    assert set(found.missing_keys) == set(view.kept), set(found.missing_keys) ^ set(view.kept)
    told = {name for change in view.changes if change.kind == "dropped" for name in change.ours}
    assert told == set(view.kept)
    return view


def assert_goes_back(
    name: str,
    weights: dict[str, Tensor] | TensorSource,
    model: nn.Module,
    without: frozenset[str] | set[str] = frozenset(),
    **options: Any,
) -> None:
    """The model's weights, written in a dialect, are the file's; ``without`` names what it cannot know any more."""
    source = weights if isinstance(weights, TensorSource) else TensorSource(weights)
    back = get_dialect(name, model, **options).from_dpzoo(TensorSource(model.state_dict()), model)
    assert set(source.names()) ^ set(back.names()) == without
    for key in back.names():
        if key not in without:
            torch.testing.assert_close(
                back.read(key), source.read(key), rtol=0, atol=0, msg=lambda m, k=key: f"{k}: {m}"
            )


def kinds(view: ConvertedWeights) -> dict[str, int]:
    """How many changes of each kind."""
    found: dict[str, int] = {}
    for change in view.changes:
        found[change.kind] = found.get(change.kind, 0) + 1
    return found
