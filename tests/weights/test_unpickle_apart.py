"""Whole pickled modules: their tensors come out, and nothing that the file names is imported or called."""

import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpzoo.cli import main
from dpzoo.weights import WeightsError, open_weights
from dpzoo.weights.unpickle_apart import tensors_in


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(2, 3), Inner())
        self.tied = self.inner[0]
        self.act = nn.GELU()
        self.options = {"function": os.path.join}


def assert_state(found: dict[str, torch.Tensor], module: nn.Module) -> None:
    expected = module.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


@pytest.mark.parametrize("kind", ["zip", "old", "pickle"])
def test_a_module(kind, tmp_path):
    path = tmp_path / "model.pth"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Outer()))
    else:
        torch.save(Outer(), path, _use_new_zipfile_serialization=kind == "zip")
    assert_state(tensors_in(path), Outer())


@pytest.mark.parametrize("kind", ["zip", "old", "pickle"])
def test_nothing_is_called(kind, tmp_path):
    made, path = tmp_path / "made", tmp_path / "model.pth"
    content = OrderedDict(evil=Evil(made), net=Outer())
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    assert "net.inner.0.weight" in tensors_in(path)
    assert not made.exists()


def test_what_is_no_pickle(tmp_path):
    (tmp_path / "a.pkl").write_bytes(b"hello")
    with pytest.raises(WeightsError, match="cannot be unpickled"):
        tensors_in(tmp_path / "a.pkl")
    torch.save({"epoch": 1}, tmp_path / "b.pt")
    with pytest.raises(WeightsError, match="holds no tensors"):
        tensors_in(tmp_path / "b.pt")


def test_the_command(tmp_path, capsys, monkeypatch):
    source, out = tmp_path / "model.pth", tmp_path / "model.safetensors"
    torch.save(Outer(), source)
    assert main(["convert", "pickle", str(source), str(out)]) == 2
    assert "pass --unsafe-pickle if you trust it" in capsys.readouterr().err
    assert not out.exists()
    called = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: called.append(command) or subprocess.CompletedProcess("", 0)
    )
    assert main(["convert", "pickle", str(source), str(out), "--unsafe-pickle"]) == 0
    assert called == [[sys.executable, "-m", "dpzoo.weights.unpickle_apart", source, out]]
    from dpzoo.weights.unpickle_apart import main as convert

    assert convert(str(source), str(out)) == 0
    assert set(load_file(out)) == {n for n in Outer().state_dict() if not n.startswith("tied")}
    assert open_weights(out).shape("inner.0.weight") == (3, 2)
