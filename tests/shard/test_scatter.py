"""scatter_tensor and scatter: from any source, to any mesh, each rank only its part."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import dpzoo
from dpzoo.shard import LayoutError, Partial, Replicate, Shard, ShardTensor, scatter, scatter_tensor
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh

ROWS = (Shard(0),)


def sample(*shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest storage of any result inside the block."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and not isinstance(t, ShardTensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("source", [0, 1, 2])
@distributed(ranks=3)
def test_any_source_any_sizes(source):
    mesh, full = domain_mesh(), sample(4, 7)
    mine = full if dist.get_rank() == source else None
    for dim, sizes in ((0, None), (1, None), (1, (7, 0, 0)), (1, (0, 2, 5)), (-1, (1, 1, 5)), (0, (0, 0, 4))):
        given = None if sizes is None else {0: sizes}
        x = scatter_tensor(mine, source, mesh, [Shard(dim)], sizes=given)
        assert x.is_leaf and not x.requires_grad and x.placements == (Shard(dim % 2),)
        assert sizes is None or x._spec.sizes == (sizes,)
        assert torch.equal(x.full_tensor(), full)
    assert torch.equal(scatter_tensor(mine, source, mesh, [Replicate()]).to_local(), full)


@pytest.mark.parametrize("source", range(4))
@distributed(ranks=4)
def test_two_axes(source):
    mesh, full = grid_mesh(), sample(3, 5, 4)
    mine = full if dist.get_rank() == source else None
    for a, b in itertools.permutations((Shard(0), Shard(1), Shard(2), Replicate()), 2):
        x = scatter_tensor(mine, source, mesh, [a, b])
        assert x.placements == (a, b) and torch.equal(x.full_tensor(), full)
        assert x.to_local().shape == x._spec.local_shape
    x = scatter_tensor(mine, source, mesh, [Replicate(), Replicate()])
    assert torch.equal(x.to_local(), full)
    x = scatter_tensor(mine, source, mesh, [Shard(2), Shard(1)], sizes={0: (1, 3), 1: (5, 0)})
    assert x._spec.sizes == ((1, 3), (5, 0)) and torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize("mesh", ["rows", "columns"])
@distributed(ranks=4)
def test_sub_groups_have_their_own_sources(mesh):
    mesh = {"rows": row_mesh, "columns": column_mesh}[mesh]()
    ranks = mesh.mesh.tolist()
    for source in ranks:
        full = sample(5, 2) + 100 * ranks[0]
        x = scatter_tensor(full if dist.get_rank() == source else None, source, mesh, [Shard(0)])
        assert torch.equal(x.full_tensor(), full)


@distributed(ranks=4)
def test_three_axes():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    full = sample(3, 4, 5)
    x = scatter_tensor(full if dist.get_rank() == 3 else None, 3, mesh, [Shard(2), Shard(1), Shard(0)])
    assert x.to_local().shape == x._spec.local_shape and torch.equal(x.full_tensor(), full)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int16, torch.bool]
)
@distributed(ranks=2)
def test_every_dtype_and_memory_order(dtype):
    mesh, full = domain_mesh(), sample(2, 3, 4, dtype=dtype).transpose(0, 2)
    x = scatter_tensor(
        full if dist.get_rank() == 1 else None, 1, mesh, [Shard(0)], requires_grad=dtype.is_floating_point
    )
    assert x.dtype is dtype and x.requires_grad is dtype.is_floating_point and torch.equal(x.full_tensor(), full)


@distributed(ranks=2)
def test_scalars_and_size_zero():
    mesh, first = domain_mesh(), dist.get_rank() == 0
    x = scatter_tensor(torch.tensor(3.5) if first else None, 0, mesh, [Replicate()])
    assert x.item() == 3.5
    x = scatter_tensor(torch.empty(0, 4) if first else None, 0, mesh, [Shard(1)])
    assert x.shape == (0, 4) and x.to_local().shape == (0, 2)


@distributed(ranks=4)
def test_no_rank_but_the_source_holds_more_than_its_part():
    n = 64
    for mesh, place in (
        (domain_mesh(), [Shard(0)]),
        (grid_mesh(), [Shard(0), Shard(1)]),
        (grid_mesh(), [Shard(1), Replicate()]),
    ):
        source = 2
        full = sample(n, n) if dist.get_rank() == source else None
        with LargestTensor() as largest:
            x = scatter_tensor(full, source, mesh, place)
        if dist.get_rank() != source:
            assert 0 < largest.bytes <= x.to_local().nbytes < n * n * 4


@distributed(ranks=2)
def test_the_source_keeps_its_tensor_to_itself():
    mesh, full = domain_mesh(), sample(4)
    x = scatter_tensor(full if dist.get_rank() == 0 else None, 0, mesh, [Replicate()])
    x.add_(1)
    assert torch.equal(full, sample(4)) and torch.equal(x.full_tensor(), sample(4) + 1)


@distributed(ranks=2)
def test_the_source_may_need_a_gradient():
    full = sample(4).requires_grad_(True)
    x = scatter_tensor(full, 0, domain_mesh(), [Shard(0)])
    assert x.is_leaf and not x.requires_grad


@distributed(ranks=4)
def test_short_form():
    mesh, full = domain_mesh(), sample(2, 9)
    assert dpzoo.scatter is scatter
    x = scatter(full if dist.get_rank() == 0 else None, mesh, dim=1, sizes=(1, 0, 6, 2), requires_grad=True)
    assert x.requires_grad and x._spec.sizes == ((1, 0, 6, 2),) and torch.equal(x.full_tensor(), full)
    assert scatter(full, mesh, src=3, dim=-1).placements == (Shard(1),)
    grid = grid_mesh()
    x = scatter(full if dist.get_rank() == 0 else None, grid, dim=(None, 1), sizes=(None, (7, 2)))
    assert x.placements == (Replicate(), Shard(1)) and x._spec.sizes == ((), (7, 2))
    x = scatter(full, grid, dim=(1, 0))
    assert x.placements == (Shard(1), Shard(0)) and torch.equal(x.full_tensor(), full)
    row = row_mesh()  # by default the first rank of the mesh is the source
    x = scatter(full + dist.get_rank() // 2 if row.get_local_rank() == 0 else None, row, dim=1)
    assert torch.equal(x.full_tensor(), full + dist.get_rank() // 2)


@distributed(ranks=2)
def test_randomness_is_untouched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    scatter(torch.ones(5), domain_mesh())
    assert torch.equal(torch.get_rng_state(), before)


@distributed(ranks=3)
def test_what_does_not_fit_fails_everywhere():
    mesh, rank = domain_mesh(), dist.get_rank()
    full = sample(4, 7) if rank == 0 else None

    def call(tensor=full, source=0, placements=ROWS, **more):
        return lambda: scatter_tensor(tensor, source, mesh, list(placements), **more)

    expect_error(call(placements=[Shard(2)]), LayoutError, r"dim 2, but the tensor has 2 dims")
    expect_error(call(placements=[Shard(0), Shard(1)]), LayoutError, "1 axes, but 2 placements")
    expect_error(call(placements=[Partial()]), LayoutError, "takes Shard and Replicate")
    expect_error(call(sizes={0: (1, 1, 1)}), LayoutError, r"sum to 3, but the global shape is \(4, 7\)")
    expect_error(call(sizes={0: (4, 0)}), LayoutError, r"needs 3 shard sizes")
    expect_error(call(sizes={1: (4, 0, 0)}), LayoutError, "names axis 1")
    expect_error(call(placements=[Replicate()], sizes={0: (4, 0, 0)}), LayoutError, "cuts no dim")
    expect_error(call(source=5), LayoutError, r"rank 5 holds the tensor but is not one of the ranks \(0, 1, 2\)")
    expect_error(call(source=1), LayoutError, "rank 1 should hold a plain tensor, got NoneType")
    expect_error(call(global_shape=(4, 8)), LayoutError, r"global_shape=\(4, 8\).*\(4, 7\) torch.float32")
    expect_error(call(dtype=torch.float64), LayoutError, r"dtype=torch.float64, but rank 0 holds .* torch.float32")
    cut = scatter(sample(4), mesh)
    expect_error(call(tensor=cut), LayoutError, "got ShardTensor; a ShardTensor is moved by redistribute")
    words = r"the ranks asked for different things .*1: \(0, '\[Shard\(dim=1\)\]'"
    expect_error(call(placements=[Shard(1 if rank == 1 else 0)]), LayoutError, words)
    expect_error(call(source=1 if rank == 2 else 0), LayoutError, "asked for different things")
    assert torch.equal(call()().full_tensor(), sample(4, 7))
