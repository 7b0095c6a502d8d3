"""An ordinary training run: nothing here knows on how many ranks it is.

`lift` is the one place where domain parallelism enters: it turns the rows that this process has read into the tensor
that the model sees. On one process it is the identity, on several it is `ShardTensor.from_local` (see `run.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.demo.data import GRID, ForecastPairs

Lift = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DemoConfig:
    """The numbers of the demo. `accumulate` samples make one optimizer step; each is a forward of batch one."""

    patch: int = 4
    embed_dim: int = 96
    depth: int = 4
    num_heads: int = 4
    epochs: int = 12
    accumulate: int = 2
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    seed: int = 0
    train_members: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    validation_members: tuple[int, ...] = (8, 9)


def build_model(config: DemoConfig) -> nn.Module:
    """The dense ViT, with weights that depend on `config.seed` alone, so that every rank builds the same."""
    from dpzoo.models import ViT

    torch.manual_seed(config.seed)
    return ViT(
        img_size=GRID,
        patch_size=(config.patch, config.patch),
        in_chans=4,
        out_chans=4,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        head="dense",
    )


def train(
    model: nn.Module,
    pairs: ForecastPairs,
    config: DemoConfig,
    lift: Lift = lambda rows: rows,
    on_sample: Callable[[int, float], None] = lambda epoch, loss: None,
) -> list[float]:
    """Train and return the mean loss of each epoch: mean squared error of the 12-hour change in units of its standard
    deviation, so that persistence scores about 1. `on_sample(epoch, loss)` is called after each sample."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    steps = config.epochs * -(-len(pairs) // config.accumulate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=steps, pct_start=0.2)
    order = torch.Generator().manual_seed(config.seed)
    model.train()
    history = []
    for epoch in range(config.epochs):
        total = 0.0
        for indices in torch.randperm(len(pairs), generator=order).split(config.accumulate):
            for index in indices.tolist():
                state, change = map(lift, pairs[index])
                loss = F.mse_loss(model(state), change)
                (loss / len(indices)).backward()
                total += loss.item()
                on_sample(epoch, loss.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        history.append(total / len(pairs))
    return history


@torch.no_grad()
def evaluate(model: nn.Module, pairs: ForecastPairs, lift: Lift = lambda rows: rows) -> tuple[float, float]:
    """Mean loss of the model and of persistence (no change at all) on `pairs`, in the units of `train`."""
    model.eval()
    forecast, persistence = 0.0, 0.0
    for index in range(len(pairs)):
        state, change = map(lift, pairs[index])
        forecast += F.mse_loss(model(state), change).item()
        persistence += change.square().mean().item()
    return forecast / len(pairs), persistence / len(pairs)
