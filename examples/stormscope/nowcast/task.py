"""What is learned: from states to the next one, as a diffusion model sees it; and forecasts of several steps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.datapipes.grid import GridDataset, GridLoader, GridSample, GridStatistics
from dpzoo.models.diffusion import EDMLoss, EDMSampler, LogNormal
from dpzoo.train import Denoising, SampledScores, Team, diffusion_objective, draw_ensemble
from dpzoo.train.step import Objective
from nowcast.settings import Settings

CHANGES = "changes.json"


@dataclass(frozen=True)
class Task:
    """Loss, measure and forecasts of a configuration; states are normalised.

    Attributes:
        scale: `(C, 1, 1)`: the unit of what is predicted, per channel of the normalised state.
    """

    settings: Settings
    statistics: GridStatistics
    scale: Tensor

    def describe(self, sample: GridSample) -> Denoising:
        """The next state (or the change to it) given what is known."""
        now, after = sample["past"][-1:], sample["next"][:1]
        target = (after - now) / self.scale if self.settings.predict == "change" else after
        mask = self.area(sample).unsqueeze(0) if self.settings.data.area_weights else None
        return Denoising(target, self.conditions(sample, sample.stacked("past"), lead=0), mask)

    def conditions(self, sample: GridSample, state: Tensor, lead: int) -> dict[str, Tensor]:
        """Keyword arguments of the denoiser for the step after `lead` steps from `state (M, frames * C, y, x)`."""
        found = {"state": state}
        if self.settings.data.sun:
            offsets = sorted({o + step for o in self.settings.data.sun for step in range(len(sample.times["next"]))})
            places = [offsets.index(offset + lead) for offset in self.settings.data.sun]
            suns = torch.cat([sample["cos_zenith"][place : place + 1] for place in places])
            found["background"] = suns.flatten(0, 1).unsqueeze(0)
        if "invariants" in sample.tensors:
            found["invariant"] = sample.batched("invariants")
        return found

    def area(self, sample: GridSample) -> Tensor:
        """Cosine of the latitude, `(1, y, x)`."""
        place = self.settings.data.invariants.index("latitude")
        fields = self.statistics.denormalise("invariants", sample["invariants"])
        return fields[place : place + 1].deg2rad().cos().clamp(min=0)

    @property
    def loss(self) -> EDMLoss:
        """As configured."""
        return EDMLoss(LogNormal(self.settings.diffusion.level_mean, self.settings.diffusion.level_std))

    @property
    def sampler(self) -> EDMSampler:
        """As configured."""
        d = self.settings.diffusion
        return EDMSampler(d.steps, d.sigma_min, d.sigma_max, order=d.order, churn=d.churn)

    @property
    def objective(self) -> Objective:
        """For `fit`."""
        return diffusion_objective(self.describe, self.loss)

    @property
    def measure(self) -> Any:
        """For validations: loss, and scores of an ensemble in the units of what is predicted."""
        d = self.settings.diffusion
        if d.members < 2:
            return self.objective
        return SampledScores(self.describe, self.sampler, d.members, self.loss, batch=d.batch)

    @torch.no_grad()
    def forecast(self, model: nn.Module, sample: GridSample, leads: int, members: int, seed: int, batch: int) -> Tensor:
        """An ensemble of forecasts, each member going on from its own last state.

        Returns:
            `(leads, members, C, y, x)`, float32, in physical units, cut as the sample is.
        """
        channels = sample["past"].shape[1]
        state, found = sample.stacked("past"), []
        for lead in range(leads):
            now = state[:, -channels:]
            conditions = self.conditions(sample, state, lead)
            drawn = draw_ensemble(
                model, self.sampler, now[:1], conditions, members, seed=seed + 1_000_003 * lead, batch=batch
            ).float()
            after = now + drawn * self.scale if self.settings.predict == "change" else drawn
            found.append(self.statistics.denormalise("next", after))
            older = state[:, channels:]
            older = older if older.shape[0] == after.shape[0] else older.expand(after.shape[0], *older.shape[1:])
            state = torch.cat([older, after], dim=1) if older.shape[1] else after
        return torch.stack(found)


def make_task(settings: Settings, statistics: GridStatistics, device: torch.device, scale: Mapping[str, float]) -> Task:
    """The task, for the deviation of each channel's change."""
    ones = [1.0] * len(scale)
    values = list(scale.values()) if settings.predict == "change" else ones
    return Task(settings, statistics, torch.tensor(values, device=device).view(-1, 1, 1))


def change_scale(settings: Settings, dataset: GridDataset, loader: GridLoader, team: Team) -> dict[str, float]:
    """Root mean square of each channel's change in one step, normalised: read from the run's folder or found there.

    At most 64 samples of each data-parallel rank are read.
    """
    file = settings.out / CHANGES
    if not team.from_first(file.exists()):
        channels = dataset.index.timelines["past"].channels
        sums, count = dict.fromkeys(channels, 0.0), 0
        for sample in loader.epoch(0):
            squares = (sample["next"][0] - sample["past"][-1]).square().mean((1, 2))
            for channel, place in zip(channels, range(len(channels)), strict=True):
                sums[channel] += squares[place].item()
            count += 1
            if count == 64:
                break
        found = {name: max(value, 1e-12) ** 0.5 for name, value in team.mean(sums, count).items()}
        if team.is_first:
            file.write_text(json.dumps(found, indent=1))
    return team.from_first(json.loads(file.read_text()) if team.is_first else {})
