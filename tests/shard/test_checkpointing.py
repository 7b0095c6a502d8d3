"""ShardTensors in `torch.distributed.checkpoint`: true offsets, each element written once, any layout reads it back."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from dpzoo.shard import LayoutError, ShardTensor, scatter, scatter_tensor
from dpzoo.testing import domain_mesh, session_pool

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")
# Made on every rank alike: two cut dims, a whole number type, no elements at all, no dims at all.
WHOLE = {
    "rows": torch.arange(9.0 * 4).view(9, 4).double(),
    "both": torch.arange(7 * 5).view(7, 5),
    "none": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
}
SIZES = {2: (6, 3), 3: (5, 0, 4), 4: (0, 4, 0, 5)}


def made(values, mesh_shape):
    """`values` cut over a mesh of all ranks; plain and DTensor entries beside them."""
    if mesh_shape is None:
        return dict(values) | {"dtensor": values["rows"] + 1}
    if len(mesh_shape) == 1:
        mesh, cut = domain_mesh(), lambda t, dim, **o: [Shard(dim)]
        sizes = {0: SIZES.get(mesh_shape[0], (9,))}
        both = scatter(values["both"], mesh, dim=1)
    else:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ddp", "domain"))
        cut = lambda t, dim, **o: [Replicate(), Shard(dim)]  # noqa: E731
        sizes = {1: SIZES.get(mesh_shape[1], (9,))}
        both = scatter_tensor(values["both"], 0, mesh, [Shard(0), Shard(1)])
    whole = [Replicate()] * mesh.ndim
    rows = ShardTensor.from_local(values["rows"], mesh, whole).redistribute(
        placements=cut(values["rows"], 0), sizes=sizes
    )
    return {
        "rows": rows,
        "both": both,
        "none": ShardTensor.from_local(values["none"], mesh, whole).redistribute(placements=cut(values["none"], 1)),
        "scalar": ShardTensor.from_local(values["scalar"], mesh, whole),
        "dtensor": distribute_tensor(values["rows"] + 1, mesh, [*whole[:-1], Shard(0)]),
    }


def save(folder, mesh_shape):
    dcp.save(made(WHOLE, mesh_shape), checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(folder, mesh_shape):
    state = made({name: torch.zeros_like(value) for name, value in WHOLE.items()}, mesh_shape)
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def on_ranks(work, folder, mesh_shape):
    """On as many ranks of the pool as the mesh has; None: in this process."""
    if mesh_shape is None:
        return [work(folder, None)]
    return session_pool().run(work, folder, mesh_shape, ranks=torch.Size(mesh_shape).numel())


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((3,), (2, 2)), ((2, 2), (3,)), ((4,), None), (None, (3,)), ((2, 2), (4,)), ((3,), (2,)), ((2, 2), None)],
    ids=str,
)
def test_what_one_mesh_saved_another_loads(saved, loaded, tmp_path):
    on_ranks(save, tmp_path, saved)
    for found in on_ranks(load, tmp_path, loaded):
        for name, value in WHOLE.items():
            assert torch.equal(found[name], value), name
        assert torch.equal(found["dtensor"], WHOLE["rows"] + 1)


def boxes(folder):
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks) for name, entry in stored.items()}


def test_every_element_is_written_once_at_its_true_place(tmp_path):
    on_ranks(save, tmp_path / "uneven", (3,))
    assert boxes(tmp_path / "uneven")["rows"] == [((0, 0), (5, 4)), ((5, 0), (4, 4))]  # the empty shard is not there
    on_ranks(save, tmp_path / "replicas", (2, 2))
    found = boxes(tmp_path / "replicas")
    assert found["rows"] == [((0, 0), (6, 4)), ((6, 0), (3, 4))]
    assert found["both"] == [((0, 0), (4, 3)), ((0, 3), (4, 2)), ((4, 0), (3, 3)), ((4, 3), (3, 2))]
    assert found["scalar"] == [((), ())]
    written = sum(file.stat().st_size for file in Path(tmp_path / "replicas").glob("*.distcp"))
    once = sum(file.stat().st_size for file in Path(tmp_path / "uneven").glob("*.distcp"))
    assert written < 2 * once  # replicas did not double it


def refuse_partial():
    x = ShardTensor.from_local(torch.ones(3), domain_mesh(), [Partial()])
    with pytest.raises(LayoutError, match=r"each rank holds a summand\. Redistribute it"):
        x.__create_chunk_list__()
    with pytest.raises(dcp.api.CheckpointException, match="each rank holds a summand"):
        dcp.save({"x": x}, checkpoint_id="never")
    return dist.get_rank()


def test_a_partial_tensor_is_refused_on_every_rank(tmp_path, monkeypatch):
    assert session_pool().run(refuse_partial, ranks=2) == [0, 1]
    assert not Path("never").exists()
