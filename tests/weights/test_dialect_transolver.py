"""Files of Transolvers: the authors' layout of the temperature, PhysicsNeMo's files and outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dpzoo.models import Transolver
from dpzoo.weights import TensorSource, WeightsMismatchError
from dpzoo.weights.dialects import get_dialect
from tests.models.lively import liven
from tests.weights.dialect_checks import assert_goes_back, load
from tests.weights.golden import golden
from tests.weights.mdlus import read_mdlus, recorded

GRID: dict[str, Any] = {
    "space_dim": 2, "out_dim": 1, "fun_dim": 2, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1,
    "num_slices": 4, "grid": (5, 4), "unified_pos": True, "ref": 3,
}  # fmt: skip
POINTS: dict[str, Any] = {
    "space_dim": 3, "out_dim": 3, "fun_dim": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2,
    "num_slices": 4, "time": True,
}  # fmt: skip


def transolver(seed: int = 0, **options: Any) -> Transolver:
    torch.manual_seed(seed)
    return liven(Transolver(**options), 0.2).eval()


# ---------------------------------------------------------------------- the authors
@pytest.mark.parametrize("options", [POINTS, GRID, {**POINTS, "plus": True, "condition_dim": 2}])
def test_the_authors_files(options: dict[str, Any]):
    reference, model = transolver(**options), transolver(1, **options)
    names = ("temperature", "Attn.bias")
    file = {n: t.reshape(1, 2, 1, 1) if n.endswith(names) else t for n, t in reference.state_dict().items()}
    if "grid" in options:
        file["placeholder"] = torch.randn(16)  # held by their structured model, and never used
    view = load(file, model)
    assert all(torch.equal(t, reference.state_dict()[n]) for n, t in model.state_dict().items())
    assert {c.kind for c in view.changes} == ({"dropped"} if "grid" in options else set())
    kept = {n: t for n, t in file.items() if n in model.state_dict()}
    assert_goes_back("thuml Transolver", kept, model)


def test_recorded_names():
    options = {"space_dim": 2, "fun_dim": 1, "embed_dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 1}
    file, model = golden("thuml_transolver"), Transolver(**options, num_slices=4)
    load({f"module.{n}": t for n, t in file.items()}, model)
    assert torch.equal(model.blocks[0].Attn.temperature.flatten(), file["blocks.0.Attn.temperature"].flatten())
    assert_goes_back("thuml Transolver", file, model)


def test_our_own_files_need_no_dialect():
    view = load(transolver(**POINTS).state_dict(), transolver(1, **POINTS))
    assert view.changes == ()


def test_missing_features_have_names():
    with pytest.raises(WeightsMismatchError, match=r"needs a time \(build it with time=True\)"):
        load(transolver(**POINTS).state_dict(), transolver(**{**POINTS, "time": False}))
    with pytest.raises(WeightsMismatchError, match="plus=True"):
        load(transolver(**POINTS, plus=True).state_dict(), transolver(**POINTS))


# ---------------------------------------------------------------------- PhysicsNeMo
def grid_points(case: dict[str, Tensor]) -> Tensor:
    axes = [torch.linspace(0, 1, n) for n in GRID["grid"]]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).expand(len(case["fx"]), -1, -1, -1)


@pytest.mark.parametrize("name", ["transolver", "transolver_grid"])
def test_physicsnemos_files_give_its_outputs(name: str):
    source, case = read_mdlus(name), recorded(name)
    options = {"transolver": POINTS, "transolver_grid": GRID}[name]
    model = transolver(**options, slice_eps=0.01)
    view = load(source, model)
    x = case["x"] if "x" in case else grid_points(case)
    with torch.no_grad():
        found = model(x, case["fx"], case.get("time"))
    torch.testing.assert_close(found, case["out"], rtol=0, atol=1e-6)
    assert any("limited to 0.5 ... 5.0" in c.detail for c in view.changes)
    assert not any("slice_eps" in c.detail for c in view.changes)
    assert any("slice_eps=0.01" in c.detail for c in load(source, transolver(**options)).changes)


@pytest.mark.parametrize("name", ["transolver", "transolver_grid", "transolver_plus"])
def test_physicsnemos_files_go_back(name: str):
    source = read_mdlus(name)
    plus = {**POINTS, "embed_dim": 8, "depth": 1, "mlp_ratio": 1, "time": False, "plus": True}
    model = transolver(**{"transolver": POINTS, "transolver_grid": GRID, "transolver_plus": plus}[name])
    load(source, model)
    theirs = {n: source.read(n) for n in source.names()}
    if name != "transolver_plus":  # theirs clamps the temperature when it is used
        clamped = {n: t.clamp(0.5, 5.0) for n, t in theirs.items() if n.endswith("temperature")}
        assert any(not torch.equal(t, theirs[n]) for n, t in clamped.items())
        theirs |= clamped
    back = get_dialect("physicsnemo", model).from_dpzoo(TensorSource(model.state_dict()), model)
    assert set(back.names()) == set(theirs)
    for key, tensor in theirs.items():
        torch.testing.assert_close(back.read(key), tensor, rtol=0, atol=1e-6 if key == "embedding" else 0)


def test_what_physicsnemo_cannot_hold():
    model = transolver(**POINTS)
    model.blocks[1].Attn.temperature.data.fill_(0.3)
    back = get_dialect("physicsnemo", model).from_dpzoo(TensorSource(model.state_dict()), model)
    with pytest.raises(
        WeightsMismatchError, match=r"limits the temperature to \(0\.5, 5\.0\); the model has 0\.3 to 0\.3"
    ):
        back.read("blocks.1.Attn.temperature")
    other = transolver(**POINTS, condition_dim=2)
    with pytest.raises(WeightsMismatchError, match=r"physicsnemo Transolver has no place for embedding\.weight"):
        get_dialect("physicsnemo", other).from_dpzoo(TensorSource(other.state_dict()), other)


def test_a_placeholder_moves_into_the_bias():
    model = transolver(**POINTS)
    for block in model.blocks:
        block.Attn.temperature.data.clamp_(0.5, 5)
    x, fx, time = torch.rand(2, 7, 3), torch.rand(2, 7, 2), torch.rand(2)
    with torch.no_grad():
        expected = model(x, fx, time)
    back = get_dialect("physicsnemo", model).from_dpzoo(TensorSource(model.state_dict()), model)
    load(TensorSource({n: back.read(n) for n in back.names()}), model)
    assert not model.placeholder.any()
    with torch.no_grad():
        torch.testing.assert_close(model(x, fx, time), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "feature"),
    [("blocks.0.Attn.q_global", "global queries"), ("context_builder.geometry_tokenizer.x", "a geometry context")],
)
def test_relatives_that_we_lack(name: str, feature: str):
    source = read_mdlus("transolver")
    with pytest.raises(WeightsMismatchError, match=feature):
        load({**{n: source.read(n) for n in source.names()}, name: torch.zeros(1)}, transolver(**POINTS))
