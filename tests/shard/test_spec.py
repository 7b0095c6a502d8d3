"""A spec is one object per layout, knows every shard size, and refuses what does not fit."""

import copy
import pickle

import pytest
import torch

from dpzoo.shard import LayoutError, Partial, Replicate, Shard, ShardTensor
from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.spec import ShardTensorSpec, cut_of, placement_of, stride_like
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh


def make(mesh, cuts, sizes, shape, dtype=torch.float32, stride=None):
    return ShardTensorSpec.make(MeshLayout.of(mesh), cuts, sizes, shape, dtype, stride)


@distributed(ranks=2)
def test_equal_layouts_are_one_object():
    mesh = domain_mesh()
    spec = make(mesh, [0], [(3, 1)], [4, 2])
    assert make(mesh, (0,), ((3, 1),), torch.Size((4, 2))) is spec
    assert copy.deepcopy(spec) is spec and copy.copy(spec) is spec and pickle.loads(pickle.dumps(spec)) is spec
    assert hash(spec) == hash(make(mesh, (0,), ((3, 1),), (4, 2)))
    for other in (
        make(mesh, [0], [(1, 3)], [4, 2]),
        make(mesh, [1], [(1, 1)], [4, 2]),
        make(mesh, [0], [(3, 1)], [4, 2], torch.int32),
        make(mesh, [0], [(3, 1)], [4, 2], stride=(1, 4)),
    ):
        assert other is not spec and other != spec


@distributed(ranks=[1, 2, 3])
def test_shapes_and_offsets(ranks):
    sizes = (4, 0, 1)[:ranks]
    spec = make(domain_mesh(), [1], [sizes], [2, sum(sizes), 3])
    me = domain_mesh().get_local_rank()
    assert spec.local_shape == (2, sizes[me], 3) and spec.ndim == 3
    assert spec.sharding_shapes() == {0: tuple((2, n, 3) for n in sizes)}
    assert spec.sharding_shapes(0) == tuple((2, n, 3) for n in sizes)
    assert spec.local_start(0) == sum(sizes[:me])
    assert spec.placements == (Shard(1),) and spec.mesh == domain_mesh() and spec.device_mesh == domain_mesh()
    assert spec.tensor_meta == ((2, sum(sizes), 3), (3 * sum(sizes), 3, 1), torch.float32)
    assert spec.axis_of(1) == 0 and spec.axis_of(0) is None


@distributed(ranks=4)
def test_two_axes():
    mesh = grid_mesh()
    i, j = mesh.get_coordinate()
    spec = make(mesh, [2, 0], [(5, 2), (0, 3)], [3, 4, 7])
    assert spec.local_shape == ((0, 3)[j], 4, (5, 2)[i])
    assert spec.sharding_shapes(0) == (((0, 3)[j], 4, 5), ((0, 3)[j], 4, 2))
    assert spec.sharding_shapes(1) == ((0, 4, (5, 2)[i]), (3, 4, (5, 2)[i]))
    assert spec.cut_dims == {2: 0, 0: 1}
    assert make(mesh, [-1, 0], [(), (0, 3)], [3, 4, 7]).placements == (Replicate(), Shard(0))


@distributed(ranks=4)
def test_layouts_of_sub_groups_are_told_apart():
    assert MeshLayout.of(row_mesh()) is MeshLayout.of(grid_mesh()["domain"])
    assert MeshLayout.of(row_mesh()) is not MeshLayout.of(column_mesh())


@distributed(ranks=2)
def test_what_does_not_fit_is_refused():
    mesh = domain_mesh()
    for cuts, sizes, shape, words in (
        ([0, 1], [(1, 1), (1, 1)], [2, 2], r"has 1 axes, but 2 placements"),
        ([2], [(1, 1)], [2, 2], r"Shard\(2\) on a tensor of shape \(2, 2\)"),
        ([0], [(2,)], [2, 2], r"needs 2 shard sizes"),
        ([0], [(3, -1)], [2, 2], r"needs 2 shard sizes >= 0, got \(3, -1\)"),
        ([0], [(1, 2)], [2, 2], r"sum to 3, but the global shape is \(2, 2\)"),
        (["band"], [()], [2, 2], r"Partial\('band'\) is not supported"),
    ):
        expect_error(lambda c=cuts, z=sizes, s=shape: make(mesh, c, z, s), LayoutError, words)
    expect_error(lambda: make(mesh, ["avg"], [()], [2], torch.int64), LayoutError, "average of integers")
    expect_error(lambda: make(mesh, ["max"], [()], [2], torch.complex64), LayoutError, "complex")


@distributed(ranks=4)
def test_one_dim_is_cut_by_one_axis():
    words = r"mesh axes 0 and 1 both cut dim 1"
    expect_error(lambda: make(grid_mesh(), [1, 1], [(2, 2), (2, 2)], [3, 4]), LayoutError, words)


def test_cuts_and_placements():
    assert [cut_of(p, 3) for p in (Shard(0), Shard(-1), Replicate(), Partial(), Partial("max"))] == [
        0,
        2,
        -1,
        "sum",
        "max",
    ]
    assert [placement_of(c) for c in (1, -1, "avg")] == [Shard(1), Replicate(), Partial("avg")]
    with pytest.raises(LayoutError, match="asks for dim 3, but the tensor has 3 dims"):
        cut_of(Shard(3), 3)
    with pytest.raises(LayoutError, match="unknown placement 'rows'"):
        cut_of("rows", 3)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_global_strides_keep_the_order_of_memory(order):
    back = [order.index(d) for d in range(4)]
    local = torch.empty([(2, 3, 4, 5)[d] for d in order]).permute(back)
    whole = torch.empty([(2, 3, 8, 5)[d] for d in order]).permute(back)
    assert local.shape == (2, 3, 4, 5) and stride_like((2, 3, 8, 5), local) == whole.stride()


def test_strides_of_expanded_dims_stay_zero():
    assert stride_like((6, 4), torch.empty(1, 4).expand(3, 4)) == (0, 1)


@distributed(ranks=2)
def test_text_of_a_spec_is_the_same_on_all_ranks():
    x = ShardTensor.from_local(torch.ones(2 + domain_mesh().get_local_rank(), 3), domain_mesh(), [Shard(0)])
    assert x._spec.describe() == "float32(5, 3) cut [dim 0 over 'domain': 2+3]"


@distributed(ranks=2)
def test_a_shard_without_rows_follows_the_memory_order_of_the_others():
    """Ranks must agree on strides: user code may branch on is_contiguous()."""
    for order in ((1, 0), (0, 1)):
        full = torch.ones(2, 3).permute(order).contiguous().permute(order)
        local = full if domain_mesh().get_local_rank() == 0 else full[:0]
        x = ShardTensor.from_local(local, domain_mesh(), [Shard(0)])
        y = (x + 1).T
        assert x.stride() == full.stride() and (x * 2).stride() == full.stride() and y.stride() == full.T.stride()
        assert y.contiguous().stride() == (2, 1) and y.clone(memory_format=torch.contiguous_format).stride() == (2, 1)
