"""Scores of fields against loops over points, windows and waves."""

import cmath
import math

import pytest
import torch

from dpzoo.metrics import contingency, critical_success_index, fractions_skill_score, radial_power_spectrum

THRESHOLDS = (-0.5, 0.0, 1.0)


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(*shape, generator=g, dtype=torch.float64)
    return truth + torch.randn(*shape, generator=g, dtype=torch.float64) * 0.5, truth


class TestContingency:
    def test_equals_counting(self):
        forecast, truth = pair(2, 5, 7)
        weights = torch.rand(5, 7, dtype=torch.float64).round()
        found = contingency(forecast, truth, THRESHOLDS, weights=weights)
        for i, t in enumerate(THRESHOLDS):
            counts = {(a, b): 0.0 for a in (True, False) for b in (True, False)}
            for at in torch.cartesian_prod(*map(torch.arange, truth.shape)).tolist():
                at = tuple(at)
                counts[forecast[at].item() >= t, truth[at].item() >= t] += weights[at[1:]].item()
            assert found.hits[i] == counts[True, True]
            assert found.misses[i] == counts[False, True]
            assert found.false_alarms[i] == counts[True, False]
            assert found.correct_negatives[i] == counts[False, False]
            events = counts[True, True] + counts[False, True] + counts[True, False]
            assert found.csi[i] == counts[True, True] / events

    def test_counts_of_fields_add(self):
        forecast, truth = pair(2, 5, 7)
        each = [contingency(f, t, THRESHOLDS) for f, t in zip(forecast, truth, strict=True)]
        assert torch.equal((each[0] + each[1]).csi, critical_success_index(forecast, truth, THRESHOLDS))
        by_field = critical_success_index(forecast, truth, THRESHOLDS, dims=(1, 2))
        assert torch.equal(by_field, torch.stack([e.csi for e in each], 1))

    def test_the_other_ratios(self):
        forecast, truth = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([1.0, 0, 0, 1, 0, 0])
        found = contingency(forecast, truth, [0.5])
        assert (found.csi, found.detected, found.false_alarm_ratio, found.bias) == (1 / 4, 1 / 2, 2 / 3, 3 / 2)

    def test_a_threshold_belongs_to_the_event_and_nan_is_none(self):
        forecast, truth = torch.tensor([2.0, math.nan, 2.0]), torch.tensor([2.0, 2.0, math.nan])
        found = contingency(forecast, truth, [2.0])
        assert (found.hits, found.misses, found.false_alarms) == (1, 1, 1)

    def test_no_event_at_all_has_no_score(self):
        assert critical_success_index(torch.zeros(3), torch.zeros(3), [1.0]).isnan()

    def test_refusals(self):
        with pytest.raises(ValueError, match="members of an ensemble one by one"):
            contingency(torch.zeros(4, 3), torch.zeros(3), [0.0])
        with pytest.raises(ValueError, match="one threshold or more"):
            contingency(torch.zeros(3), torch.zeros(3), [])


def fraction(event: torch.Tensor, row: int, column: int, size: tuple[int, int]) -> float:
    """Share of a window's points that are in the grid and an event."""
    up, left = size[0] // 2, size[1] // 2
    part = event[max(0, row - up) : row + up + 1, max(0, column - left) : column + left + 1]
    return part.sum().item() / (size[0] * size[1])


class TestFSS:
    @pytest.mark.parametrize("size", [(1, 1), (3, 3), (5, 1), (9, 9), (21, 3)])
    @pytest.mark.parametrize("masked", [False, True])
    def test_equals_windows_one_by_one(self, size: tuple[int, int], masked: bool):
        forecast, truth = pair(6, 9)
        mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(2)) > 0.2
        kept = mask if masked else torch.ones_like(mask)
        found = fractions_skill_score(forecast, truth, THRESHOLDS, size, mask=mask if masked else None)
        for i, t in enumerate(THRESHOLDS):
            said, seen = (forecast >= t) & kept, (truth >= t) & kept
            centres = kept.nonzero().tolist()
            f = [fraction(said, *at, size) for at in centres]
            o = [fraction(seen, *at, size) for at in centres]
            apart = sum((a - b) ** 2 for a, b in zip(f, o, strict=True))
            assert found[i].item() == pytest.approx(1 - apart / sum(a * a + b * b for a, b in zip(f, o, strict=True)))

    def test_an_ensemble_gives_probabilities(self):
        _, truth = pair(6, 8)
        members = torch.stack([truth + 2, truth - 2])  # the event everywhere, or nowhere
        found = fractions_skill_score(members, truth, [0.0], 1, member_dim=0)
        f = ((members[0] >= 0).double() + (members[1] >= 0).double()) / 2
        o = (truth >= 0).double()
        torch.testing.assert_close(found[0], 1 - (f - o).square().sum() / (f.square().sum() + o.square().sum()))

    def test_perfect_shifted_and_unlike(self):
        truth = torch.zeros(16, 16)
        truth[4:8, 4:8] = 1
        shifted = truth.roll(4, 1)
        assert fractions_skill_score(truth, truth, [0.5], 3) == 1
        assert fractions_skill_score(shifted, truth, [0.5], 1) == 0
        near, far = (fractions_skill_score(shifted, truth, [0.5], n) for n in (5, 11))
        assert 0 < near < far < 1

    def test_leading_dims_can_stay(self):
        forecast, truth = pair(2, 3, 6, 8)
        found = fractions_skill_score(forecast, truth, THRESHOLDS, 3, dims=(1, 2, 3))
        wanted = [fractions_skill_score(f, t, THRESHOLDS, 3) for f, t in zip(forecast, truth, strict=True)]
        torch.testing.assert_close(found, torch.stack(wanted, 1))

    def test_refusals(self):
        forecast, truth = pair(2, 6, 8)
        with pytest.raises(ValueError, match="its sides must be odd; got 4"):
            fractions_skill_score(forecast, truth, [0.0], 4)
        with pytest.raises(ValueError, match="dims must hold the grid"):
            fractions_skill_score(forecast, truth, [0.0], 3, dims=(0, 1))


def waves(field: torch.Tensor) -> dict[tuple[int, int], float]:
    """Power of every wave, by the definition of the transform."""
    rows, columns = field.shape
    found = {}
    for p in range(rows):
        for q in range(columns):
            total = sum(
                field[i, j].item() * cmath.exp(-2j * math.pi * (p * i / rows + q * j / columns))
                for i in range(rows)
                for j in range(columns)
            )
            found[(p + rows // 2) % rows - rows // 2, (q + columns // 2) % columns - columns // 2] = (
                abs(total / (rows * columns)) ** 2
            )
    return found


class TestSpectrum:
    @pytest.mark.parametrize("shape", [(6, 6), (5, 8), (8, 5), (7, 7), (4, 12)])
    @pytest.mark.parametrize("spacing", [1.0, (3.0, 1.5)])
    def test_equals_the_sum_over_waves(self, shape: tuple[int, int], spacing: float | tuple[float, float]):
        field, _ = pair(*shape)
        dy, dx = spacing if isinstance(spacing, tuple) else (spacing, spacing)
        numbers, power = radial_power_spectrum(field, spacing)
        width = 1 / min(shape[0] * dy, shape[1] * dx)
        torch.testing.assert_close(numbers, torch.arange(len(numbers), dtype=torch.float64) * width)
        shortest = min(0.5 / dy, 0.5 / dx)
        assert numbers[-1] <= shortest + 1e-9 < numbers[-1] + width
        wanted = [0.0] * len(numbers)
        for (p, q), one in waves(field).items():
            ring = math.ceil(math.hypot(p / (shape[0] * dy), q / (shape[1] * dx)) / width - 0.5 - 1e-9)
            if ring < len(wanted):
                wanted[ring] += one
        torch.testing.assert_close(power, torch.tensor(wanted, dtype=torch.float64))

    def test_one_wave_is_one_ring(self):
        across = torch.cos(2 * math.pi * 6 * torch.arange(64.0) / 64)
        numbers, power = radial_power_spectrum(3 + across.expand(2, 32, 64), spacing=2.0)
        assert power.shape == (2, 17)
        assert numbers[1] == pytest.approx(1 / 64)
        torch.testing.assert_close(power[0, 0], torch.tensor(9.0))
        at = 3  # 6 / 128 cycles, and a ring is 1 / 64 wide: one wave of the shorter side
        torch.testing.assert_close(power[0, at], torch.tensor(0.5), rtol=1e-4, atol=0)
        assert power[0].sum() == pytest.approx(9.5, rel=1e-5)

    def test_a_taper_takes_away_false_power(self):
        slope = torch.arange(64.0, dtype=torch.float64).expand(64, 64)
        plain, tapered = radial_power_spectrum(slope)[1], radial_power_spectrum(slope, taper=True)[1]
        assert tapered[0] < 1e-2 * plain[0]
        assert tapered[20:].sum() < 1e-3 * plain[20:].sum()

    def test_a_taper_keeps_the_power_of_noise(self):
        noise = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(0))
        plain, tapered = (radial_power_spectrum(noise, taper=t)[1].mean(0)[4:].sum() for t in (False, True))
        assert tapered.item() == pytest.approx(plain.item(), rel=0.02)

    @pytest.mark.parametrize("taper", [False, True])
    def test_a_mask_is_a_window(self, taper: bool):
        """Whatever lies behind it, the spectrum is that of the rest without its mean; noise keeps its power."""
        field, _ = pair(40, 2, 24, 32)
        everywhere = torch.ones(24, 32, dtype=torch.bool)
        centred = field - field.mean((-2, -1), keepdim=True)
        power = radial_power_spectrum(field, taper=taper, mask=everywhere)[1]
        torch.testing.assert_close(power, radial_power_spectrum(centred, taper=taper)[1])
        mask = everywhere.clone()
        mask[3:12, 5:20] = False
        holes = [radial_power_spectrum(torch.where(mask, field, x), taper=taper, mask=mask)[1] for x in (math.nan, 9.0)]
        assert torch.equal(*holes)
        high = [p[..., 3:].sum(-1).mean().item() for p in (holes[0], power)]
        assert high[0] == pytest.approx(high[1], rel=0.03)
        each = torch.stack([mask, everywhere])
        both = radial_power_spectrum(field, taper=taper, mask=each)[1]
        torch.testing.assert_close(both, torch.stack([holes[0][:, 0], power[:, 1]], 1))
        assert radial_power_spectrum(field, mask=~everywhere)[1].isnan().all()

    def test_refusals(self):
        with pytest.raises(ValueError, match="do not broadcast to the field"):
            radial_power_spectrum(torch.zeros(4, 4), mask=torch.ones(3, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match="spacing > 0"):
            radial_power_spectrum(torch.zeros(4, 4), 0.0)
        with pytest.raises(ValueError, match=r"needs a field \(\.\.\., H, W\)"):
            radial_power_spectrum(torch.zeros(4))
