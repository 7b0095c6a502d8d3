"""One optimiser step, from top to bottom."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpzoo.train.config import TrainConfig
from dpzoo.train.data_parallel import without_averaging
from dpzoo.train.seeds import seed_sample
from dpzoo.train.team import Team

Objective = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""(model, sample) -> 0-d tensors by name: "loss" is minimised, the others are reported."""


class DivergedError(ArithmeticError):
    """The gradient is not finite. Raised on all ranks, before the weights were touched."""


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    samples: Iterable[Any],
    count: int,
    step: int,
    config: TrainConfig,
    team: Team,
) -> dict[str, float]:
    """Add up the gradients of `count` samples, clip, and step. One sample is in memory at a time.

    Returns:
        This replica's mean of what the objective found, and "gradient_norm" before clipping.

    Raises:
        DivergedError: on all ranks, if the norm of the gradient is not finite.
        ValueError: a batch of more samples than `config.batch_per_group`, or an objective without "loss".
    """
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, float] = {}
    seen = 0
    for number, sample in enumerate(samples):
        check_batch(sample, config.batch_per_group)
        seed_sample(config.seed, step, number, team.replica)
        with without_averaging(model, hold=number < count - 1):
            with autocast(config, team):
                found = objective(model, sample)
            loss_of(found).div(count).backward()
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value.item()
        seen += 1
    if seen != count:
        raise ValueError(f"step {step}: the loader's length promised {count} samples, it gave {seen}")
    norm = clip_gradients(list(model.parameters()), config.clip)
    if not math.isfinite(norm):
        raise DivergedError(
            f"step {step}: the norm of the gradient is {norm} (loss {sums['loss'] / count}); the weights are as before "
            "the step. Lower the learning rate, clip, or look at the sample"
        )
    optimizer.step()
    return {name: value / count for name, value in sums.items()} | {"gradient_norm": norm}


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float | None) -> float:
    """Scale all gradients so that their joint 2-norm is at most `largest`; returns the norm before.

    Plain weights hold complete gradients, the same on every rank, so each rank finds the same norm by itself. The norm
    of weights that are DTensors is reduced over their mesh.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if largest is None else largest)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def autocast(config: TrainConfig, team: Team) -> torch.autocast:
    """bfloat16 for the ops that gain by it, if the configuration says so."""
    return torch.autocast(team.device_type, torch.bfloat16, enabled=config.amp == "bf16")


def loss_of(found: Mapping[str, Tensor]) -> Tensor:
    """The entry "loss"."""
    if "loss" not in found:
        raise ValueError(f"the objective returned {sorted(found)}; the entry to minimise must be called 'loss'")
    return found["loss"]


def check_batch(batch: Any, allowed: int) -> None:
    """Raise ValueError if dim 0 of a batch (a tensor, or tensors in a tuple, list or mapping) is larger than allowed.

    Other objects count as one sample, unless they say otherwise in an attribute `batch_size`.
    """
    size = _batch_size(batch)
    if size > allowed:
        raise ValueError(
            f"a batch of {size} samples for one domain group, {allowed} allowed: domain parallelism cuts one large "
            f"sample, and a batch multiplies its memory again. Use batches of {allowed} with accumulate={size} or more "
            f"data-parallel ranks, or set batch_per_group={size} if you mean it"
        )


def _batch_size(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return max((_batch_size(item) for item in batch if isinstance(item, Tensor)), default=1)
    return int(getattr(batch, "batch_size", 1))
