"""Models that are saved with how they were built, and built again from it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dpzoo.models
from dpzoo.models import DiT, StormScope, ViT, create_model, list_models, register_model
from dpzoo.models.diffusion import EDMPreconditioner
from dpzoo.models.hub import HubMixin, build_from_config, config_of
from dpzoo.models.registry import create_tiny_model
from dpzoo.weights import DamagedWeightsError, WeightsError
from dpzoo.weights.resampling import resample_positions
from tests.models.lively import liven

SMALL = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(
        torch.equal(t, second[name]) and t.dtype is second[name].dtype for name, t in first.items()
    )


def test_every_registered_model_is_described_by_json():
    for name in list_models():
        with torch.device("meta"):
            model = create_tiny_model(name)
            again = build_from_config(json.loads(json.dumps(config_of(model))))
        assert type(again) is type(model), name
        assert {n: t.shape for n, t in again.state_dict().items()} == {
            n: t.shape for n, t in model.state_dict().items()
        }
        assert repr(again) == repr(model), name


@pytest.mark.parametrize("name", ["vit_nano_patch4_dense", "transolver_nano", "stormscope_nano"])
def test_a_folder_and_back(name, tmp_path):
    name = name if name in list_models() else list_models(name.split("_")[0])[0]
    model = create_tiny_model(name)
    liven(model)
    assert isinstance(model, HubMixin)
    model.save_pretrained(tmp_path / "out", extra={"epoch": 3})
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    again = type(model).from_pretrained(tmp_path / "out")
    assert same(again, model)
    assert not again.training
    inputs = model.eval().example_inputs()
    assert torch.equal(again(*inputs), model(*inputs))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model"], config["extra"]) == (name, {"epoch": 3})
    assert config_of(again)["arguments"] == config["arguments"]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(model.state_dict())


class TestArguments:
    def test_of_a_class_positional_and_named(self, tmp_path):
        model = ViT((8, 12), 4, embed_dim=12, depth=1, num_heads=2).double()
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["model"] == "ViT"
        assert config["arguments"] == {
            "img_size": [8, 12],
            "patch_size": 4,
            "embed_dim": 12,
            "depth": 1,
            "num_heads": 2,
        }
        assert config["dtype"] == "float64"
        assert same(ViT.from_pretrained(tmp_path), model)

    def test_of_a_class_that_passes_some_on(self):
        model = StormScope((8, 8), 2, background_chans=1, patch_size=4, embed_dim=16, depth=1, num_heads=2)
        named = {"background_chans": 1, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        assert config_of(model)["arguments"] == {"img_size": [8, 8], "in_chans": 2, **named}
        assert repr(build_from_config(config_of(model))) == repr(model)

    def test_a_model_inside_a_model(self, tmp_path):
        network = DiT((8, 8), 4, 2, embed_dim=16, depth=1, num_heads=2)
        model = EDMPreconditioner(network, sigma_data=[0.5, 0.7])
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["arguments"]["network"]["model"] == "DiT"
        assert same(EDMPreconditioner.from_pretrained(tmp_path), model)

    def test_those_given_go_first(self, tmp_path):
        ViT(**SMALL).save_pretrained(tmp_path)
        assert ViT.from_pretrained(tmp_path, drop_path_rate=0.2).state_dict().keys() == ViT(**SMALL).state_dict().keys()
        with pytest.raises(WeightsError, match=r"ViT cannot be built from config\.json"):
            ViT.from_pretrained(tmp_path, no_such_argument=1)

    def test_what_json_cannot_hold(self, tmp_path):
        class Odd(HubMixin, nn.Module):
            def __init__(self, act: object) -> None:
                super().__init__()

        with pytest.raises(WeightsError, match="the argument act is a type, which config"):
            Odd(nn.ReLU).save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())

    def test_survive_copies(self):
        import copy
        import pickle

        model = create_model("vit_nano_patch4", depth=1)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert config_of(again) == config_of(model)

    def test_of_models_that_are_not_of_the_zoo(self):
        with pytest.raises(WeightsError, match="how this Linear was built is not known"):
            config_of(nn.Linear(2, 2))


class TestFromPretrained:
    def test_a_bare_file_with_arguments(self, tmp_path):
        model = ViT(**SMALL)
        save_file(model.state_dict(), tmp_path / "a.safetensors")
        assert same(ViT.from_pretrained(tmp_path / "a.safetensors", **SMALL), model)

    def test_another_class(self, tmp_path):
        ViT(**SMALL).save_pretrained(tmp_path)
        with pytest.raises(WeightsError, match="is a ViT, not a DiT: use ViT"):
            DiT.from_pretrained(tmp_path)

    def test_a_model_that_is_not_known(self, tmp_path):
        ViT(**SMALL).save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"ViT"', '"os:system"'))
        with pytest.raises(WeightsError, match="describes the model 'os:system', which is not known here"):
            ViT.from_pretrained(tmp_path)

    def test_damaged_files(self, tmp_path):
        ViT(**SMALL).save_pretrained(tmp_path)
        with pytest.raises(DamagedWeightsError, match="has sha256"):
            ViT.from_pretrained(tmp_path, sha256={"model.safetensors": "00"})
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
        with pytest.raises(DamagedWeightsError, match="was it cut off"):
            ViT.from_pretrained(tmp_path)


class TestWriting:
    def test_several_files(self, tmp_path):
        model = ViT(**SMALL)
        model.save_pretrained(tmp_path, max_shard_bytes=2000)
        files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
        assert len(files) > 2
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        assert same(ViT.from_pretrained(tmp_path), model)
        model.save_pretrained(tmp_path)
        assert [p.name for p in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
        assert same(ViT.from_pretrained(tmp_path), model)

    def test_shared_and_oddly_laid_tensors(self, tmp_path):
        model = ViT(**SMALL)
        with torch.no_grad():
            model.head.weight = nn.Parameter(torch.randn(12, 3).t())
        big = torch.randn(4, 12, 4)
        model.patch_embed.proj.bias = nn.Parameter(big[0, :, 0])  # a view of a larger storage
        model.save_pretrained(tmp_path)
        assert same(ViT.from_pretrained(tmp_path), model)

    def test_other_weights_than_the_models(self, tmp_path):
        model = ViT(**SMALL)
        average = {name: t + 1 for name, t in model.state_dict().items()}
        model.save_pretrained(tmp_path, state_dict=average)
        found = ViT.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(found[name], t) for name, t in average.items())


def test_push_to_hub(monkeypatch):
    sent = {}

    class Api:
        def __init__(self, token=None):
            sent["token"] = token

        def create_repo(self, repo_id, private=None, exist_ok=False):
            sent["private"] = private
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})

        def upload_folder(self, repo_id, folder_path, **options):
            sent.update(options, repo_id=repo_id, names=sorted(p.name for p in folder_path.iterdir()))
            return "https://hub/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert ViT(**SMALL).push_to_hub("small", private=True, token="t", create_pr=True) == "https://hub/commit"
    assert sent == {
        "token": "t",
        "private": True,
        "repo_id": "me/small",
        "names": ["README.md", "config.json", "model.safetensors"],
        "commit_message": "Add weights",
        "revision": None,
        "create_pr": True,
    }


def test_registered_by_others(tmp_path, monkeypatch):
    registry = dpzoo.models.registry
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    monkeypatch.setattr(registry, "_EXAMPLES", dict(registry._EXAMPLES))

    @register_model
    def my_linear(size: int = 2) -> nn.Module:
        return nn.Linear(size, size)

    assert config_of(create_model("my_linear", size=3))["arguments"] == {"size": 3}
    assert build_from_config({"model": "my_linear", "arguments": {"size": 3}}).weight.shape == (3, 3)


class TestGridOfPositions:
    """Rows of a position embedding do not tell their grid: ``config.json`` does."""

    def test_goes_into_a_folder_and_is_used_for_another_size(self, tmp_path):
        @register_model
        def wide_vit(img_size: tuple[int, int] = (12, 20), **arguments) -> ViT:
            small = {"patch_size": 4, "in_chans": 2, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}
            return ViT(img_size=img_size, **{**small, **arguments})

        model = create_model("wide_vit")
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["arguments"], config["position_grid"]) == ({}, [3, 5])
        assert same(ViT.from_pretrained(tmp_path), model)
        wider = ViT.from_pretrained(tmp_path, img_size=(16, 24))
        expected = resample_positions(model.pos_embed, (3, 5), (4, 6), prefix_tokens=1)
        torch.testing.assert_close(wider.pos_embed, expected, rtol=0, atol=2e-6)
        wider.save_pretrained(tmp_path / "wider")
        assert json.loads((tmp_path / "wider" / "config.json").read_text())["position_grid"] == [4, 6]

    def test_of_a_model_inside_a_model(self):
        network = DiT((8, 12), 4, 2, embed_dim=16, depth=1, num_heads=2, pos_embed="learned")
        assert config_of(EDMPreconditioner(network, sigma_data=[0.5, 0.7]))["position_grid"] == [2, 3]

    def test_is_not_noted_where_there_are_no_positions(self):
        network = DiT((8, 12), 4, 2, embed_dim=16, depth=1, num_heads=2, pos_embed="none")
        assert "position_grid" not in config_of(network)
        assert "position_grid" not in config_of(create_tiny_model(list_models("unet")[0]))
