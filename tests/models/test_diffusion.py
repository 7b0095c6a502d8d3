"""Diffusion pieces on one device, against the paper's formulas and distributions whose denoiser is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpzoo.models import DiffusionUNet
from dpzoo.models.diffusion import (
    EDMLoss,
    EDMPreconditioner,
    EDMSampler,
    JoinedField,
    LogNormal,
    LogUniform,
    StagedExperts,
    edm_sigmas,
    join_fields,
)


class Recorder(nn.Module):
    """A network that notes what it was asked and answers with a multiple of it."""

    def __init__(self, factor: float = 0.5, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=dtype))
        self.asked: list[tuple[Tensor, Tensor, Any]] = []

    def forward(self, x: Tensor, noise: Tensor, **named: Any) -> Tensor:
        self.asked.append((x.detach(), noise.detach(), named))
        return x * self.factor


def fields(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TestPreconditioner:
    @pytest.mark.parametrize("data", [0.5, [0.3, 2.0]])
    def test_is_table_1_of_the_paper(self, data: float | list[float]):
        model = EDMPreconditioner(Recorder(), data).double()
        x, sigma = fields(3, 2, 4, 5), torch.tensor([0.01, 1.0, 70.0], dtype=torch.float64)
        found = model(x, sigma, field="passed on")
        (seen, noise, named) = model.network.asked[0]
        assert named == {"field": "passed on"}
        torch.testing.assert_close(noise, sigma.log() / 4)
        for b, s in enumerate(sigma.tolist()):
            for c in range(2):
                d = model.sigma_data[c].item() if isinstance(data, list) else data
                total = math.sqrt(s * s + d * d)
                torch.testing.assert_close(seen[b, c], x[b, c] / total)
                wanted = d * d / total**2 * x[b, c] + s * d / total * 0.5 * x[b, c] / total
                torch.testing.assert_close(found[b, c], wanted)
                weight = model.loss_weight(sigma, x).expand(3, 2, 1, 1)[b, c].item()
                assert weight == pytest.approx((s * s + d * d) / (s * d) ** 2)

    def test_input_and_target_of_the_network_have_unit_variance(self):
        clean, noise = fields(4, 1, 100, 100) * 0.5, fields(4, 1, 100, 100, seed=1)
        model = EDMPreconditioner(Recorder(0.0), 0.5).double()
        sigma = torch.tensor([0.02, 0.5, 3.0, 60.0], dtype=torch.float64)
        noisy = clean + sigma.view(-1, 1, 1, 1) * noise
        rest = (clean - model(noisy, sigma)) * model.loss_weight(sigma, noisy).sqrt()
        ones = torch.ones(4, dtype=torch.float64)
        torch.testing.assert_close(model.network.asked[0][0].std((1, 2, 3)), ones, rtol=0.02, atol=0)
        torch.testing.assert_close(rest.std((1, 2, 3)), ones, rtol=0.02, atol=0)

    @pytest.mark.parametrize("sigma", [2.0, torch.tensor(2.0), torch.tensor([2.0, 2.0])])
    def test_one_level_may_serve_all_samples(self, sigma: float | Tensor):
        model, x = EDMPreconditioner(Recorder()).double(), fields(2, 1, 4)
        assert torch.equal(model(x, sigma), model(x, torch.full((2,), 2.0, dtype=torch.float64)))

    def test_dtypes_of_field_and_network_may_differ(self):
        model = EDMPreconditioner(Recorder(dtype=torch.float32))
        found = model(fields(1, 2, 4), 1.0)
        assert model.network.asked[0][0].dtype is torch.float32
        assert found.dtype is torch.float64
        assert EDMPreconditioner(Recorder(dtype=torch.bfloat16))(torch.zeros(1, 2, 4).bfloat16(), 1.0).dtype is (
            torch.float32
        )

    def test_refusals(self):
        with pytest.raises(ValueError, match="each > 0; got 0"):
            EDMPreconditioner(Recorder(), 0)
        model = EDMPreconditioner(Recorder(), [1.0, 1.0])
        with pytest.raises(ValueError, match="2 entries, x has 3 channels"):
            model(torch.zeros(1, 3, 4), 1.0)
        with pytest.raises(ValueError, match=r"expected shape \(\) or \(2,\) for x of shape \(2, 2, 4\), got \(3,\)"):
            model(torch.zeros(2, 2, 4), torch.ones(3))
        with pytest.raises(ValueError, match=r"sigma must be > 0, got 0\.0"):
            model(torch.zeros(2, 2, 4), 0.0)


class TestNoiseLevels:
    def test_log_normal(self):
        torch.manual_seed(0)
        drawn = LogNormal(-1.2, 1.2).draw(torch.empty(20_000, 1)).log()
        assert drawn.shape == (20_000,)
        assert drawn.mean().item() == pytest.approx(-1.2, abs=0.03)
        assert drawn.std().item() == pytest.approx(1.2, abs=0.03)

    def test_log_uniform(self):
        torch.manual_seed(0)
        drawn = LogUniform(0.002, 80.0).draw(torch.empty(20_000, 1, dtype=torch.bfloat16))
        assert drawn.dtype is torch.float32
        assert 0.002 <= drawn.min() < 0.0021
        assert 79 < drawn.max() <= 80.001
        shares = torch.histc(drawn.log(), 4, math.log(0.002), math.log(80.0)) / 20_000
        torch.testing.assert_close(shares, torch.full((4,), 0.25), rtol=0.05, atol=0)

    def test_steps_are_equation_5(self):
        found = edm_sigmas(18, 0.002, 80.0, 7.0)
        wanted = [(80 ** (1 / 7) + i / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(18)]
        assert found == pytest.approx([*wanted, 0.0])
        assert (found[0], found[-2]) == (80.0, 0.002)
        assert edm_sigmas(1) == [80.0, 0.0]

    @pytest.mark.parametrize("settings", [{"steps": 0}, {"steps": 3, "sigma_min": 0.0}, {"steps": 3, "rho": 0.0}])
    def test_refused_steps(self, settings: dict[str, Any]):
        with pytest.raises(ValueError, match="a schedule needs steps >= 1"):
            edm_sigmas(**settings)

    def test_refused_levels(self):
        with pytest.raises(ValueError, match="std must be > 0"):
            LogNormal(std=0.0)
        with pytest.raises(ValueError, match="0 < low < high"):
            LogUniform(2.0, 1.0)


class TestLoss:
    def test_equals_the_formula(self):
        model = EDMPreconditioner(Recorder(), 0.7).double()
        x, noise, sigma = fields(2, 3, 4, 5), fields(2, 3, 4, 5, seed=1), torch.tensor([0.3, 9.0]).double()
        found = EDMLoss(channel_weights=(1.0, 0.5, 3.0)).at(sigma, noise, model, x)
        total = 0.0
        for b, s in enumerate(sigma.tolist()):
            for c, w in enumerate((1.0, 0.5, 3.0)):
                noisy = x[b : b + 1] + s * noise[b : b + 1]
                error = (model(noisy, s) - x[b : b + 1])[0, c].square().mean().item()
                total += w * (s * s + 0.49) / (s * 0.7) ** 2 * error / 6
        assert found.item() == pytest.approx(total)

    @pytest.mark.parametrize("channels", [1, 3])
    def test_a_mask_is_a_mean_over_what_counts(self, channels: int):
        model, x, noise = EDMPreconditioner(Recorder()).double(), fields(2, 3, 4, 5), fields(2, 3, 4, 5, seed=1)
        mask = fields(2, channels, 4, 5, seed=2) > 0.3
        found = EDMLoss().at(2.0, noise, model, x, mask=mask)
        kept = mask.expand_as(x)
        error = (model(torch.where(kept, x, 0) + 2 * noise, 2.0) - x).square() * model.loss_weight(2.0, x)
        torch.testing.assert_close(found, torch.stack([e[k].mean() for e, k in zip(error, kept, strict=True)]).mean())
        torch.testing.assert_close(EDMLoss().at(2.0, noise, model, x, mask=mask * 3.0), found)

    def test_batches_do_not_matter(self):
        model, x, noise = EDMPreconditioner(Recorder()).double(), fields(2, 3, 4, 5), fields(2, 3, 4, 5, seed=1)
        mask = torch.arange(40).view(2, 1, 4, 5) < 27  # more of one sample than of the other
        one_by_one = [EDMLoss().at(2.0, noise[i : i + 1], model, x[i : i + 1], mask=mask[i : i + 1]) for i in (0, 1)]
        torch.testing.assert_close(EDMLoss().at(2.0, noise, model, x, mask=mask), sum(one_by_one) / 2)

    def test_nan_behind_the_mask_goes_nowhere(self):
        model, x, noise = EDMPreconditioner(Recorder()).double(), fields(1, 2, 4, 5), fields(1, 2, 4, 5, seed=1)
        mask = torch.arange(20).view(1, 1, 4, 5) < 15
        wanted = EDMLoss().at(1.0, noise, model, x, mask=mask)
        x = torch.where(mask, x, math.nan).requires_grad_()
        found = EDMLoss().at(1.0, noise, model, x, mask=mask)
        assert torch.equal(found, wanted)
        found.backward()
        assert x.grad.isfinite().all()
        assert model.network.factor.grad.isfinite()

    def test_nothing_counts(self):
        model, x = EDMPreconditioner(Recorder()), torch.ones(2, 1, 4)
        assert EDMLoss()(model, x, mask=torch.zeros(2, 1, 4, dtype=torch.bool)) == 0

    def test_the_best_denoiser_has_unit_loss_for_white_data(self):
        """Of data N(0, d^2) without structure the network can know nothing: its target has variance 1 at all levels."""
        torch.manual_seed(0)
        model, data = EDMPreconditioner(Recorder(0.0), 0.5).double(), fields(200, 1, 20, 20) * 0.5
        for levels in (LogNormal(), LogUniform(0.01, 50.0)):
            assert EDMLoss(levels)(model, data).item() == pytest.approx(1.0, rel=0.02)

    def test_it_sees_through_a_wrapper(self):
        class Wrapper(nn.Module):
            def __init__(self, module: nn.Module) -> None:
                super().__init__()
                self.module = module

            def forward(self, *args: Any) -> Tensor:
                return self.module(*args)

        model, x = EDMPreconditioner(Recorder()).double(), fields(1, 1, 4)
        assert EDMLoss().at(1.0, x, Wrapper(model), x) == EDMLoss().at(1.0, x, model, x)
        with pytest.raises(TypeError, match="Recorder has no loss_weight"):
            EDMLoss()(Recorder(), x)

    def test_refusals(self):
        model, x = EDMPreconditioner(Recorder()), torch.zeros(2, 3, 4)
        with pytest.raises(ValueError, match="2 channel weights for 3 channels"):
            EDMLoss(channel_weights=(1.0, 1.0))(model, x)
        with pytest.raises(ValueError, match=r"the mask must be \(2 or 1, 3 or 1, 4\) .* got \(2, 4\)"):
            EDMLoss()(model, x, mask=torch.ones(2, 4))


def of_normal_data(deviation: float, mean: float = 0.0):
    """The best denoiser for data N(mean, deviation^2)."""

    def denoise(x: Tensor, sigma: float) -> Tensor:
        return (deviation**2 * x + sigma**2 * mean) / (deviation**2 + sigma**2)

    return denoise


class TestSampler:
    def test_it_solves_the_equation(self):
        """For normal data the path is known: x(s) = x(S) sqrt((d^2 + s^2) / (d^2 + S^2))."""
        start = fields(1, 2, 4, 5)
        errors = {}
        for order in (1, 2):
            for steps in (40, 80):
                sampler = EDMSampler(steps, order=order, sigma_max=10.0)
                found = sampler(of_normal_data(0.5), start, draw=lambda x: start)
                errors[order, steps] = (found - start * 10 * 0.5 / math.sqrt(0.25 + 100)).abs().max().item()
        assert errors[1, 40] / errors[1, 80] == pytest.approx(2, rel=0.1)
        assert errors[2, 40] / errors[2, 80] == pytest.approx(4, rel=0.1)
        assert errors[2, 80] < 2e-3

    def test_is_algorithm_2_of_the_paper(self):
        """Written out with numbers instead of a field."""
        draws = iter(fields(30).tolist())
        denoise = of_normal_data(0.8, 1.5)
        sampler = EDMSampler(6, churn=2.0, churn_range=(0.05, 50.0), churn_noise=1.003)
        found = sampler(denoise, torch.zeros(1, 1, 1), draw=lambda x: torch.full_like(x, next(draws)))
        e, t = iter(fields(30).tolist()), edm_sigmas(6)
        x = t[0] * next(e)
        for i in range(6):
            gamma = min(2.0 / 6, math.sqrt(2) - 1) if 0.05 <= t[i] <= 50.0 else 0.0
            hat = t[i] + gamma * t[i]
            if gamma:
                x += math.sqrt(hat**2 - t[i] ** 2) * 1.003 * next(e)
            d = (x - denoise(x, hat)) / hat
            new = x + (t[i + 1] - hat) * d
            if t[i + 1] != 0:
                new = x + (t[i + 1] - hat) * (d + (new - denoise(new, t[i + 1])) / t[i + 1]) / 2
            x = new
        assert found.item() == pytest.approx(x)

    @pytest.mark.parametrize("churn", [0.0, 10.0, 1000.0])
    def test_samples_have_the_distribution_of_the_data(self, churn: float):
        torch.manual_seed(0)
        found = EDMSampler(200, churn=churn)(of_normal_data(0.5, 1.0), torch.empty(20_000, 1, 1))
        assert found.mean().item() == pytest.approx(1.0, abs=0.02)
        assert found.std().item() == pytest.approx(0.5, rel=0.02)

    def test_calls_and_gradients(self):
        model = EDMPreconditioner(Recorder(dtype=torch.float32))
        found = EDMSampler(5)(model, torch.empty(1, 2, 4), field="condition")
        assert len(model.network.asked) == 9
        assert model.network.asked[-1][2] == {"field": "condition"}
        assert found.dtype is torch.float64
        assert not found.requires_grad
        assert len(list(EDMSampler(5, order=1).trajectory(model, torch.empty(1, 2, 4)))) == 6
        assert len(model.network.asked) == 9 + 5

    def test_a_trajectory_ends_in_the_sample(self):
        start = fields(1, 1, 3)
        path = list(EDMSampler(4).trajectory(of_normal_data(1.0), start, draw=lambda x: start))
        assert [level for level, _ in path] == edm_sigmas(4)
        assert torch.equal(path[-1][1], EDMSampler(4)(of_normal_data(1.0), start, draw=lambda x: start))

    @pytest.mark.parametrize("weight", [1, 0.3])
    def test_a_masked_point_is_noise_all_the_way(self, weight: float):
        """The denoiser is shown 0 and noise of the level there, as by the loss; its answer (NaN) goes nowhere."""
        start, mask = fields(2, 2, 3, 4), (torch.arange(12).view(1, 1, 3, 4) < 7) * weight
        hidden, shown = (mask == 0).expand_as(start), []

        def denoise(x: Tensor, sigma: float) -> Tensor:
            shown.append((x, sigma))
            return torch.where(mask > 0, 0.9 * x.sum((-2, -1), keepdim=True) / 12 + 0.1 * x, math.nan)

        found = EDMSampler(4)(denoise, start, draw=lambda x: start, mask=mask)
        assert len(shown) == 7
        for x, sigma in shown:
            torch.testing.assert_close(x[hidden], start[hidden] * sigma)
        assert found[hidden].abs().max() < 1e-12
        assert found[~hidden].isfinite().all()
        assert not torch.equal(found[~hidden], start[~hidden])

    @pytest.mark.parametrize(
        ("settings", "text"),
        [({"steps": 0}, "steps >= 1"), ({"order": 3}, "order must be 1"), ({"churn": -1.0}, "must be >= 0")],
    )
    def test_refusals(self, settings: dict[str, Any], text: str):
        with pytest.raises(ValueError, match=text):
            EDMSampler(**settings)


class TestExperts:
    def experts(self) -> StagedExperts:
        return StagedExperts(
            [(EDMPreconditioner(Recorder(f), 0.5), low, high) for f, low, high in ((1, 1, 80), (0, 0.002, 1))]
        ).double()

    def test_each_level_has_its_expert(self):
        model, x = self.experts(), fields(2, 1, 4)
        for sigma, stage in ((0.002, 0), (0.5, 0), (1.0, 1), (80.0, 1), (80.0 * 1.4, 1)):
            assert model.expert_for(sigma) is model.experts[stage]
            assert torch.equal(model(x, sigma), model.experts[stage](x, sigma))
            assert torch.equal(model(x, torch.full((2,), sigma, dtype=torch.float64)), model.experts[stage](x, sigma))

    def test_a_sampler_goes_through_all(self):
        model = self.experts()
        EDMSampler(8, churn=8.0)(model, torch.empty(1, 1, 3))
        high, low = model.experts[1].network.asked, model.experts[0].network.asked
        assert len(high) + len(low) == 15
        assert min(n.item() for _, n, _ in high) >= 0 > max(n.item() for _, n, _ in low)

    def test_refusals(self):
        model, x = self.experts(), fields(2, 1, 4)
        with pytest.raises(ValueError, match=r"no expert for the noise level 200; the experts cover 0\.002 to 80"):
            model(x, 200.0)
        with pytest.raises(ValueError, match=r"between 0\.5 and 2, in the ranges of several experts"):
            model(x, torch.tensor([0.5, 2.0]))
        one = nn.Identity()
        with pytest.raises(ValueError, match="leave a gap between 1 and 2"):
            StagedExperts([(one, 0.1, 1.0), (one, 2.0, 3.0)])
        with pytest.raises(ValueError, match="overlap between 2 and 1"):
            StagedExperts([(one, 0.1, 2.0), (one, 1.0, 3.0)])


class TestConditions:
    def test_join(self):
        a, b = fields(2, 3, 4), fields(1, 1, 4)
        assert torch.equal(join_fields(2, a, None, b), torch.cat([a, b.expand(2, 1, 4)], 1))
        assert join_fields(2, None, None) is None
        with pytest.raises(ValueError, match=r"must have 2 samples \(or 1\) .* \(4,\); got \(2, 3, 4\), \(1, 1, 5\)"):
            join_fields(2, a, fields(1, 1, 5))

    def test_a_unet_takes_a_field(self):
        torch.manual_seed(0)
        unet = DiffusionUNet(in_chans=5, out_chans=2, model_channels=8, num_blocks=1, channel_mult=(1, 2))
        model, x, field = EDMPreconditioner(JoinedField(unet)), torch.randn(2, 2, 8, 8), torch.randn(1, 3, 8, 8)
        out = model(x, torch.tensor([0.1, 1.0]), field=field)
        assert out.shape == x.shape
        EDMLoss()(model, x, field=field).backward()
        assert all(p.grad is not None for p in model.parameters())
