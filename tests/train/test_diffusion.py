"""Diffusion in the loop: curves, ensembles and their scores do not depend on the number of ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dpzoo.models.diffusion import EDMPreconditioner, EDMSampler
from dpzoo.shard import scatter
from dpzoo.testing import session_pool
from dpzoo.train import Denoising, SampledScores, diffusion_objective, draw_ensemble, fit
from dpzoo.train.journal import read_journal
from tests.train.toy import configured

SAMPLER = EDMSampler(steps=3, sigma_max=10.0, churn=1.0)


class Network(nn.Module):
    """A field and a condition, convolved; the noise level shifts the field."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x, noise, state=None):
        return self.conv(torch.cat([x, state.expand(x.shape[0], -1, -1, -1)], 1)) + noise.view(-1, 1, 1, 1)


class Fields:
    """Made-up fields; 9 rows do not divide evenly."""

    def __init__(self, mesh):
        self.domain = mesh["domain"]

    def __len__(self):
        return 3

    def epoch(self, number, start=0):
        for place in range(start, 3):
            generator = torch.Generator().manual_seed(100 * number + place)
            x = torch.randn(1, 4, 9, 6, dtype=torch.float64, generator=generator)
            yield scatter(x, self.domain, dim=2)


def describe(x):
    return Denoising(x[:, :2], {"state": x[:, 2:3]}, mask=x[:, 3:] > -1)


def build():
    torch.manual_seed(0)
    return EDMPreconditioner(Network(), sigma_data=1.0).double()


def train_on_mesh(folder):
    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("ddp", "domain"))
    model = build()
    measure = SampledScores(describe, SAMPLER, members=3)
    config = configured(epochs=2, ema=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = Fields(mesh)
    fit(
        model,
        optimizer,
        loader,
        diffusion_objective(describe),
        config,
        folder,
        mesh=mesh,
        validation=loader,
        measure=measure,
    )
    sample = next(loader.epoch(5))
    told = describe(sample)
    drawn = [draw_ensemble(model, SAMPLER, told.target, told.conditions, 3, seed=4, batch=batch) for batch in (1, 2, 3)]
    own = {"state": torch.cat([told.conditions["state"] * factor for factor in (1, 2, 3)])}  # another for each member
    drawn += [draw_ensemble(model, SAMPLER, told.target, own, 3, seed=4, batch=batch) for batch in (1, 2)]
    return [ensemble.full_tensor() for ensemble in drawn]


def test_training_validation_and_ensembles_are_the_same_on_any_number_of_ranks(tmp_path):
    found = [session_pool().run(train_on_mesh, tmp_path / str(n), ranks=n)[0] for n in (1, 2, 3)]
    rows = [read_journal(tmp_path / str(n)) for n in (1, 2, 3)]
    scores = [read_journal(tmp_path / str(n), "validation") for n in (1, 2, 3)]
    assert {"loss", "crps", "rmse", "spread"} <= scores[0][0].keys()
    for n in (1, 2):
        assert [r["loss"] for r in rows[n]] == pytest.approx([r["loss"] for r in rows[0]], rel=1e-9)
        for one, many in zip(scores[0], scores[n], strict=True):
            assert all(many[name] == pytest.approx(one[name], rel=1e-6) for name in ("loss", "crps", "rmse", "spread"))
        for one, many in zip(found[0], found[n], strict=True):
            torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-8)
    one_by_one, by_two, at_once, own, own_by_two = found[0]
    torch.testing.assert_close(by_two, one_by_one, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(one_by_one[0], one_by_one[1])
    torch.testing.assert_close(own_by_two, own, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(own[0], one_by_one[0], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(own[1], one_by_one[1])


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="at least 2 members, got 1"):
        SampledScores(describe, SAMPLER, members=1)
    for like, members in ((torch.zeros(2, 2, 3, 3), 1), (torch.zeros(1, 2, 3, 3), 0)):
        with pytest.raises(ValueError, match="draw_ensemble: needs like of one sample"):
            draw_ensemble(build(), SAMPLER, like, {}, members)
