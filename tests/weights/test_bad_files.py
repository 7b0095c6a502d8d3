"""Damaged, malicious and mistaken files: one clear error each, and nothing is run, unpacked or allocated."""

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from dpzoo.weights import DamagedWeightsError, UnsafeWeightsError, WeightsError, open_weights
from dpzoo.weights.places import check_sha256, locate
from tests.weights.made import state, write_mdlus


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def header(entries: dict, data: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def zip_of(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class TestTruncated:
    @pytest.mark.parametrize("kind", ["a.safetensors", "a.pth", "old.pth", "zip.mdlus", "tar.mdlus"])
    def test_at_any_place(self, kind, tmp_path):
        path = tmp_path / kind
        if kind.endswith("mdlus"):
            write_mdlus(path, state(), {}, kind[:3])
        elif kind.endswith("safetensors"):
            save_file(state(), path)
        else:
            torch.save(state(), path, _use_new_zipfile_serialization=kind != "old.pth")
        whole = path.read_bytes()
        ends = [3, 9, 100, len(whole) // 2, len(whole) - 40, len(whole) - 1]
        if kind == "tar.mdlus":  # its end is padding, which nobody misses
            ends = ends[:4]
        for end in ends:
            path.write_bytes(whole[:end])
            with pytest.raises(WeightsError) as raised:
                open_weights(path)
            assert str(path) in str(raised.value), end
            if end > 600:
                assert isinstance(raised.value, DamagedWeightsError), (end, raised.value)

    def test_after_it_was_opened(self, tmp_path):
        save_file({"x": torch.randn(100)}, tmp_path / "a.safetensors")
        source = open_weights(tmp_path / "a.safetensors")
        os.truncate(tmp_path / "a.safetensors", 200)
        with pytest.raises(DamagedWeightsError, match="ends at byte 200, inside a tensor"):
            source.read("x")

    def test_dcp(self, tmp_path):
        dcp.save({"model": state()}, no_dist=True, checkpoint_id=tmp_path / "a")
        data = next((tmp_path / "a").glob("*.distcp"))
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(DamagedWeightsError, match=r"ends before \S+ does"):
            open_weights(tmp_path / "a")
        data.unlink()
        with pytest.raises(DamagedWeightsError, match="is missing"):
            open_weights(tmp_path / "a")
        os.truncate(tmp_path / "a" / ".metadata", 100)
        with pytest.raises(DamagedWeightsError, match="was it cut off"):
            open_weights(tmp_path / "a")

    def test_an_index_whose_files_are_not_all_there(self, tmp_path):
        save_file({"x": torch.ones(2)}, tmp_path / "one.safetensors")
        table = {"x": "one.safetensors", "y": "two.safetensors"}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(DamagedWeightsError, match=r"names two.safetensors, which is missing"):
            open_weights(tmp_path)
        index.write_text(json.dumps({"weight_map": table | {"y": "one.safetensors"}}))
        with pytest.raises(DamagedWeightsError, match=r"one.safetensors does not have y"):
            open_weights(tmp_path)
        index.write_text("[]")
        with pytest.raises(DamagedWeightsError, match="no weight_map"):
            open_weights(tmp_path)


class TestSafetensorsHeaders:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (struct.pack("<Q", 1 << 60) + b"{}", "does not fit"),
            (struct.pack("<Q", 90_000_000) + b"{}", "does not fit"),
            (header(b"{not json"), "cannot be read"),
            (header(b"[" * 100_000), "cannot be read"),
            (header({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}, bytes(8)), "does not have"),
            (header({"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, bytes(8)), "whole numbers"),
            (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)), "begins at byte 4"),
            (header({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)), "cannot be read"),
            (header({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, bytes(1)), "F4 is not supported"),
            (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(9)), "header describes"),
            (
                header(
                    {
                        "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                        "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                    },
                    bytes(4),
                ),
                "begins at byte 0",
            ),
            (
                header(
                    b'{"x": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                    b' "x": {"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
                    bytes(8),
                ),
                "names 'x' twice",
            ),
        ],
    )
    def test_lies(self, content, message, tmp_path):
        (tmp_path / "a.safetensors").write_bytes(content)
        with pytest.raises(WeightsError, match=message):
            open_weights(tmp_path / "a.safetensors")


class TestPickles:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_no_code_is_run(self, zipped, tmp_path):
        made = tmp_path / "made"
        torch.save({"w": torch.ones(2), "x": Evil(made)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsafeWeightsError, match=r"posix.mkdir|mkdir"):
            open_weights(tmp_path / "a.pt")
        assert not made.exists()

    @pytest.mark.parametrize("zipped", [True, False])
    def test_whole_modules_are_refused(self, zipped, tmp_path):
        torch.save(Net(), tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        with pytest.raises(UnsafeWeightsError, match=r"holds \S*Net, not only tensors.*convert pickle --unsafe-pickle"):
            open_weights(tmp_path / "a.pth")

    def test_plain_pickles_and_torchscript(self, tmp_path):
        made = tmp_path / "made"
        (tmp_path / "a.pkl").write_bytes(pickle.dumps({"x": Evil(made)}))
        with pytest.raises(WeightsError, match=r"a\.pkl"):
            open_weights(tmp_path / "a.pkl")
        assert not made.exists()
        zip_of(tmp_path / "b.pt", {"b/data.pkl": b"", "b/constants.pkl": b"", "b/code/x.py": b""})
        with pytest.raises(UnsafeWeightsError, match="TorchScript"):
            open_weights(tmp_path / "b.pt")

    def test_mdlus_is_read_the_same_way(self, tmp_path):
        made = tmp_path / "made"
        write_mdlus(tmp_path / "a.mdlus", {"x": Evil(made)}, {})
        with pytest.raises(UnsafeWeightsError):
            open_weights(tmp_path / "a.mdlus")
        assert not made.exists()

    def test_dcp_metadata(self, tmp_path):
        made = tmp_path / "made"
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil(made)))
        with pytest.raises(UnsafeWeightsError, match=r"names posix.mkdir"):
            open_weights(tmp_path / "a")
        assert not made.exists()

    def test_dcp_files_elsewhere(self, tmp_path):
        dcp.save({"model": state()}, no_dist=True, checkpoint_id=tmp_path / "a")
        metadata = tmp_path / "a" / ".metadata"
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../secret"))
        with pytest.raises(UnsafeWeightsError, match="outside the folder"):
            open_weights(tmp_path / "a")

    def test_a_tensor_larger_than_its_storage(self, tmp_path):
        torch.save({"x": torch.arange(4.0)}, tmp_path / "a.pt")
        with zipfile.ZipFile(tmp_path / "a.pt") as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist()}
        name = next(name for name in members if name.endswith("data.pkl"))
        whole = members[name]
        members[name] = whole.replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85")
        assert members[name] != whole
        zip_of(tmp_path / "b.pt", members)
        with pytest.raises(DamagedWeightsError):
            open_weights(tmp_path / "b.pt")


class TestArchives:
    NAMES = ["../evil.json", "/etc/evil", "a/../../evil", "C:\\evil", "..\\evil"]

    @pytest.mark.parametrize("name", NAMES)
    def test_names_that_leave_the_folder(self, name, tmp_path):
        zip_of(tmp_path / "a.mdlus", {"model.pt": b"", "args.json": b"{}", name: b"x"})
        with pytest.raises(UnsafeWeightsError, match="outside the folder"):
            open_weights(tmp_path / "a.mdlus")
        with tarfile.open(tmp_path / "b.mdlus", "w") as archive:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        with pytest.raises(UnsafeWeightsError, match="outside the folder"):
            open_weights(tmp_path / "b.mdlus")

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
    def test_links_and_devices(self, kind, tmp_path):
        with tarfile.open(tmp_path / "a.mdlus", "w") as archive:
            info = tarfile.TarInfo("model.pt")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        with pytest.raises(UnsafeWeightsError, match="a link, a device"):
            open_weights(tmp_path / "a.mdlus")
        link = zipfile.ZipInfo("model.pt")
        link.external_attr = 0o120777 << 16
        with zipfile.ZipFile(tmp_path / "b.mdlus", "w") as archive:
            archive.writestr("args.json", b"{}")
            archive.writestr(link, "/etc/passwd")
        with pytest.raises(UnsafeWeightsError, match="is a link"):
            open_weights(tmp_path / "b.mdlus")

    def test_bombs(self, tmp_path):
        zip_of(tmp_path / "a.mdlus", {"args.json": b"{}", "model.pt": bytes(1 << 22)}, zipfile.ZIP_DEFLATED)
        with pytest.raises(UnsafeWeightsError, match="compressed"):
            open_weights(tmp_path / "a.mdlus")
        with tarfile.open(tmp_path / "b.mdlus", "w") as archive:
            archive.addfile(tarfile.TarInfo("args.json"))
            info = tarfile.TarInfo("model.pt")
            info.size = 1 << 50
            archive.addfile(info, io.BytesIO(b"")) if False else archive.fileobj.write(info.tobuf())
        with pytest.raises(WeightsError):
            open_weights(tmp_path / "b.mdlus")
        with tarfile.open(tmp_path / "c.mdlus", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("args.json"))
        with pytest.raises(UnsafeWeightsError, match="compressed"):
            open_weights(tmp_path / "c.mdlus")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_a_name_that_comes_twice(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.mdlus", "w") as archive:
            archive.writestr("args.json", b"{}")
            archive.writestr("args.json", b"{}")
        with pytest.raises(UnsafeWeightsError, match=r"same name: args.json"):
            open_weights(tmp_path / "a.mdlus")

    def test_mdlus_that_lacks_a_file_or_has_no_json(self, tmp_path):
        zip_of(tmp_path / "a.mdlus", {"args.json": b"{}"})
        with pytest.raises(DamagedWeightsError, match=r"without model.pt"):
            open_weights(tmp_path / "a.mdlus")
        zip_of(tmp_path / "b.mdlus", {"args.json": b"{nonsense", "model.pt": b""})
        with pytest.raises(DamagedWeightsError, match="is no JSON"):
            open_weights(tmp_path / "b.mdlus")

    @pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/b.safetensors", 3, ".."])
    def test_an_index_that_points_elsewhere(self, name, tmp_path):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UnsafeWeightsError, match="not one of its own folder"):
            open_weights(tmp_path)


class TestMistakes:
    @pytest.mark.parametrize(
        "content", [b"", bytes(4096), b"PK\x05\x06" + bytes(18), b"\x89HDF\r\n" + bytes(99), b"hello"]
    )
    def test_other_files(self, content, tmp_path):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(WeightsError, match=r"a\.bin"):
            open_weights(tmp_path / "a.bin")

    def test_a_config_that_is_none(self, tmp_path):
        save_file(state(), tmp_path / "model.safetensors")
        for text in ("{", "[1]"):
            (tmp_path / "config.json").write_text(text)
            with pytest.raises(DamagedWeightsError, match=r"config\.json"):
                open_weights(tmp_path)

    def test_no_tensors(self, tmp_path):
        torch.save({"epoch": 3}, tmp_path / "a.pt")
        with pytest.raises(WeightsError, match=r"no tensors .* it holds epoch \(int\)"):
            open_weights(tmp_path / "a.pt")
        torch.save([torch.ones(2)], tmp_path / "b.pt")
        with pytest.raises(WeightsError, match="holds a list"):
            open_weights(tmp_path / "b.pt")

    def test_sparse_tensors(self, tmp_path):
        torch.save({"x": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
        with pytest.raises(WeightsError, match=r"sparse|cannot be read"):
            open_weights(tmp_path / "a.pt")

    def test_a_wrong_hash(self, tmp_path):
        path = tmp_path / "a.safetensors"
        save_file(state(), path)
        import hashlib

        right = hashlib.sha256(path.read_bytes()).hexdigest()
        check_sha256(path, right.upper())
        check_sha256(tmp_path, {"a.safetensors": "sha256:" + right})
        with pytest.raises(DamagedWeightsError, match=f"has sha256 {right}, not 0000"):
            check_sha256(path, "0000")
        with pytest.raises(DamagedWeightsError, match=r"b\.safetensors, whose sha256 is given, is missing"):
            check_sha256(tmp_path, {"b.safetensors": right})
        with pytest.raises(WeightsError, match="is a folder: pass sha256="):
            check_sha256(tmp_path, right)


class TestHubIds:
    @pytest.mark.parametrize("download", [True, False])
    def test_offline(self, download, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(WeightsError, match=r"org/name is neither a path nor in the local cache .* HF_HUB_OFFLINE"):
            locate("org/name", download=download)

    def test_nothing_is_downloaded_unasked(self, tmp_path, monkeypatch):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("went over the network"))
        with pytest.raises(WeightsError, match="nothing is downloaded unless download=True"):
            locate("hf-hub:org/name")

    @pytest.mark.parametrize(
        "place", ["missing.safetensors", "a/b.safetensors", "a/b/c", "org/na me", Path("org/name")]
    )
    def test_what_is_no_id(self, place):
        with pytest.raises(WeightsError, match="no such file or folder"):
            locate(place)

    def test_a_cached_repository(self, tmp_path, monkeypatch):
        home = tmp_path / "models--org--name"
        (home / "snapshots" / "abc").mkdir(parents=True)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("abc")
        save_file(state(), home / "snapshots" / "abc" / "model.safetensors")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        assert open_weights(locate("org/name")).names() == open_weights(home).names()

    def test_what_is_downloaded(self, tmp_path, monkeypatch):
        asked = {}
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **o: asked.update(o) or str(tmp_path))
        files = ["config.json", "pytorch_model.bin", "model.safetensors", "onnx/model.onnx", "run.py"]
        monkeypatch.setattr("huggingface_hub.list_repo_files", lambda name, revision: files)
        assert locate("org/name", revision="abc", download=True) == tmp_path
        assert asked == {
            "revision": "abc",
            "local_files_only": False,
            "allow_patterns": ["*.json", "*.safetensors", "*.safetensors.index.json"],
        }
        files.remove("model.safetensors")
        locate("org/name", download=True)
        assert asked["allow_patterns"] == ["*.json", "*.bin", "*.bin.index.json"]
        files.remove("pytorch_model.bin")
        with pytest.raises(WeightsError, match="has no weights that can be read; it has config"):
            locate("org/name", download=True)

    def test_a_hub_that_does_not_answer(self, monkeypatch):
        def fail(*_, **__):
            raise ConnectionError("no route to host")

        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
        with pytest.raises(WeightsError, match=r"org/name cannot be had from the hub: ConnectionError: no route"):
            locate("org/name", download=True)
