"""Names: registering, listing, building, and what an unknown or doubled name answers."""

import importlib.metadata
import warnings

import pytest
from torch import nn

from dpzoo.models import UnknownModelError, create_model, list_models, register_model, registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A copy of the registry that the test may fill."""
    builders = dict(registry._BUILDERS)
    monkeypatch.setattr(registry, "_BUILDERS", builders)
    return builders


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch):
    """Call it with a function: that function is what the only entry point of the group loads."""

    def install(load) -> None:
        class Point:
            name, value = "other", "other_package.models"

            def load(self):
                return load()

        def entry_points(group: str):
            return [Point()] if group == "dpzoo.models" else importlib.metadata.entry_points(group=group)

        monkeypatch.setattr(registry, "entry_points", entry_points)
        registry._load_entry_points.cache_clear()

    yield install
    monkeypatch.undo()
    registry._load_entry_points.cache_clear()


def test_list_is_sorted_as_people_count_and_filters():
    names = list_models("vit_tiny")
    assert names == [f"vit_tiny_patch{p}" for p in (8, 14, 16, 32)]
    assert list_models("vit_*_patch16") == [f"vit_{s}_patch16" for s in ("base", "large", "small", "tiny")]
    assert list_models("no such part") == []
    assert set(list_models("nano")) < set(list_models())


def test_kwargs_override_the_variant():
    model = create_model("vit_nano_patch4", depth=1, img_size=(8, 12), in_chans=5, num_classes=7)
    assert len(model.blocks) == 1
    assert model.patch_embed.grid_size == (2, 3)
    assert model.patch_embed.proj.weight.shape == (64, 5, 4, 4)
    assert model.head.out_features == 7


def test_unknown_name_lists_close_ones():
    with pytest.raises(UnknownModelError, match=r"'vit_smal_patch16'.*did you mean vit_small_patch16") as caught:
        create_model("vit_smal_patch16")
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnknownModelError, match=r"'qqq'.*names are known.*list_models"):
        create_model("qqq")


def test_register_by_function_name_and_by_given_name(own_registry):
    @register_model
    def first(width: int = 3) -> nn.Module:
        return nn.Linear(width, width)

    @register_model(name="second.of-them")
    def other() -> nn.Module:
        return nn.Identity()

    assert create_model("first", width=4).in_features == 4
    assert isinstance(create_model("second.of-them"), nn.Identity)
    assert "first" in list_models()


def test_a_name_has_one_owner(own_registry):
    def one() -> nn.Module:
        return nn.Identity()

    def two() -> nn.Module:
        return nn.Identity()

    register_model(name="mine")(one)
    register_model(name="mine")(one)  # importing a module twice is harmless
    with pytest.raises(ValueError, match=r"'mine' is already registered by .*one; .*two must choose another name"):
        register_model(name="mine")(two)
    assert own_registry["mine"] is one


def test_entry_points_are_loaded_only_when_needed(own_registry, entry_point):
    loads = []

    def load() -> None:
        loads.append(1)
        register_model(name="outside")(nn.Identity)

    entry_point(load)
    create_model("vit_nano_patch8", depth=1)
    assert not loads
    assert isinstance(create_model("outside"), nn.Identity)
    assert "outside" in list_models()
    assert loads == [1]


def test_a_broken_entry_point_hides_nothing_else(own_registry, entry_point):
    def load() -> None:
        raise ImportError("no module named other_package")

    entry_point(load)
    with pytest.warns(UserWarning, match=r"'other' \(other_package.models\) are left out: ImportError: no module"):
        assert "vit_nano_patch4" in list_models()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "vit_nano_patch4" in list_models()  # said once
