"""Weights on many ranks: whole ones read once, shards by the slab; what one rank cannot read, none loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dpzoo
from dpzoo.models import ViT
from dpzoo.pretrained import load_pretrained
from dpzoo.shard import ShardTensor, scatter
from dpzoo.testing import domain_mesh, expect_error, grid_mesh, session_pool
from dpzoo.testing.meshes import row_mesh
from dpzoo.weights import DamagedWeightsError, TensorSource, WeightsError, WeightsMismatchError, load_weights, regions

SMALL = {"img_size": (12, 8), "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2, "num_classes": 3}


class Net(nn.Module):
    """All kinds of tensors; `field` is large enough to be sharded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.field = nn.Parameter(torch.randn(2, 9, 4, dtype=torch.float64))
        self.linear = nn.Linear(9, 5)
        self.brief = nn.Parameter(torch.randn(7).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("mask", torch.rand(11) > 0.5)


def run(body: Any, ranks: int, **values: Any) -> None:
    session_pool().run(body, ranks=ranks, timeout=60, kwargs=values)


def state(seed: int) -> dict[str, Tensor]:
    return {name: t.detach() for name, t in Net(seed).state_dict().items()}


def whole(t: Tensor) -> Tensor:
    return t.full_tensor().detach() if isinstance(t, (ShardTensor, DTensor)) else t.detach()


def assert_loaded(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, t in model.state_dict().items():
        if isinstance(t, DTensor):  # its full_tensor is wrong for a dim cut twice on a mesh that was flattened before
            wanted = distribute_tensor(expected[name], t.device_mesh, t.placements).to_local()
            assert torch.equal(t.to_local(), wanted), name
        else:
            assert torch.equal(whole(t), expected[name]), name


class Counted:
    """Bytes that this rank reads from files while the block runs, short rows one by one."""

    def __enter__(self) -> "Counted":
        self.bytes, self._read, self._scratch = 0, regions._read_into, regions.SCRATCH_BYTES
        regions.SCRATCH_BYTES = 0

        def read(file, at, out):
            self.bytes += out.nbytes
            self._read(file, at, out)

        regions._read_into = read
        return self

    def __exit__(self, *_: object) -> None:
        regions._read_into, regions.SCRATCH_BYTES = self._read, self._scratch


# ---------------------------------------------------------------------- whole parameters
def plain_body(folder: Path) -> None:
    expected = state(50)
    size = sum(t.nbytes for t in expected.values())
    meshes = [domain_mesh()] if dist.get_world_size() != 4 else [domain_mesh(), grid_mesh(), row_mesh()]
    for mesh in meshes:
        for file in ("a.safetensors", "a.pth"):
            model = Net(dist.get_rank())
            with Counted() as counted:
                report = load_pretrained(model, folder / file, mesh=mesh)
            assert_loaded(model, expected)
            assert counted.bytes == (size if not any(mesh.get_coordinate()) else 0)
            assert report.model is model
            assert set(report.loaded) == set(expected)
    # What the file does not hold is that of the first rank.
    model = Net(dist.get_rank())
    load_pretrained(model, {"brief": expected["brief"]}, mesh=meshes[0], strict=False)
    assert_loaded(model, {**state(0), "brief": expected["brief"]})


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_whole_parameter_is_read_once(ranks, tmp_path):
    save_file(state(50), tmp_path / "a.safetensors")
    torch.save({"model": state(50), "epoch": 3}, tmp_path / "a.pth")
    run(plain_body, ranks, folder=tmp_path)


def messages_body(folder: Path) -> None:
    from dpzoo.pretrained import spread

    before = spread.PIECE_BYTES
    spread.PIECE_BYTES = 64
    try:
        model = Net(dist.get_rank())
        load_pretrained(model, folder / "a.safetensors", mesh=domain_mesh())
    finally:
        spread.PIECE_BYTES = before
    assert_loaded(model, state(50))


def test_many_messages(tmp_path):
    save_file(state(50), tmp_path / "a.safetensors")
    run(messages_body, 2, folder=tmp_path)


# ---------------------------------------------------------------------- shards
def layouts() -> dict[str, Any]:
    """Ways to shard `field` (2, 9, 4); each gives the parameter and what part of it a rank holds."""
    mesh = domain_mesh()
    ranks = dist.get_world_size()
    zeros = torch.zeros(2, 9, 4, dtype=torch.float64)
    uneven = [5, 0, 4] if ranks == 3 else [2, 0, 3, 4]
    found = {
        "ShardTensor, uneven and empty": scatter(zeros, mesh, 1, uneven),
        "ShardTensor, last dim": scatter(zeros, mesh, 2),
        "DTensor": distribute_tensor(zeros, mesh, [Shard(1)]),
    }
    if ranks == 4:
        grid = grid_mesh()
        found |= {
            "two dims": scatter(zeros, grid, (1, 2), ([7, 2], [1, 3])),
            "copies": scatter(zeros, grid, (None, 1), (None, [9, 0])),
            "DTensor, two dims": distribute_tensor(zeros, grid, [Shard(2), Shard(1)]),
            "DTensor, copies": distribute_tensor(zeros, grid, [Replicate(), Shard(1)]),
            "DTensor, one dim twice": distribute_tensor(zeros, grid, [Shard(1), Shard(1)]),
        }
    return found


def sharded_body(folder: Path) -> None:
    expected = state(50)
    rest = sum(t.nbytes for name, t in expected.items() if name != "field")
    for name, parameter in layouts().items():
        model = Net(dist.get_rank())
        model.field = nn.Parameter(parameter)
        local = model.field._local_tensor
        with Counted() as counted:
            load_pretrained(model, folder / "a.safetensors")  # the mesh is that of the parameter
        assert_loaded(model, expected)
        assert model.field._local_tensor.data_ptr() == local.data_ptr()
        assert counted.bytes == local.nbytes + (rest if dist.get_rank() == 0 else 0), name
    # A checkpoint that these ranks write in their own chunks is read by others.
    dcp.save({"model": model.state_dict(), "average": {"field": model.field}}, checkpoint_id=folder / "written")
    for source in (folder / "written", folder / "dcp", expected):
        model = Net(dist.get_rank())
        model.field = nn.Parameter(layouts()["ShardTensor, uneven and empty"])
        load_pretrained(model, source, mesh=domain_mesh())
        assert_loaded(model, expected)


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_rank_reads_only_its_shard(ranks, tmp_path):
    save_file(state(50), tmp_path / "a.safetensors")
    dcp.save({"model": state(50)}, no_dist=True, checkpoint_id=tmp_path / "dcp")
    run(sharded_body, ranks, folder=tmp_path)


def fsdp_body(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    model = ViT(**SMALL)
    for block in model.blocks:
        fully_shard(block, mesh=domain_mesh())
    fully_shard(model, mesh=domain_mesh())
    load_pretrained(model, folder)
    reference = ViT.from_pretrained(folder)
    assert_loaded(model, reference.state_dict())
    image = torch.randn(1, 3, 12, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.eval()(image), reference(image))


def test_fsdp_and_a_forward(tmp_path):
    ViT(**SMALL).save_pretrained(tmp_path)
    run(fsdp_body, 3, folder=tmp_path)


# ---------------------------------------------------------------------- models that are built
def built_body(folder: Path) -> None:
    torch.manual_seed(dist.get_rank())
    reference = ViT.from_pretrained(folder)
    mesh = domain_mesh()
    image = torch.randn(1, 3, 12, 8, generator=torch.Generator().manual_seed(0))
    for report in (
        dpzoo.load_pretrained(folder, mesh=mesh),
        dpzoo.load_pretrained(str(folder), mesh=mesh, arguments={"drop_rate": 0.5}),
        dpzoo.load_pretrained("vit_nano_patch4", folder, mesh=mesh, arguments=SMALL),
    ):
        model = report.model.eval()
        assert_loaded(model, reference.state_dict())
        sharded = model(scatter(image, mesh, 2, [8, 4]))
        torch.testing.assert_close(sharded.full_tensor(), reference(image))
    # A head of another size keeps its random values, those of the first rank.
    model = dpzoo.load_pretrained(folder, mesh=mesh, arguments={"num_classes": 7}, strict=False).model
    heads: list[Any] = [None, None]
    dist.all_gather_object(heads, model.head.weight.detach())
    assert heads[0].shape == (7, 12)
    assert torch.equal(heads[0], heads[1])


def test_a_model_built_from_its_folder(tmp_path):
    ViT(**SMALL).save_pretrained(tmp_path)
    run(built_body, 2, folder=tmp_path)


# ---------------------------------------------------------------------- errors
def errors_body(folder: Path) -> None:
    rank, mesh = dist.get_rank(), domain_mesh()
    model = Net(rank)
    model.field = nn.Parameter(scatter(torch.zeros(2, 9, 4, dtype=torch.float64), mesh, 1, [5, 0, 4]))
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}

    def fails(error: type[Exception], match: str, source: Any, **options: Any) -> None:
        expect_error(lambda: load_pretrained(model, source, mesh=mesh, **options), error, match)
        assert_loaded(model, {name: whole(t) for name, t in before.items()})

    good = folder / "a.safetensors"
    fails(DamagedWeightsError, r"^rank 2: .*was it cut off", folder / "cut.safetensors" if rank == 2 else good)
    fails(DamagedWeightsError, r"^(?!rank).*was it cut off", folder / "cut.safetensors")
    fails(DamagedWeightsError, "has sha256", good, sha256="00")
    fails(WeightsError, "no such file", folder / "missing")
    fails(WeightsError, "^rank 1: .*no such file", folder / "missing" if rank == 1 else good)
    fails(WeightsError, "org/name is neither a path nor in the local cache", "org/name")
    fails(WeightsMismatchError, "lacks brief", {n: t for n, t in state(50).items() if n != "brief"})
    more = {"x": torch.ones(1)} if rank == 1 else {}
    fails(WeightsError, "rank 1 loads another file than rank 0", {**state(50), **more}, strict=False)
    refused = Refusing(state(50)) if rank == 1 else TensorSource(state(50))
    fails(WeightsMismatchError, "^rank 1: the copies are not equal", refused)
    expect_error(lambda: load_pretrained(model), WeightsError, "say where the weights come from")
    expect_error(lambda: load_pretrained("vit_nano_patch4"), WeightsError, "say where the weights come from")
    expect_error(
        lambda: load_weights(model, good), WeightsError, "field is sharded over ranks: use dpzoo.load_pretrained"
    )
    other = nn.Linear(2, 2) if rank == 1 else nn.Linear(2, 3)
    expect_error(
        lambda: load_pretrained(other, {"bias": torch.ones(3)}, mesh=mesh, strict=False), WeightsError, "rank 1"
    )
    # A disk that fails under way: every rank hears of it, at the message after which it happened.
    failing = Failing(state(50))
    expect_error(
        lambda: load_pretrained(model, failing, mesh=mesh),
        DamagedWeightsError,
        r"^rank 0: .*could not be read on \(the disk is gone\)",
    )


class Refusing(TensorSource):
    """Finds on one rank values that cannot be taken."""

    def sliceable(self, name: str) -> bool:
        return name != "field"

    def read(self, name, slab=None):
        if name == "field":
            raise WeightsMismatchError("the copies are not equal")
        return super().read(name, slab)


class Failing(TensorSource):
    def read(self, name, slab=None):
        if name == "mask":
            raise OSError("the disk is gone")
        return super().read(name, slab)


def test_an_error_of_one_rank_is_that_of_all(tmp_path):
    save_file(state(50), tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    run(errors_body, 3, folder=tmp_path)


def test_a_single_process_needs_no_mesh(tmp_path):
    save_file(state(50), tmp_path / "a.safetensors")
    model = Net(0)
    load_pretrained(model, tmp_path / "a.safetensors")
    assert_loaded(model, state(50))
