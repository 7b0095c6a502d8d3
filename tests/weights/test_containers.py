"""Every container gives the values that its own library wrote, whole and by the slab."""

import argparse
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

from dpzoo.weights import WeightsError, WeightSource, open_weights
from dpzoo.weights.pieces import pieces
from dpzoo.weights.regions import Region, read_region
from tests.weights.made import EXAMPLES, state, write_mdlus

DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def assert_holds(source: WeightSource, expected: dict[str, torch.Tensor]) -> None:
    assert isinstance(source, WeightSource)
    assert set(source.names()) == set(expected)
    for name, value in expected.items():
        assert source.shape(name) == tuple(value.shape)
        assert source.dtype(name) == value.dtype
        assert torch.equal(source.read(name), value), name
        for slab in slabs(value):
            assert torch.equal(source.read(name, slab), value[slab]), (name, slab)
    with pytest.raises(KeyError):
        source.read("no such name")


def slabs(value: torch.Tensor) -> list[tuple[slice, ...]]:
    """The first dim cut, the last cut, all cut, nothing, and an empty one."""
    shape = value.shape
    if not shape or 0 in shape:
        return [()]
    inner = tuple(slice(n // 3, n - n // 4) for n in shape)
    return [(), inner[:1], (*(slice(0, n) for n in shape[:-1]), inner[-1]), inner, (slice(1, 1),)]


class TestSafetensors:
    def test_every_dtype(self, tmp_path):
        values = {str(d): (torch.arange(24).view(2, 3, 4) % 5).to(d) for d in DTYPES}
        values |= {"scalar": torch.tensor(3.0), "nothing": torch.empty(0, 4)}
        save_file(values, tmp_path / "a.safetensors")
        assert_holds(open_weights(tmp_path / "a.safetensors"), values)

    def test_order_is_the_files(self, tmp_path):
        save_file(state(), tmp_path / "a.safetensors", metadata={"format": "pt"})
        with safe_open(tmp_path / "a.safetensors", "pt") as file:
            assert set(open_weights(tmp_path / "a.safetensors").names()) == set(file.keys())

    def test_rows_too_long_to_read_together(self, tmp_path, monkeypatch):
        monkeypatch.setattr("dpzoo.weights.regions.SCRATCH_BYTES", 64)
        values = {"x": torch.randn(3, 4, 5, 6), "y": torch.randn(40, 3)}
        save_file(values, tmp_path / "a.safetensors")
        assert_holds(open_weights(tmp_path / "a.safetensors"), values)

    def test_several_files_with_an_index(self, tmp_path):
        values = state()
        names = list(values)
        parts = {"m-1.safetensors": names[:2], "m-2.safetensors": names[2:]}
        for file, part in parts.items():
            save_file({name: values[name] for name in part}, tmp_path / file)
        table = {name: file for file, part in parts.items() for name in part}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
        (tmp_path / "config.json").write_text('{"architecture": "vit_tiny"}')
        source = open_weights(tmp_path)
        assert_holds(source, values)
        assert source.config == {"architecture": "vit_tiny"}


class TestTorchFiles:
    @pytest.mark.parametrize("zipped", [True, False])
    def test_bare_state_dict(self, zipped, tmp_path):
        values = state() | {str(d): torch.ones(3).to(d) for d in DTYPES}
        torch.save(values, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        assert_holds(open_weights(tmp_path / "a.pth"), values)

    def test_tensors_that_are_views(self, tmp_path):
        base = torch.randn(6, 8)
        values = {
            "turned": base.t(),
            "middle": base[2:4, 1:7],
            "spread": base[:1].expand(3, 8),
            "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "parameter": torch.nn.Parameter(torch.randn(3)),
        }
        torch.save(values, tmp_path / "a.pt")
        assert_holds(open_weights(tmp_path / "a.pt"), values)

    @pytest.mark.parametrize(
        ("kept", "asked", "expected"),
        [
            (("model", "ema", "opt"), {}, "ema"),
            (("model", "ema"), {"ema": False}, "model"),
            (("state_dict", "state_dict_ema", "model_ema"), {}, "state_dict_ema"),
            (("state_dict", "model_ema"), {}, "model_ema"),
            (("student", "teacher"), {}, "teacher"),
            (("network_weights", "optimizer_state"), {}, "network_weights"),
            (("model", "ema", "special"), {"key": "special"}, "special"),
        ],
    )
    def test_training_files(self, kept, asked, expected, tmp_path):
        values = {key: {name: t + i for name, t in state().items()} for i, key in enumerate(kept)}
        torch.save({**values, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, tmp_path / "a.pt")
        source = open_weights(tmp_path / "a.pt", **asked)
        assert_holds(source, values[expected])
        assert source.origin.endswith(f"a.pt[{expected}]")

    def test_a_key_inside_keys_with_dots(self, tmp_path):
        torch.save({"a.b": {"c": {"w": torch.ones(2)}}, "a": {"x": 1}}, tmp_path / "a.pt")
        assert open_weights(tmp_path / "a.pt", key="a.b.c").names() == ("w",)
        with pytest.raises(WeightsError, match=r"no tensors under key='a.c'; it holds a.b \(dict\), a \(dict\)"):
            open_weights(tmp_path / "a.pt", key="a.c")

    def test_a_state_dict_whose_modules_are_called_as_a_key_is(self, tmp_path):
        values = {"model.0.weight": torch.ones(2), "ema.weight": torch.zeros(2)}
        torch.save(values, tmp_path / "a.pt")
        assert_holds(open_weights(tmp_path / "a.pt"), values)


class TestPhysicsNeMo:
    @pytest.mark.parametrize("kind", ["zip", "tar"])
    def test_mdlus(self, kind, tmp_path):
        arguments = {"__name__": "Transolver", "__args__": {"n_hidden": 64}}
        write_mdlus(tmp_path / "m.mdlus", state(), arguments, kind)
        source = open_weights(tmp_path / "m.mdlus")
        assert_holds(source, state())
        assert source.config == {"args": arguments, "metadata": {"mdlus_file_version": "0.1.0"}}

    @pytest.mark.parametrize(
        ("name", "first"), [("edm_dit", "sigma_data"), ("transolver", "preprocess.layers.0.weight")]
    )
    def test_files_that_physicsnemo_wrote(self, name, first):
        source = open_weights(EXAMPLES / f"{name}.mdlus")
        with zipfile.ZipFile(EXAMPLES / f"{name}.mdlus") as archive:
            expected = torch.load(archive.open("model.pt"), weights_only=True)
        assert source.names()[0] == first
        assert_holds(source, dict(expected))

    def test_the_last_epoch_of_a_training_folder(self, tmp_path):
        for epoch in (2, 10):
            values = {name: t + epoch for name, t in state().items()}
            write_mdlus(tmp_path / f"Net.0.{epoch}.mdlus", values, {}, "zip")
            torch.save({"epoch": epoch}, tmp_path / f"checkpoint.0.{epoch}.pt")
        assert_holds(open_weights(tmp_path), {name: t + 10 for name, t in state().items()})
        write_mdlus(tmp_path / "Other.0.3.mdlus", state(), {}, "zip")
        with pytest.raises(WeightsError, match=r"several models or parts: .*Other.0.3.mdlus"):
            open_weights(tmp_path)


class TestFolders:
    @pytest.mark.parametrize(
        "names",
        [
            ("model.safetensors", "pytorch_model.bin"),
            ("pytorch_model.bin", "other.bin"),
            ("open_clip_pytorch_model.bin",),
            ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"),
            ("only.pth",),
        ],
    )
    def test_the_file_that_counts(self, names, tmp_path):
        for i, name in enumerate(names):
            values = {key: t + i for key, t in state().items()}
            (save_file if name.endswith("safetensors") else torch.save)(values, tmp_path / name)
        (tmp_path / "config.json").write_text("{}")
        assert_holds(open_weights(tmp_path), state())

    def test_a_diffusers_pipeline(self, tmp_path):
        network = tmp_path / "transformer"
        network.mkdir()
        (tmp_path / "model_index.json").write_text("{}")
        (network / "config.json").write_text('{"_class_name": "DiTTransformer2DModel"}')
        save_file(state(), network / "diffusion_pytorch_model.safetensors")
        source = open_weights(tmp_path)
        assert_holds(source, state())
        assert source.config == {"_class_name": "DiTTransformer2DModel"}

    def test_a_hugging_face_cache(self, tmp_path):
        home = tmp_path / "models--org--name"
        for commit in ("aaa111", "bbb222"):
            (home / "snapshots" / commit).mkdir(parents=True)
            (home / "blobs").mkdir(exist_ok=True)
            save_file({name: t + (commit == "bbb222") for name, t in state().items()}, home / "blobs" / commit)
            (home / "snapshots" / commit / "model.safetensors").symlink_to(home / "blobs" / commit)
        with pytest.raises(WeightsError, match="2 snapshots and no refs/main"):
            open_weights(home)
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text("bbb222")
        assert_holds(open_weights(home), {name: t + 1 for name, t in state().items()})

    def test_unclear_ones_say_what_is_there(self, tmp_path):
        with pytest.raises(WeightsError, match="none of model"):
            open_weights(tmp_path)
        for name in ("a.pt", "b.pth"):
            torch.save(state(), tmp_path / name)
        with pytest.raises(WeightsError, match=r"several: a.pt, b.pth; give the path of one"):
            open_weights(tmp_path)
        with pytest.raises(WeightsError, match="no such file"):
            open_weights(tmp_path / "missing.pt")


class TestDcp:
    def test_a_folder_written_by_one_process(self, tmp_path):
        values = state()
        dcp.save({"model": values, "epoch": 3, "average": {"pos_embed": values["pos_embed"] + 1}}, no_dist=True,
                 checkpoint_id=tmp_path / "step_00000012")  # fmt: skip
        assert_holds(open_weights(tmp_path / "step_00000012", ema=False), values)
        (tmp_path / "model.json").write_text('{"model": "vit_nano_patch4", "arguments": {}}')
        assert open_weights(tmp_path).config == {"model": "vit_nano_patch4", "arguments": {}}
        averaged = values | {"pos_embed": values["pos_embed"] + 1}
        assert_holds(open_weights(tmp_path), averaged)  # the folder of the run; buffers come from beside the average
        dcp.save({"model": values}, no_dist=True, checkpoint_id=tmp_path / "step_00000020")
        assert_holds(open_weights(tmp_path), values)
        (tmp_path / "latest").write_text("step_00000012\n")
        assert_holds(open_weights(tmp_path), averaged)

    def test_chunks_of_any_size(self, tmp_path):
        from dpzoo.weights.archives import Member
        from dpzoo.weights.dcp import Chunk, DcpSource, StoredTensor

        value = torch.randn(7, 6)
        chunks = []
        for i, (rows, columns) in enumerate([((0, 5), (0, 2)), ((5, 7), (0, 2)), ((0, 7), (2, 6))]):
            path = tmp_path / f"{i}.distcp"
            torch.save(value[slice(*rows), slice(*columns)].clone(), path)
            sizes = (rows[1] - rows[0], columns[1] - columns[0])
            chunks.append(Chunk((rows[0], columns[0]), sizes, Member(path, "x", 0, path.stat().st_size)))
        assert_holds(DcpSource({"x": StoredTensor((7, 6), value.dtype, tuple(chunks))}, "here"), {"x": value})


class TestSlabs:
    @pytest.mark.parametrize("slab", [(slice(0, 9),), (slice(-2, None),), (slice(0, 4, 2),), (slice(3, 1),)])
    def test_a_slab_that_is_no_part(self, slab, tmp_path):
        (tmp_path / "f").write_bytes(bytes(64))
        with pytest.raises(WeightsError, match="is no part of a tensor"):
            read_region(Region(tmp_path / "f", 0, (4, 4), (4, 1), torch.float32), slab)

    @pytest.mark.parametrize("bounds", [((0, 5), (2, 9)), ((3, 4),), ((0, 2), (0, 3), (1, 6)), (), ((0, 0), (0, 3))])
    @pytest.mark.parametrize("limit", [1, 7, 16, 40, 1000])
    def test_pieces_cover_a_box_once_and_are_small(self, bounds, limit):
        counts = torch.zeros([b for _, b in bounds], dtype=torch.int64)
        for slab in pieces(bounds, 4, limit):
            counts[slab] += 1
            assert counts[slab].numel() * 4 <= max(limit, 4)
        box = tuple(slice(a, b) for a, b in bounds)
        assert bool((counts[box] == 1).all())
        assert int(counts.sum()) == counts[box].numel()


def test_an_index_of_torch_files(tmp_path):
    values = state()
    names = list(values)
    for file, part in (("p-1.bin", names[:1]), ("p-2.bin", names[1:])):
        torch.save({name: values[name] for name in part}, tmp_path / file)
    table = {name: "p-1.bin" if name == names[0] else "p-2.bin" for name in names}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    assert_holds(open_weights(tmp_path), values)


def test_a_tar_file_that_ends_like_a_zip_file(tmp_path):
    write_mdlus(tmp_path / "m.mdlus", state(), {}, "tar")
    content = (tmp_path / "m.mdlus").read_bytes().rstrip(b"\0")
    assert tarfile.is_tarfile(tmp_path / "m.mdlus")
    Path(tmp_path / "n.mdlus").write_bytes(content + b"\0" * (-len(content) % 512))
    assert open_weights(tmp_path / "n.mdlus").names() == tuple(state())
