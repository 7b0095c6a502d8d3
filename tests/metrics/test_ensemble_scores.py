"""Scores of ensembles against sums over all pairs, all points, and known distributions."""

import itertools
import math

import pytest
import torch

from dpzoo.metrics import (
    crps,
    crps_field,
    ensemble_rmse,
    ensemble_spread,
    rank_histogram,
    spread_skill_ratio,
)

MEMBERS, SHAPE = 5, (3, 4, 6)


def fields(seed: int = 0, members: int = MEMBERS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forecast (M, ...), truth (...) with ties, and weights that are sometimes 0."""
    g = torch.Generator().manual_seed(seed)
    forecast = torch.randn(members, *SHAPE, generator=g, dtype=torch.float64).mul(3).round()
    truth = torch.randn(SHAPE, generator=g, dtype=torch.float64).mul(3).round()
    weights = torch.rand(SHAPE, generator=g, dtype=torch.float64).sub(0.3).clamp(min=0)
    return forecast, truth, weights


def by_pairs(members: list[float], y: float, fair: bool) -> float:
    m = len(members)
    pairs = sum(abs(a - b) for a, b in itertools.product(members, members))
    return sum(abs(x - y) for x in members) / m - pairs / (2 * m * (m - 1) if fair else 2 * m * m)


class TestCRPS:
    @pytest.mark.parametrize("fair", [True, False])
    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_equals_the_sum_over_pairs(self, fair: bool, dim: int):
        forecast, truth, _ = fields()
        found = crps_field(forecast.movedim(0, dim), truth, member_dim=dim, fair=fair)
        wanted = [
            by_pairs(forecast[(slice(None), *at)].tolist(), truth[at].item(), fair)
            for at in itertools.product(*map(range, SHAPE))
        ]
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64).view(SHAPE))

    def test_weights_and_dims(self):
        forecast, truth, weights = fields()
        point = crps_field(forecast, truth)
        found = crps(forecast, truth, weights=weights, dims=(1, 2))
        torch.testing.assert_close(found, (point * weights).sum((1, 2)) / weights.sum((1, 2)))

    def test_a_point_without_weight_may_be_nan(self):
        forecast, truth, weights = fields()
        wanted = crps(forecast, truth, weights=weights > 0)
        hole = weights == 0
        assert hole.any()
        forecast[:, hole], truth[hole] = math.nan, math.nan
        assert crps(forecast, truth, weights=weights > 0) == wanted
        assert crps(forecast, truth).isnan()

    def test_the_fair_score_does_not_depend_on_the_number_of_members(self):
        """For members and truth from N(0, 1) the expected score is 1 / sqrt(pi), whatever the size."""
        g = torch.Generator().manual_seed(0)
        truth = torch.randn(200_000, generator=g)
        for members in (2, 5):
            forecast = torch.randn(members, 200_000, generator=g)
            assert crps(forecast, truth).item() == pytest.approx(1 / math.sqrt(math.pi), abs=0.01)
            assert crps(forecast, truth, fair=False) > 0.6

    def test_of_one_member_it_is_the_absolute_error(self):
        forecast, truth, _ = fields(members=1)
        assert crps(forecast, truth, fair=False) == (forecast[0] - truth).abs().mean()
        with pytest.raises(ValueError, match=r"fair CRPS needs 2 members or more, got 1 \(dim 0\)"):
            crps(forecast, truth)

    def test_shapes_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"the forecast \(5, 2, 3\) must have the truth's shape \(3, 2\)"):
            crps(torch.zeros(5, 2, 3), torch.zeros(3, 2))
        with pytest.raises(ValueError, match=r"weights \(2,\) do not broadcast to the field \(2, 3\)"):
            crps(torch.zeros(5, 2, 3), torch.zeros(2, 3), weights=torch.ones(2))


class TestErrorAndSpread:
    def test_equal_their_definitions(self):
        forecast, truth, weights = fields()
        total = weights.sum()
        error = (((forecast.sum(0) / MEMBERS - truth) ** 2 * weights).sum() / total).sqrt()
        variance = sum((x - forecast.sum(0) / MEMBERS) ** 2 for x in forecast) / (MEMBERS - 1)
        spread = ((variance * weights).sum() / total).sqrt()
        torch.testing.assert_close(ensemble_rmse(forecast, truth, weights=weights), error)
        torch.testing.assert_close(ensemble_spread(forecast, weights=weights), spread)
        ratio = spread_skill_ratio(forecast, truth, weights=weights)
        torch.testing.assert_close(ratio, (spread / error) * math.sqrt(6 / 5))

    def test_a_reliable_ensemble_has_ratio_one(self):
        g = torch.Generator().manual_seed(0)
        forecast, truth = torch.randn(4, 100_000, generator=g), torch.randn(100_000, generator=g)
        assert spread_skill_ratio(forecast, truth).item() == pytest.approx(1.0, abs=0.01)

    def test_one_member_has_no_spread(self):
        with pytest.raises(ValueError, match="ensemble spread needs 2 members or more, got 1"):
            ensemble_spread(torch.zeros(1, 4))

    def test_half_precision_is_summed_in_float32(self):
        forecast = torch.full((2, 70_000), 3.0, dtype=torch.float16)
        error = ensemble_rmse(forecast, torch.zeros(70_000, dtype=torch.float16))
        assert error.dtype is torch.float32
        assert error == 3.0


class TestRankHistogram:
    def test_equals_counting(self):
        forecast, truth, weights = fields()
        wanted = [0.0] * (MEMBERS + 1)
        for at in itertools.product(*map(range, SHAPE)):
            members, y = forecast[(slice(None), *at)].tolist(), truth[at].item()
            low, ties = sum(x < y for x in members), members.count(y)
            for rank in range(low, low + ties + 1):
                wanted[rank] += weights[at].item() / (ties + 1) / weights.sum().item()
        found = rank_histogram(forecast, truth, weights=weights)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
        assert found.sum().item() == pytest.approx(1.0)

    def test_dry_points_spread_over_all_ranks(self):
        torch.testing.assert_close(rank_histogram(torch.zeros(3, 8), torch.zeros(8)), torch.full((4,), 0.25))

    def test_a_truth_above_all(self):
        found = rank_histogram(torch.zeros(8, 3), torch.ones(8), member_dim=1)
        assert found.tolist() == [0.0, 0.0, 0.0, 1.0]
