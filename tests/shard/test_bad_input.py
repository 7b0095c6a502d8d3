"""Mistakes of the caller: an error on every rank, with the values, before anything is sent; the group works on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.shard import (
    DistributedManager,
    LayoutError,
    MissingShardPatch,
    Partial,
    Replicate,
    Shard,
    ShardError,
    ShardTensor,
    TensorPromotionMode,
    scatter,
    scatter_tensor,
    strict,
)
from dpzoo.testing import column_mesh, distributed, domain_mesh, expect_error, grid_mesh, row_mesh
from tests.shard.counting import count_collectives


def whole(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def cut(*shape, dim=0, mesh=None, dtype=torch.float64, sizes=None, **more):
    mesh = mesh or domain_mesh()
    return scatter_tensor(
        whole(*shape, dtype=dtype),
        mesh.mesh.flatten()[0].item(),
        mesh,
        [Shard(dim)] + [Replicate()] * (mesh.ndim - 1),
        sizes=sizes,
        **more,
    )


def silent_error(call, error, words):
    """As expect_error, and nothing may be sent on the way to the error."""

    def watched():
        with count_collectives() as sent:
            try:
                return call()
            finally:
                assert sent.calls == 0, "it communicated before it raised"

    return expect_error(watched, error, words)


# ---------------------------------------------------------------------- meshes
@distributed(ranks=4)
def test_mesh_sizes():
    DistributedManager.initialize()
    try:
        manager = DistributedManager()
        for shape, names, words in (
            ((3,), ("domain",), r"needs 3 = 3 processes but there are 4"),
            ((-1, 3), ("ddp", "domain"), r"4 processes cannot be divided by 3"),
            ((-1, -1), ("ddp", "domain"), "only one can be inferred"),
            ((2, 2), ("domain",), "2 axes but mesh_dim_names"),
            ((4, 0), ("ddp", "domain"), "axis 1 is 0"),
            ((2, 2), ("domain", "domain"), "names an axis twice"),
        ):
            expect_error(lambda s=shape, n=names: manager.initialize_mesh(s, n), ValueError, words)
        assert manager.initialize_mesh((-1, 2), ("ddp", "domain")).shape == (2, 2)
    finally:
        DistributedManager.cleanup()


@distributed(ranks=4)
def test_operands_of_different_meshes():
    x, y = cut(8, 4), cut(8, 4, mesh=grid_mesh())
    for call in (
        lambda: x + y,
        lambda: torch.where(x > 0, x, y),
        lambda: x @ y.mT,
        lambda: torch.cat([x, y]),
        lambda: torch.stack([x, y]),
        lambda: nn.functional.mse_loss(x, y),
        lambda: x.copy_(y),
        lambda: x.add_(y),
        lambda: x.redistribute(grid_mesh(), [Replicate(), Replicate()]),
        lambda: nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
        lambda: torch.equal(x, y),
        lambda: x.masked_fill(y > 0, 0.0),
        lambda: torch.linspace(0, 1, 4).lerp(x, y),
    ):
        silent_error(call, LayoutError, "mesh")


@distributed(ranks=4)
def test_operands_of_sub_meshes():
    x, y = cut(4, mesh=row_mesh()), cut(4, mesh=column_mesh())
    silent_error(lambda: x * y, LayoutError, "different meshes")


@distributed(ranks=4)
def test_a_rank_outside_the_mesh_is_told_so():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("domain",))
    from torch.distributed.device_mesh import DeviceMesh

    pair = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() >= 2:
        with pytest.raises(LayoutError, match=r"rank [23] is not part of"):
            scatter(torch.ones(4), pair)
    else:
        assert scatter(torch.ones(4), pair).shape == (4,)
    assert mesh.size() == 4


# ---------------------------------------------------------------------- placements and sizes
@distributed(ranks=3)
def test_placements_that_do_not_exist():
    x, mesh = cut(6, 4), domain_mesh()
    for call, words in (
        (lambda: scatter(whole(6, 4), mesh, dim=2), "dim 2, but the tensor has 2 dims"),
        (lambda: scatter(whole(6, 4), mesh, dim=-3), "dim -3, but the tensor has 2 dims"),
        (lambda: scatter(whole(6, 4), mesh, dim=(0, 1)), "1 axes, but 2 placements"),
        (lambda: scatter(whole(6, 4), mesh, sizes=(3, 2, 2)), r"sum to 7, but the global shape is \(6, 4\)"),
        (lambda: scatter(whole(6, 4), mesh, sizes=(3, 3)), r"needs 3 shard sizes >= 0, got \(3, 3\)"),
        (lambda: scatter(whole(6, 4), mesh, sizes=(7, -1, 0)), r"got \(7, -1, 0\)"),
        (lambda: scatter(torch.tensor(1.0), mesh), "dim 0, but the tensor has 0 dims"),
    ):
        expect_error(call, LayoutError, words)
    silent_error(lambda: x.redistribute(placements=[Shard(5)]), LayoutError, "dim 5, but the tensor has 2 dims")
    silent_error(lambda: x.redistribute(placements=["rows"]), LayoutError, "unknown placement 'rows'")
    silent_error(lambda: x.redistribute(sizes={0: (6, 1, 0)}), LayoutError, "sum to 7")
    silent_error(lambda: x.to_local(grad_placements=[Shard(1)]), LayoutError, r"can be Shard\(dim=0\)")


@distributed(ranks=4)
def test_one_dim_for_two_axes():
    words = "both cut dim 0"
    expect_error(lambda: scatter(whole(6, 4), grid_mesh(), dim=(0, 0)), LayoutError, words)
    x = scatter(whole(6, 4), grid_mesh(), dim=(0, 1))
    silent_error(lambda: x.redistribute(placements=[Shard(1), Shard(-1)]), LayoutError, "both cut dim 1")


@distributed(ranks=3)
def test_one_rank_asks_for_something_else():
    mesh, odd = domain_mesh(), dist.get_rank() == 1
    full = whole(6, 4)
    expect_error(lambda: scatter(full, mesh, dim=int(odd)), LayoutError, "asked for different things")
    expect_error(lambda: scatter(full, mesh, sizes=(1, 2, 3) if odd else (2, 2, 2)), LayoutError, "different things")
    local = torch.ones(2, 5 if odd else 4)
    expect_error(lambda: ShardTensor.from_local(local, mesh, [Shard(0)]), ShardError, r"rank 1: \(2, 5\)")


# ---------------------------------------------------------------------- where torch raises, so do we
MISTAKES = [
    lambda t: t + torch.ones(3, dtype=t.dtype),
    lambda t: t @ torch.ones(5, 2, dtype=t.dtype),
    lambda t: t.view(7, 3),
    lambda t: t.reshape(-1, 6),
    lambda t: t.transpose(0, 2),
    lambda t: t.sum(2),
    lambda t: t.permute(0, 0),
    lambda t: t.unsqueeze(4),
    lambda t: t.softmax(-3),
    lambda t: t.narrow(0, 2, 9),
    lambda t: t.select(1, 4),
    lambda t: t[5],
    lambda t: t[:, :, 0],
    lambda t: torch.cat([t, t.T]),
    lambda t: torch.stack([t, t[:2]]),
    lambda t: t.split([1, 2], 1),
    lambda t: t.expand(3, 4),
    lambda t: t.unflatten(1, (3, 2)),
    lambda t: nn.functional.layer_norm(t, (5,)),
    lambda t: nn.Linear(3, 2).double()(t),
    lambda t: nn.Linear(4, 2)(t),
    lambda t: t.int() @ t.mT,
    lambda t: t & 1,
    lambda t: t.add_(torch.ones(2, 5, 4, dtype=t.dtype)),
    lambda t: t.int().add_(1.5),
    lambda t: nn.functional.cross_entropy(t, torch.zeros(4, dtype=torch.int64)),
    lambda t: torch.einsum("ij,jk", t, t),
    lambda t: t.roll(1, 2),
    lambda t: t.flip(2),
    lambda t: t.mean(dtype=torch.int64),
    lambda t: t.int().mean(),
    lambda t: t.where(t, t),
    lambda t: t.masked_fill(t, 0.0),
    lambda t: t.squeeze(2),
    lambda t: t.diagonal(0, 1, 1),
    lambda t: t.swapaxes(0, 3),
    lambda t: t.movedim(0, 2),
    lambda t: t.unbind(2),
    lambda t: t.chunk(0),
    lambda t: t.unfold(0, 6, 1),
    lambda t: t.select(0, -6),
    lambda t: t[..., None, -5],
    lambda t: t.argmax(3),
    lambda t: t.cumsum(2),
    lambda t: t.requires_grad_().sum(0).backward(),
    lambda t: t.requires_grad_().sum().backward(torch.ones(2, dtype=t.dtype)),
    lambda t: t.detach().sum().backward(),
    lambda t: torch.nonexistent(t),
]


@pytest.mark.parametrize("shard", [0, 1])
@distributed(ranks=3)
def test_the_class_of_error_is_torchs(shard):
    x, full = cut(5, 4, dim=shard), whole(5, 4)
    different = []
    for i, call in enumerate(MISTAKES):
        with pytest.raises(Exception) as expected:
            call(full.clone())
        try:
            expect_error(lambda call=call: call(x.clone()), expected.type)
        except AssertionError as error:
            different.append(f"{i}: {error}")
    assert not different, "\n".join(different)


@distributed(ranks=2)
def test_leaves_that_need_a_gradient_are_not_written_to():
    x = cut(4, requires_grad=True)
    silent_error(lambda: x.add_(1), RuntimeError, "leaf Variable that requires grad")
    silent_error(lambda: x.zero_(), RuntimeError, "leaf Variable that requires grad")
    y = x.exp()
    loss = (y * y).sum()
    y.add_(1)
    expect_error(loss.backward, RuntimeError, "modified by an inplace operation")


@distributed(ranks=2)
def test_backward_twice_through_a_freed_graph():
    for loss in (cut(4, requires_grad=True).exp().sum(), nn.Linear(4, 4).double()(cut(5, 4)).pow(2).sum()):
        loss.backward()
        expect_error(loss.backward, RuntimeError, "second time")


@distributed(ranks=2)
def test_gradients_of_the_wrong_layout_or_shape():
    x = cut(5, 4, requires_grad=True)
    (x * 2).backward(torch.ones(5, 4, dtype=torch.float64))  # plain: the whole gradient
    (x * 2).backward(cut(5, 4, sizes={0: (1, 4)}).detach().fill_(1.0))  # cut elsewhere
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 4), 4.0, dtype=torch.float64))
    expect_error(lambda: (x * 2).backward(cut(4, 4)), RuntimeError, "shape|Mismatch")


# ---------------------------------------------------------------------- modes
@distributed(ranks=2)
def test_strict_mode_raises_before_it_gathers():
    x = cut(4, 4)
    with strict():
        silent_error(lambda: torch.linalg.svdvals(x), MissingShardPatch, r"svdvals.*float64\(4, 4\).*gather 128 bytes")


@distributed(ranks=2)
def test_promotion_modes():
    x, plain = cut(4), torch.ones(4, dtype=torch.float64)
    with ShardTensor.promotion_mode(TensorPromotionMode.DISABLED):
        silent_error(lambda: x + plain, ShardError, r"plain torch.float64 tensor of shape \(4,\) meets")
        assert (x + 1).shape == (4,) and (x * nn.Parameter(plain)).shape == (4,)
        assert (x + torch.tensor(2.0)).shape == (4,)
    with ShardTensor.promotion_mode(TensorPromotionMode.WARN), pytest.warns(UserWarning, match="taken as the same"):
        x - plain
    assert ShardTensor.get_promotion_mode() is TensorPromotionMode.SILENT
    expect_error(lambda: ShardTensor.set_promotion_mode("loud"), ValueError, "loud")


@distributed(ranks=2)
def test_summands_are_added_before_anything_else():
    """A summand is not a value: no op may see it alone, and none may write into it."""
    local = torch.tensor([1.0, -2.0]) * (1 + 2 * dist.get_rank())
    x = ShardTensor.from_local(local, domain_mesh(), [Partial()])
    total = torch.tensor([4.0, -8.0])
    for call in (
        torch.relu,
        torch.exp,
        lambda t: t.max(),
        lambda t: t * t,
        lambda t: t + 1,
        lambda t: t.abs().sum(),
        lambda t: t[0],
    ):
        assert torch.equal(call(x).full_tensor(), call(total))
    for write in (lambda t: t.mul_(2), lambda t: t.copy_(total), lambda t: t.add_(t), lambda t: t.relu_()):
        silent_error(lambda write=write: write(x), ShardError, "partial")
