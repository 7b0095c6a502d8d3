import torch

from dpzoo.testing import distributed, domain_mesh, grid_mesh
from dpzoo.testing.gathering import gather_over_mesh
from dpzoo.testing.seeding import set_seed

TENSORS = {
    "not contiguous": torch.arange(12.0).reshape(3, 4)[:, ::2],
    "conjugate": torch.tensor([1 + 2j, -3j], dtype=torch.complex128).conj(),
    "negative view": torch.tensor([1 + 2j, -3j]).conj().imag,
    "one element, stride 3": torch.arange(12.0).reshape(4, 3)[:1, 0],
    "one number, of a row": torch.arange(12.0).reshape(4, 3)[1, 1],
    "scalar": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "complex, empty": torch.empty(2, 0, dtype=torch.complex64),
    "bfloat16": torch.tensor([1.5, float("nan"), float("-inf")], dtype=torch.bfloat16),
    "whole": torch.tensor([[2**62, -1]]),
}


@distributed(ranks=[1, 3])
def test_tensors_of_every_kind_arrive(ranks):
    mine = torch.distributed.get_rank()
    sent = {"tensors": TENSORS, "rank": mine, "of its own length": [torch.full((mine,), float(mine))]}
    found = gather_over_mesh(sent, domain_mesh())
    assert list(found) == [(rank,) for rank in range(ranks)]
    for (rank,), value in found.items():
        assert value["rank"] == rank
        assert value["of its own length"][0].tolist() == [rank] * rank
        for name, tensor in TENSORS.items():
            got = value["tensors"][name]
            assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
            torch.testing.assert_close(got, tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@distributed(ranks=4)
def test_ranks_of_a_grid_are_found_by_their_coordinates():
    found = gather_over_mesh(torch.distributed.get_rank(), grid_mesh())
    assert found == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}


def test_seeds_are_those_of_torch():
    torch.manual_seed(7)
    expected = torch.randn(3)
    set_seed(7)
    assert torch.equal(torch.randn(3), expected)
    assert torch.initial_seed() == 7
