"""Diffusion on fields that are cut: the loss and its gradients are one device's, and a seed gives one forecast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dpzoo
from dpzoo.models import StormScope, create_model
from dpzoo.models.diffusion import (
    EDMLoss,
    EDMPreconditioner,
    EDMSampler,
    JoinedField,
    LogNormal,
    LogUniform,
    StagedExperts,
)
from dpzoo.models.registry import create_tiny_model
from dpzoo.shard import Replicate, Shard, ShardTensor, scatter, strict
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh, row_mesh

ROWS, COLUMNS = 24, 16


def lively(model: nn.Module) -> nn.Module:
    """The same weights on every rank, none of them a zero that hides a missing term."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    return model.double()


def stormscope(**options: Any) -> StormScope:
    model = lively(create_tiny_model("stormscope_nano", **options))
    assert isinstance(model, StormScope)
    return model


def unet() -> nn.Module:
    net = create_model(
        "diffusion_unet_nano", in_chans=5, out_chans=2, model_channels=8, num_blocks=1, channel_mult=(1, 2)
    )
    return lively(EDMPreconditioner(JoinedField(net), (0.4, 0.9)))


def fields(batch: int = 1) -> list[Tensor]:
    """State to find, noise, state before, background, invariants, and where there is data."""
    g = torch.Generator().manual_seed(1)
    many = [
        torch.randn(b, c, ROWS, COLUMNS, generator=g) for b, c in zip([batch] * 4 + [1], (2, 2, 4, 1, 2), strict=True)
    ]
    return [*many, torch.rand(1, 1, ROWS, COLUMNS, generator=g) > 0.2]


class Scored(nn.Module):
    """The loss as a module, so that its weights' gradients are compared."""

    def __init__(self, denoiser: nn.Module, weights: tuple[float, ...] | None = (1.0, 0.3)) -> None:
        super().__init__()
        self.denoiser, self.loss = denoiser, EDMLoss(channel_weights=weights)

    def forward(self, sigma: Any, x: Tensor, noise: Tensor, *rest: Tensor | None) -> Tensor:
        *conditions, mask = rest
        return self.loss.at(sigma, noise, self.denoiser, x, *conditions, mask=mask)


def compare(model: nn.Module, given: list[Any], dims: Any, sizes: Any, **options: Any) -> None:
    cut = [isinstance(x, Tensor) and x.ndim == 4 for x in given]
    assert_parity(model, given, [dims if c else None for c in cut], [sizes if c else None for c in cut], **options)


SIGMA = torch.tensor([0.3, 4.0])


@distributed(ranks=[2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_on_rows(masked: bool, ranks: int):
    given = fields(2) if masked else [*fields(2)[:-1], None]
    compare(Scored(stormscope()), [SIGMA, *given], 2, {2: (10, 14), 3: (16, 0, 8)}[ranks], strict=True)


@distributed(ranks=4)
def test_loss_on_a_grid_of_ranks():
    compare(Scored(stormscope()), [SIGMA[:1], *fields()], (2, 3), ((16, 8), (4, 12)), mesh=grid_mesh(), strict=True)


@distributed(ranks=4)
def test_loss_of_samples_and_rows_cut():
    """Two axes, one for the samples: every rank has one noise level of two."""
    dims, sizes = [None, *[(0, 2)] * 4, None, None], [None, *[((1, 1), (8, 16))] * 4, None, None]
    assert_parity(Scored(stormscope()), [SIGMA, *fields(2)], dims, sizes, mesh=grid_mesh())


@distributed(ranks=2)
def test_loss_of_a_unet_with_a_deviation_per_channel():
    x, noise, state, background, _, mask = fields(2)
    field = torch.cat([state[:, :2], background], 1)

    class FieldLast(Scored):
        def forward(self, sigma: Any, x: Tensor, noise: Tensor, field: Tensor, mask: Tensor) -> Tensor:
            return self.loss.at(sigma, noise, self.denoiser, x, mask=mask, field=field)

    compare(FieldLast(unet()), [SIGMA, x, noise, field, mask], 2, (8, 16))


@distributed(ranks=2)
def test_a_sharded_level_and_whole_conditions():
    """A level that was drawn by a cut field is a ShardTensor on all ranks; conditions may be on every rank whole."""
    model, (x, noise, *conditions, mask) = Scored(stormscope()), fields()
    given = [SIGMA[:1], x, noise, *conditions, mask]
    assert_parity(model, given, [Replicate(), 2, 2, 2, None, None, 2])


@distributed(ranks=2)
def test_missing_data_and_mask_tokens():
    *many, mask = fields()
    many[0] = torch.where(mask, many[0], float("nan"))
    model = stormscope(mask_token=True)

    class Masked(Scored):
        def forward(self, sigma: Any, *given: Tensor) -> Tensor:
            x, noise, *conditions, mask = given
            return self.loss.at(sigma, noise, self.denoiser, x, *conditions, mask=mask, invalid=~mask)

    compare(Masked(model), [1.5, *many, mask], 2, (10, 14), strict=True)


def kept_for_backward(model: nn.Module, x: Tensor, *conditions: Tensor) -> int:
    """Bytes on this rank, besides weights, that a forward pass keeps."""
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        storage = (t.to_local() if isinstance(t, ShardTensor) else t).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        answer = model(x, 1.5, *conditions)
    assert answer.requires_grad
    return sum(size for at, size in kept.items() if at not in weights)


@distributed(ranks=2)
def test_a_rank_keeps_half_of_what_one_process_keeps():
    """And a little for the rows of the other: what two ranks train fits where one process's activations do not."""
    model = stormscope(img_size=(128, 64), depth=2, kernel_size=5, embed_dim=48, pos_embed="learned")
    given = [torch.randn(1, c, 128, 64, dtype=torch.float64) for c in (2, 4, 1, 2)]
    whole = kept_for_backward(model, *given)
    part = kept_for_backward(model, *(scatter(t, domain_mesh(), dim=2) for t in given))
    assert 0.5 < part / whole < 0.53


# ---------------------------------------------------------------------- random draws
@distributed(ranks=4)
@pytest.mark.parametrize("levels", [LogNormal(), LogUniform()])
def test_ranks_of_a_domain_group_draw_one_level_per_sample(levels: Any):
    """Whatever each rank's own generator is at; another group, with another seed, draws other levels."""
    mesh = row_mesh()
    x = scatter(torch.zeros(3, 2, 8, 4), mesh, dim=2)
    row = torch.distributed.get_rank() // 2
    dpzoo.shard.manual_seed(row)
    torch.rand(torch.distributed.get_rank())
    sigma = levels.draw(x)
    everyone = [torch.empty(3) for _ in range(4)]
    torch.distributed.all_gather(everyone, sigma.full_tensor())
    assert torch.equal(everyone[0], everyone[1])
    assert torch.equal(everyone[2], everyone[3])
    assert not torch.equal(everyone[0], everyone[2])
    assert len(everyone[0].unique()) == 3


def one_rank_mesh() -> DeviceMesh:
    """A mesh of this rank alone."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("all", "one"))["one"]


def on_meshes() -> list[tuple[DeviceMesh, Any, Any]]:
    """1 rank, 2 ranks, 4 ranks, 2 x 2 ranks, with their dims and sizes."""
    return [
        (one_rank_mesh(), 2, (ROWS,)),
        (row_mesh(), 2, (8, 16)),
        (domain_mesh(), 2, (4, 12, 0, 8)),
        (grid_mesh(), (2, 3), ((16, 8), (4, 12))),
    ]


def cut(x: Tensor, mesh: DeviceMesh, dims: Any, sizes: Any) -> ShardTensor:
    """This rank's part of a tensor that all ranks have."""
    dims, sizes = (dims, sizes) if mesh.ndim > 1 else ((dims,), (sizes,))
    local = x
    for axis, (dim, lengths) in enumerate(zip(dims, sizes, strict=True)):
        local = local.split(list(lengths), dim)[mesh.get_local_rank(axis)]
    return ShardTensor.from_local(local.contiguous(), mesh, [Shard(d) for d in dims])


SAMPLERS: dict[str, EDMSampler] = {
    "deterministic": EDMSampler(4, sigma_max=20.0),
    "churn": EDMSampler(4, sigma_max=20.0, churn=3.0, churn_noise=1.01),
    "Euler, float32": EDMSampler(4, sigma_max=20.0, order=1, churn=1.0, dtype=torch.float32),
}


def forecasts(sample: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    found = []
    for mesh, dim, sizes in on_meshes():
        given = [cut(f.double(), mesh, dim, sizes) for f in fields()[1:5]]
        dpzoo.shard.manual_seed(7)
        torch.manual_seed(torch.distributed.get_rank())
        with strict():
            out = sample(given)
        assert isinstance(out, ShardTensor)
        assert out._spec.cuts == given[0]._spec.cuts
        found.append(out.full_tensor())
    return found


def agree(found: list[Tensor], tolerance: float = 1e-9) -> None:
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=tolerance, atol=tolerance)


@distributed(ranks=4, timeout=60)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_seed_gives_one_forecast_for_any_number_of_ranks(name: str):
    """1, 2, 4 and 2 x 2 ranks; and plain torch gives it too when it is handed the same noise."""
    model, sampler, draws = stormscope(), SAMPLERS[name], []

    def noted(x: Tensor) -> Tensor:
        draws.append(torch.randn_like(x))
        return draws[-1]

    found = forecasts(lambda f: sampler(model, f[0], state=f[1], background=f[2], invariant=f[3], draw=noted))
    tolerance = 1e-9 if sampler.dtype is torch.float64 else 1e-4
    agree(found, tolerance)
    replayed = iter(draws[: len(draws) // 4])
    x, state, background, invariant = (f.double() for f in fields()[1:5])
    plain = sampler(model, x, state, background, invariant, draw=lambda x: next(replayed).full_tensor())
    agree([found[0], plain], tolerance)
    assert found[0].std() > 0.01
    assert len({d.full_tensor().sum().item() for d in draws[: len(draws) // 4]}) == len(draws) // 4


@distributed(ranks=4)
def test_a_forecast_around_missing_data():
    """The mask cut as the field; what is hidden, by the mask and by a token, has no influence at all."""
    model, found = stormscope(mask_token=True), []
    for mesh, dim, sizes in on_meshes():
        _, like, state, background, invariant, seen = fields()
        mask = cut(seen, mesh, dim, sizes)
        dpzoo.shard.manual_seed(7)
        given = [cut(f.double(), mesh, dim, sizes) for f in (like, torch.where(seen, state, torch.nan), background)]
        conditions = {"state": given[1], "background": given[2], "invariant": invariant.double(), "invalid": ~mask}
        conditions["invariant"] = cut(conditions["invariant"], mesh, dim, sizes)
        with strict():
            out = EDMSampler(3, sigma_max=20.0)(model, given[0], mask=mask, **conditions)
        found.append(out.full_tensor())
    agree(found)
    hidden = ~seen.expand_as(found[0])
    assert found[0][hidden].abs().max() < 1e-12
    assert found[0][~hidden].isfinite().all()
    assert found[0][~hidden].std() > 0.01


@distributed(ranks=4, timeout=60)
def test_staged_experts_forecast_alike():
    model = StagedExperts([(stormscope(), 1.0, 20.0), (stormscope(depth=2), 0.002, 1.0)])
    agree(forecasts(lambda f: EDMSampler(4, sigma_max=20.0, churn=1.0)(model, f[0], *f[1:])))


@distributed(ranks=4)
def test_the_drawn_loss_is_the_same_for_any_number_of_ranks():
    model, losses, grads = stormscope(), [], []
    for mesh, dim, sizes in on_meshes():
        x, *conditions = (cut(f.double(), mesh, dim, sizes) for f in fields(2)[1:5])
        dpzoo.shard.manual_seed(3)
        torch.manual_seed(torch.distributed.get_rank())
        model.zero_grad()
        with strict():
            loss = EDMLoss()(model, x, *conditions)
            loss.backward()
        losses.append(loss.full_tensor().detach())
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    agree(losses)
    agree(grads)
    assert grads[0].abs().sum() > 0
