"""One optimiser step, from top to bottom."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpzoo.parallel import GradScaler, clip_grad_norm_, no_sync
from dpzoo.train.config import TrainConfig
from dpzoo.train.seeds import seed_sample
from dpzoo.train.team import Team

Objective = Callable[[nn.Module, Any], Mapping[str, Tensor]]
"""(model, sample) -> 0-d tensors by name: "loss" is minimised, the others are reported."""

SMALLEST_SCALE = 1.0
"""Of a float16 loss: gradients that overflow without any scaling are not a matter of the scale."""


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
    scaler: torch.amp.GradScaler | None = None,
) -> dict[str, float]:
    """Add up the gradients of `count` samples, clip, and step. One sample is in memory at a time.

    Args:
        scaler: of the loss, whose gradients float16 could not hold; see `loss_scaler`.

    Returns:
        This replica's mean of what the objective found, and "gradient_norm" before clipping. With a scaler also
        "loss_scale" and "skipped", 1 for a step that was not made since the gradients overflowed; it has no norm.

    Raises:
        DivergedError: on all ranks, if the norm of the gradient is not finite, with a scaler: whatever the scale.
        ValueError: a batch of more samples than `config.batch_per_group`, or an objective without "loss".
    """
    optimizer.zero_grad(set_to_none=True)
    sums: dict[str, float] = {}
    seen = 0
    for number, sample in enumerate(samples):
        check_batch(sample, config.batch_per_group)
        seed_sample(config.seed, step, number * team.replicas + team.replica)
        with no_sync(model, hold=number < count - 1):
            with autocast(config, team):
                found = objective(model, sample)
            loss = loss_of(found).div(count)
            (loss if scaler is None else scaler.scale(loss)).backward()
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value.item()
        seen += 1
    if seen != count:
        raise ValueError(f"step {step}: the loader's length promised {count} samples, it gave {seen}")
    means = {name: value / count for name, value in sums.items()}
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = float(clip_grad_norm_(model, math.inf if config.clip is None else config.clip))
    if scaler is not None:
        return means | _scaled_step(optimizer, scaler, norm, step)
    if not math.isfinite(norm):
        raise DivergedError(
            f"step {step}: the norm of the gradient is {norm} (loss {means['loss']}); the weights are as before "
            "the step. Lower the learning rate, clip, or look at the sample"
        )
    optimizer.step()
    return means | {"gradient_norm": norm}


def _scaled_step(optimizer: Optimizer, scaler: torch.amp.GradScaler, norm: float, step: int) -> dict[str, float]:
    """Step unless the gradients overflowed; the scale is adapted."""
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    if math.isfinite(norm):
        return {"gradient_norm": norm, "loss_scale": scale, "skipped": 0.0}
    if scale <= SMALLEST_SCALE:
        raise DivergedError(
            f"step {step}: the norm of the gradient is {norm} even with the loss scaled by {scale}; the weights are as "
            "before the step. Lower the learning rate, look at the sample, or use amp='bf16'"
        )
    return {"loss_scale": scale, "skipped": 1.0}


def loss_scaler(config: TrainConfig, team: Team) -> torch.amp.GradScaler | None:
    """What float16 needs, and no other precision: its small gradients would vanish."""
    return GradScaler(team.device_type, mesh=team.mesh) if config.amp == "fp16" else None


def autocast(config: TrainConfig, team: Team) -> torch.autocast:
    """A half precision for the ops that gain by it, if the configuration says so."""
    dtype = torch.float16 if config.amp == "fp16" else torch.bfloat16
    return torch.autocast(team.device_type, dtype, enabled=config.amp is not None)


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
