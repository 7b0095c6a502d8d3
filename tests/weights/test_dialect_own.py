"""Our own files: every model of the zoo reads what it wrote, with nothing renamed, dropped or resampled."""

import pytest
import torch

from dpzoo.models import list_models
from dpzoo.models.registry import create_tiny_model
from dpzoo.weights import TensorSource
from tests.weights.dialect_checks import converted

FAMILIES = sorted({name.split("_")[0] for name in list_models()})


@pytest.mark.parametrize("family", FAMILIES)
def test_own_files(family: str):
    for name in (n for n in list_models() if n.split("_")[0] == family):
        with torch.device("meta"):
            model = create_tiny_model(name)
        state = model.state_dict()
        view = converted(TensorSource(state), model)
        assert view.changes == (), name
        assert {n: view.shape(n) for n in view.names()} == {n: tuple(t.shape) for n, t in state.items()}, name
        wrapped = converted(TensorSource({f"module.{n}": t for n, t in state.items()}), model)
        assert set(wrapped.names()) == set(state), name
        assert {c.kind for c in wrapped.changes} == {"renamed"}, name
        assert {c.theirs: c.ours for c in wrapped.changes} == {(f"module.{n}",): (n,) for n in state}, name
