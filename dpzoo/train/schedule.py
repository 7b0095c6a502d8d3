"""The learning rate as a function of the step alone, so that a checkpoint need not hold a schedule."""

import math

from torch.optim import Optimizer

from dpzoo.train.config import TrainConfig


def rate_factor(step: int, steps: int, config: TrainConfig) -> float:
    """What the base rate is multiplied with in step `step` (from 0) of `steps`: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


class Rates:
    """Sets the rates of an optimiser's groups, keeping their ratios; make it before a checkpoint is loaded."""

    def __init__(self, optimizer: Optimizer, steps: int, config: TrainConfig) -> None:
        self._optimizer, self._steps, self._config = optimizer, steps, config
        self._base = [group["lr"] for group in optimizer.param_groups]

    def set(self, step: int) -> float:
        """Rates of step `step`; returns that of the first group."""
        factor = rate_factor(step, self._steps, self._config)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            group["lr"] = base * factor
        return self._optimizer.param_groups[0]["lr"]
