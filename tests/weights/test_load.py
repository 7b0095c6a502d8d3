"""Loading on a single device: all or nothing, and a report of every name."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dpzoo.models import ViT
from dpzoo.weights import (
    DamagedWeightsError,
    TensorSource,
    WeightsError,
    WeightsMismatchError,
    load_weights,
    open_weights,
)
from dpzoo.weights.pieces import pieces
from dpzoo.weights.plan import plan_load

SMALL = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}


class Net(nn.Module):
    """Not of the zoo: tied weights, a buffer, a buffer that is not saved."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, dtype=dtype)
        self.second = nn.Linear(3, 3, dtype=dtype)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name


def other(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t + 1 for n, t in values.items()}


@pytest.mark.parametrize("kind", ["safetensors", "pth", "state dict", "source"])
def test_a_model_of_the_zoo(kind, tmp_path):
    model = ViT(**SMALL)
    expected = other(values_of(model))
    source = {"state dict": expected, "source": TensorSource(expected)}.get(kind, tmp_path / f"a.{kind}")
    if kind in ("safetensors", "pth"):
        (save_file if kind == "safetensors" else torch.save)(expected, source)
    report = load_weights(model, source)
    assert_same(model, expected)
    assert set(report.loaded) == set(expected)
    assert (report.missing, report.unexpected, report.changes, dict(report.kept)) == ((), (), (), {})
    assert report.model is model
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_pieces_smaller_than_the_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr("dpzoo.weights.load.pieces", lambda bounds, itemsize: pieces(bounds, itemsize, limit=40))
    model = ViT(**SMALL)
    expected = other(values_of(model))
    save_file(expected, tmp_path / "a.safetensors")
    load_weights(model, tmp_path / "a.safetensors")
    assert_same(model, expected)


def test_any_module_with_its_own_names():
    model = Net()
    expected = other(values_of(model))
    del expected["second.weight"]  # safetensors keeps tied weights once
    report = load_weights(model, expected)
    assert torch.equal(model.second.weight, expected["first.weight"])
    assert model.second.weight is model.first.weight
    assert int(model.count) == 1
    assert report.missing == ()


def test_dtypes_are_the_models_and_told():
    model = Net(torch.float64)
    expected = {n: t.half() if t.is_floating_point() else t for n, t in other(values_of(model)).items()}
    report = load_weights(model, expected)
    assert model.first.weight.dtype is torch.float64
    assert_same(model, expected)
    assert report.cast["first.weight"] == "float16 -> float64"
    assert "cast: float16 -> float64" in str(report)
    assert "count" not in report.cast


def test_wrappers_are_looked_through():
    model = Net()
    expected = other(values_of(model))
    load_weights(torch.compile(model), {f"_orig_mod.module.{n}": t for n, t in expected.items()})
    assert_same(model, expected)


class TestNothingIsWrittenAfterAnError:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda v: v.pop("second.bias"), r"lacks second\.bias"),
            (lambda v: v.update(more=torch.ones(1)), "also has more"),
            (
                lambda v: v.update({"first.bias": torch.ones(4)}),
                r"first\.bias: \(4,\) in the file, \(3,\) in the model",
            ),
            (lambda v: v.update({"first.bias": torch.ones(3).int()}), "int32 in the file, float32 in the model"),
            (lambda v: v.update({"count": torch.tensor(1.0)}), "float32 in the file, int64 in the model"),
        ],
    )
    def test_names_and_shapes(self, change, message):
        model = Net()
        before = values_of(model)
        values = other(before)
        change(values)
        with pytest.raises(WeightsMismatchError, match=message):
            load_weights(model, values)
        assert_same(model, before)

    def test_another_architecture(self, tmp_path):
        model = ViT(**SMALL)
        before = values_of(model)
        save_file({"conv.weight": torch.ones(2), "fc.bias": torch.ones(3)}, tmp_path / "a.safetensors")
        with pytest.raises(WeightsMismatchError, match=r"a\.safetensors.*ViT"):
            load_weights(model, tmp_path / "a.safetensors")
        assert_same(model, before)

    def test_two_names_that_become_one(self):
        model = Net()
        before = values_of(model)
        values = {**other(before), "module.first.bias": torch.ones(3)}
        with pytest.raises(WeightsMismatchError, match=r"first\.bias"):
            load_weights(model, values)
        assert_same(model, before)

    def test_values_that_a_dialect_refuses(self):
        class Computed(TensorSource):
            def sliceable(self, name):
                return name != "second.bias"

            def read(self, name, slab=None):
                if name == "second.bias":
                    raise WeightsMismatchError("the copies are not equal")
                return super().read(name, slab)

        model = Net()
        before = values_of(model)
        with pytest.raises(WeightsMismatchError, match="copies are not equal"):
            load_weights(model, Computed(other(before)))
        assert_same(model, before)

    def test_a_wrong_hash(self, tmp_path):
        model = Net()
        before = values_of(model)
        values = {n: t.clone() for n, t in other(before).items() if n != "second.weight"}
        save_file(values, tmp_path / "a.safetensors")
        with pytest.raises(DamagedWeightsError, match="has sha256"):
            load_weights(model, tmp_path / "a.safetensors", sha256="00")
        assert_same(model, before)
        right = hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
        load_weights(model, tmp_path / "a.safetensors", sha256=right)
        assert int(model.count) == 1
        with pytest.raises(WeightsError, match="sha256 is checked of files"):
            load_weights(model, values, sha256="00")


def test_what_fits_without_strict():
    model = Net()
    before = values_of(model)
    values = {"first.bias": torch.full((3,), 5.0), "more": torch.ones(1)}
    report = load_weights(model, values, strict=False)
    assert report.loaded == ("first.bias",)
    assert set(report.missing) == {"first.weight", "second.weight", "second.bias", "count"}
    assert report.unexpected == ("more",)
    assert_same(model, before | {"first.bias": values["first.bias"]})
    text = str(report)
    assert "1 loaded" in text
    assert "missing: count, first.weight" in text
    assert "unexpected: more" in text


def test_which_state_dict_of_a_training_file(tmp_path):
    values = values_of(Net())
    torch.save({"model": values, "ema": other(values)}, tmp_path / "a.pt")
    model = Net()
    load_weights(model, tmp_path / "a.pt")
    assert_same(model, other(values))
    load_weights(model, tmp_path / "a.pt", ema=False)
    assert_same(model, values)
    load_weights(model, tmp_path / "a.pt", key="ema")
    assert_same(model, other(values))


def test_computed_tensors_are_read_once(tmp_path):
    class Computed(TensorSource):
        reads = 0

        def sliceable(self, name):
            return name != "first.weight"

        def read(self, name, slab=None):
            self.reads += name == "first.weight"
            return super().read(name, slab)

    source = Computed(other(values_of(Net())))
    plan = plan_load(Net(), source)
    plan.compute(plan.targets)
    for row in range(3):
        assert torch.equal(
            plan.read("first.weight", (slice(row, row + 1),)), source.read("first.weight")[row : row + 1]
        )
    assert source.reads == 1 + 3


def test_models_without_memory_and_other_places():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(WeightsError, match=r"has no memory \(meta device\); call model.to_empty"):
        load_weights(model, values_of(Net()))
    with pytest.raises(WeightsError, match="not a int"):
        load_weights(Net(), 3)  # type: ignore[arg-type]


def test_the_memory_of_a_source_is_not_the_models(tmp_path):
    values = values_of(Net())
    model = Net()
    load_weights(model, values)
    with torch.no_grad():
        model.first.weight.add_(1)
    assert not torch.equal(model.first.weight, values["first.weight"])
    torch.save(values, tmp_path / "a.pt")
    assert torch.equal(open_weights(tmp_path / "a.pt").read("first.weight"), values["first.weight"])
