"""Mean of measures over the samples of a loader."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpzoo.train.config import TrainConfig
from dpzoo.train.data_parallel import reshard
from dpzoo.train.seeds import VALIDATION, seed_sample
from dpzoo.train.step import autocast
from dpzoo.train.team import Team

if TYPE_CHECKING:
    from dpzoo.train.loop import Loader

Measure = Callable[[nn.Module, Any], Mapping[str, Tensor]]


@torch.no_grad()
def validate(model: nn.Module, loader: "Loader", measure: Measure, config: TrainConfig, team: Team) -> dict[str, float]:
    """Mean over all samples of all replicas, each counted once (`is_repeat`), with the model in evaluation mode.

    Epoch 0 of the loader every time, and the same random numbers for a sample: what is drawn, a sub-sample or the noise
    of a diffusion model, is the same in every validation, for any number of ranks and replicas.
    """
    was_training, sums, weight = model.training, dict[str, float](), 0
    model.eval()
    try:
        for number, sample in enumerate(loader.epoch(0)):
            seed_sample(config.seed, VALIDATION, number * team.replicas + team.replica)
            with autocast(config, team):
                found = measure(model, sample)
            counts = not getattr(sample, "is_repeat", False)
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + counts * value.item()
            weight += counts
    finally:
        reshard(model)
        model.train(was_training)
    return team.mean(sums, weight)
