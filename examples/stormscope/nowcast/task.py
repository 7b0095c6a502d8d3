"""What is learned: from states to the next one, as a diffusion model sees it; and forecasts of several steps."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.datapipes.grid import GridDataset, GridLoader, GridSample, GridStatistics
from dpzoo.models.diffusion import EDMLoss, EDMSampler, LogNormal
from dpzoo.train import Denoising, SampledScores, Team, diffusion_objective, draw_ensemble
from dpzoo.train.step import Objective
from nowcast.settings import Settings

CHANGES = "changes.json"
LEAST_AREA = 1e-6
"""Of a point, so that a pole, whose area is 0, still has its place in the noised field."""


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
        mask = counting(self.area(sample), scored(sample, lead=0))
        conditions = self.conditions(sample, sample.stacked("past"), sample.masks.get("past"), lead=0)
        return Denoising(target, conditions, None if mask is None else mask.unsqueeze(0))

    def conditions(self, sample: GridSample, state: Tensor, seen: Tensor | None, lead: int) -> dict[str, Tensor]:
        """Keyword arguments of the denoiser for the step after `lead` steps.

        Args:
            state: `(M, frames * C, y, x)`, all frames that it sees.
            seen: `(frames, C, y, x)`, where they have a value; None: everywhere.
        """
        found = {"state": state}
        if seen is not None and self.settings.model.get("mask_token", False):
            found["invalid"] = ~seen.flatten(0, 1).any(0, keepdim=True).unsqueeze(0)
        if self.settings.data.sun:
            offsets = sorted({o + step for o in self.settings.data.sun for step in range(len(sample.times["next"]))})
            places = [offsets.index(offset + lead) for offset in self.settings.data.sun]
            suns = torch.cat([sample["cos_zenith"][place : place + 1] for place in places])
            found["background"] = suns.flatten(0, 1).unsqueeze(0)
        if "invariants" in sample.tensors:
            found["invariant"] = sample.batched("invariants")
        return found

    def area(self, sample: GridSample) -> Tensor | None:
        """Cosine of the latitude, `(1, y, x)`, if points count by it."""
        if not self.settings.data.area_weights:
            return None
        place = self.settings.data.invariants.index("latitude")
        fields = self.statistics.denormalise("invariants", sample["invariants"])
        return fields[place : place + 1].deg2rad().cos().clamp(min=LEAST_AREA)

    def physical(self, stream: str, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Normalised states `(..., C, y, x)` in physical units, NaN where `seen` (bool, likewise) is False."""
        fields = self.statistics.denormalise(stream, x)
        if self.settings.data.log1p:
            channels = self.statistics.channels(stream)
            which = [[[name in self.settings.data.log1p]] for name in channels]
            fields = torch.where(torch.tensor(which, device=fields.device), fields.expm1(), fields)
        return fields if seen is None else torch.where(seen, fields, torch.nan)

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
            `(leads, members, C, y, x)`, float32, in physical units, cut as the sample is; NaN where the newest state
            has no value.
        """
        channels = sample["past"].shape[1]
        state, found = sample.stacked("past"), []
        seen = sample.masks.get("past")
        known = None if seen is None else seen[-1:]
        for lead in range(leads):
            now = state[:, -channels:]
            conditions, own = self.conditions(sample, state, seen, lead), seed + 1_000_003 * lead
            drawn = draw_ensemble(
                model, self.sampler, now[:1], conditions, members, seed=own, batch=batch, mask=known
            ).float()
            after = now + drawn * self.scale if self.settings.predict == "change" else drawn
            found.append(self.physical("next", after, known))
            if seen is not None and known is not None:
                after = torch.where(known, after, 0.0)  # as the loader has it
                seen = torch.cat([seen[1:], known])
            older = state[:, channels:]
            older = older if older.shape[0] == after.shape[0] else older.expand(after.shape[0], *older.shape[1:])
            state = torch.cat([older, after], dim=1) if older.shape[1] else after
        return torch.stack(found)


def scored(sample: GridSample, lead: int) -> Tensor | None:
    """Where the newest state and the one `lead` + 1 steps later both have a value, `(C, y, x)`; None: everywhere."""
    if "past" not in sample.masks:
        return None
    return sample.masks["past"][-1] & sample.masks["next"][lead]


def counting(area: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """How much points count: by area, by whether they have a value, or by both."""
    return area if seen is None else seen if area is None else area * seen


def make_task(settings: Settings, statistics: GridStatistics, device: torch.device, scale: Mapping[str, float]) -> Task:
    """The task, for the deviation of each channel's change."""
    return Task(settings, statistics, torch.tensor(list(scale.values()), device=device).view(-1, 1, 1))


def change_scale(settings: Settings, dataset: GridDataset, loader: GridLoader, team: Team) -> dict[str, float]:
    """Root mean square of each channel's change in one step, normalised: read from the run's folder or found there.

    At most 64 samples of each data-parallel rank are read; none where the state itself is predicted, in units of 1.
    """
    file = settings.out / CHANGES
    if settings.predict == "state":
        return dict.fromkeys(dataset.index.timelines["past"].channels, 1.0)
    if not team.from_first(file.exists()):
        channels = dataset.index.timelines["past"].channels
        sums, counts = dict.fromkeys(channels, 0.0), dict.fromkeys(channels, 0.0)
        for sample in islice(loader.epoch(0), 64):
            squares, seen = (sample["next"][0] - sample["past"][-1]).square(), scored(sample, lead=0)
            share = squares.new_ones(len(channels)) if seen is None else seen.to(squares.dtype).mean((1, 2))
            means = (squares if seen is None else squares * seen).mean((1, 2))
            for place, channel in enumerate(channels):
                sums[channel] += means[place].item()
                counts[channel] += share[place].item()
        sums, counts = team.mean(sums, 1), team.mean(counts, 1)
        found = {name: max(value / (counts[name] or 1), 1e-12) ** 0.5 for name, value in sums.items()}
        if team.is_first:
            file.write_text(json.dumps(found, indent=1))
    return team.from_first(json.loads(file.read_text()) if team.is_first else {})
