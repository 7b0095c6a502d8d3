"""Diffusion models in the training loop: the objective, ensembles drawn from a model, and their scores in a validation.

What a sample tells the model is the user's function `describe`: sample -> `Denoising`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.metrics import crps, ensemble_rmse, ensemble_spread
from dpzoo.models.diffusion import EDMLoss, EDMSampler
from dpzoo.train.seeds import seed_sample
from dpzoo.train.step import Objective


@dataclass(frozen=True)
class Denoising:
    """A sample as a diffusion model sees it.

    Attributes:
        target: the clean field, `(B, C, *grid)`.
        conditions: keyword arguments of the denoiser.
        mask: how much a point counts, see `dpzoo.models.diffusion.EDMLoss`; where it is 0 nothing is forecast.
    """

    target: Tensor
    conditions: Mapping[str, Any] = field(default_factory=dict)
    mask: Tensor | None = None


Describe = Callable[[Any], Denoising]


def diffusion_objective(describe: Describe, loss: EDMLoss | None = None) -> Objective:
    """Denoising score matching as an objective of `fit`: `(model, sample)` -> `{"loss": ()}`."""
    found = EDMLoss() if loss is None else loss

    def objective(model: nn.Module, sample: Any) -> dict[str, Tensor]:
        told = describe(sample)
        return {"loss": found(model, told.target, mask=told.mask, **told.conditions)}

    return objective


@torch.no_grad()
def draw_ensemble(
    denoiser: nn.Module,
    sampler: EDMSampler,
    like: Tensor,
    conditions: Mapping[str, Any],
    members: int,
    seed: int = 0,
    batch: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Draw an ensemble: `like (1, C, *grid)` -> `(members, C, *grid)` in the sampler's dtype.

    The noise of a member follows from the seed and its number, so its field does not depend (up to rounding) on how
    many members are drawn, or with it in one batch, nor, for ShardTensors, on the number of ranks.

    Args:
        conditions: tensors of one sample, which serve all members, or of `members` samples, one for each.
        batch: members at a time.
        mask: `(1, C or 1, *grid)`: where it is 0 the members are 0, see `dpzoo.models.diffusion.EDMSampler`.

    Raises:
        ValueError: `like` of more than one sample, or no member.
    """
    if like.shape[0] != 1 or members < 1 or batch < 1:
        raise ValueError(
            f"draw_ensemble: needs like of one sample, members >= 1 and batch >= 1; got {tuple(like.shape)}, "
            f"{members} and {batch}"
        )
    drawn = []
    for start in range(0, members, batch):
        numbers = range(start, min(start + batch, members))
        together = like if len(numbers) == 1 else torch.cat([like] * len(numbers))
        own = {name: _of_members(value, numbers, members) for name, value in conditions.items()}
        drawn.append(sampler(denoiser, together, draw=_seeded(seed, numbers), mask=mask, **own))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _of_members(value: Any, numbers: range, members: int) -> Any:
    if isinstance(value, Tensor) and value.ndim and members > 1 and value.shape[0] == members:
        return value[numbers.start : numbers.stop]
    return value


def _seeded(seed: int, numbers: range) -> Callable[[Tensor], Tensor]:
    """Normal numbers for members `numbers`, new ones at each call."""
    calls: Iterator[int] = iter(range(1_000_000))

    def draw(like: Tensor) -> Tensor:
        call, parts = next(calls), []
        for place, number in enumerate(numbers):
            seed_sample(seed, call, number)
            parts.append(torch.randn_like(like[place : place + 1]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return draw


@dataclass(frozen=True)
class SampledScores:
    """A measure for `fit` and `validate`: the loss, and scores of an ensemble that is drawn for every sample.

    Reports "loss", and "crps" (fair), "rmse" of the ensemble's mean and "spread", in the units of the target and
    weighted by the mask. Every validation draws from the same noise, so that the curve shows the model and not luck.

    Args:
        describe: sample (of a batch of one) -> `Denoising`.
        sampler: how an ensemble is drawn.
        members: at least 2.
        loss: as in training.
        seed, batch: as in `draw_ensemble`.
    """

    describe: Describe
    sampler: EDMSampler
    members: int = 4
    loss: EDMLoss = field(default_factory=EDMLoss)
    seed: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"SampledScores: a spread needs at least 2 members, got {self.members}")

    @torch.no_grad()
    def __call__(self, model: nn.Module, sample: Any) -> dict[str, Tensor]:
        """Loss and scores, 0-d tensors."""
        told = self.describe(sample)
        found = {"loss": self.loss(model, told.target, mask=told.mask, **told.conditions)}
        drawn = draw_ensemble(
            model, self.sampler, told.target, told.conditions, self.members, self.seed, self.batch, told.mask
        )
        weights = None if told.mask is None else told.mask[0]
        truth = told.target[0].to(drawn.dtype)
        found["crps"] = crps(drawn, truth, weights=weights)
        found["rmse"] = ensemble_rmse(drawn, truth, weights=weights)
        found["spread"] = ensemble_spread(drawn, weights=weights)
        return found
