import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dpzoo.shard import Replicate, ShardTensor
from dpzoo.testing import ParityError, assert_parity, distributed, domain_mesh, grid_mesh, row_mesh
from dpzoo.testing.parity import Parity, plan_cuts


def only_sharded(change):
    """A function that is right on one device and wrong, by `change`, on shards."""
    return lambda x: change(x) if isinstance(x, ShardTensor) else x * 1.0


def nudge_one_rank(x):
    local = x.to_local()
    if dist.get_rank() == dist.get_world_size() - 1:
        local = local + 1e-6
    return ShardTensor.from_local(local, x.device_mesh, x.placements, x._spec.sharding_shapes())


def double_gradient(x):
    return x * 2.0 - (x * 1.0).detach()


class DoubledWeightGradient(nn.Module):
    """Right values, but the gradient of its weight is doubled on shards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        if isinstance(x, ShardTensor):
            return x * (self.weight * 2.0 - self.weight.detach())
        return x * self.weight


@distributed(ranks=[1, 2, 3])
@pytest.mark.parametrize("sizes", ["even", "uneven", "empty"])
def test_equal_results_pass(sizes):
    assert_parity(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), torch.randn(2, 7, 3), 1, sizes)
    assert_parity(lambda x, y: x + y, [torch.randn(2, 7), torch.randn(7)], [1, None], sizes)
    assert_parity(lambda x: x * 2, torch.randn(2, 7), Replicate())


@distributed(ranks=4)
def test_equal_results_pass_on_grids_and_sub_groups():
    assert_parity(F.gelu, torch.randn(2, 7, 9), (1, 2), ["uneven", (4, 5)], mesh=grid_mesh())
    assert_parity(F.gelu, torch.randn(2, 7, 9), (None, 2), "empty", mesh=grid_mesh())
    assert_parity(nn.Linear(9, 4), torch.randn(2, 7, 9), 1, (2, 5), mesh=row_mesh())


@distributed(ranks=3)
def test_structures_and_values_that_are_not_tensors():
    assert_parity(lambda x: x > 0, torch.randn(2, 7), 1, "uneven")
    assert_parity(lambda x: {"twice": (x * 2, "label"), "ndim": x.ndim, "shape": tuple(x.shape)}, torch.randn(2, 7), 1)


@distributed(ranks=2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param("value", r"^output differs from one device: largest error .* at index \(", id="value"),
        pytest.param("one rank", r"largest error 1e-06 .* in the shard of mesh coordinate \(1,\)", id="one rank"),
        pytest.param("gradient", r"^gradient of input 0 differs", id="gradient"),
        pytest.param("shape", r"^output: found shape \(2, 6\).* one device gives \(2, 7\)", id="shape"),
        pytest.param("dtype", r"^output: found shape .*float32.*float64", id="dtype"),
        pytest.param("detached", r"^output: requires_grad is False", id="detached"),
        pytest.param("structure", r"^outputs: one device gives \['output'", id="structure"),
    ],
)
def test_differences_are_named(change, message):
    changes = {
        "value": lambda x: x * 1.0000001,
        "one rank": nudge_one_rank,
        "gradient": double_gradient,
        "shape": lambda x: (x * 1.0)[:, :6],
        "dtype": lambda x: (x * 1.0).float(),
        "detached": lambda x: x.detach() * 1.0,
        "structure": lambda x: (x * 1.0, x * 1.0),
    }
    with pytest.raises(ParityError, match=message):
        assert_parity(only_sharded(changes[change]), torch.randn(2, 7), 1, (4, 3))


@distributed(ranks=2)
def test_wrong_weight_gradient_is_named():
    with pytest.raises(ParityError, match=r"^gradient of weight differs"):
        assert_parity(DoubledWeightGradient(), torch.randn(2, 7, 3), 1)


@distributed(ranks=2)
def test_other_values_are_compared():
    with pytest.raises(ParityError, match=r"^output\[1\]: found True .* one device gives False"):
        assert_parity(lambda x: (x * 1.0, isinstance(x, ShardTensor)), torch.randn(2, 7), 1)
    with pytest.raises(ParityError, match=r"^output\[1\]: the ranks disagree"):
        assert_parity(lambda x: (x * 1.0, dist.get_rank()), torch.randn(2, 7), 1)


@distributed(ranks=2)
def test_ranks_that_start_from_different_numbers_are_refused():
    torch.manual_seed(dist.get_rank())
    with pytest.raises(ValueError, match="differ between ranks"):
        assert_parity(F.gelu, torch.randn(2, 7), 1)


@distributed(ranks=2)
def test_counts_must_match():
    with pytest.raises(ValueError, match="2 inputs, 1 placements"):
        assert_parity(torch.add, [torch.randn(2), torch.randn(2)], [0])


@distributed(ranks=2)
def test_one_run_on_full_tensors_serves_several_cuts_and_each_is_compared():
    calls = []

    def wrong_on_the_second_cut(x):
        calls.append(isinstance(x, ShardTensor))
        return x * (1.1 if isinstance(x, ShardTensor) and x._spec.sharding_shapes()[0][0][0] == 2 else 1.0)

    x = torch.randn(7, 3)
    parity = Parity(wrong_on_the_second_cut, [x], domain_mesh())
    for sizes in ((4, 3), (2, 5), (7, 0)):
        parity.run_on(plan_cuts([x], parity.mesh, 0, [sizes]), f"cut {sizes}")
    assert calls == [False, True, True, True]
    with pytest.raises(ParityError, match=r"^output differs") as caught:
        parity.compare()
    assert caught.value.__notes__ == ["cut (2, 5)"]
