"""Weights that hide nothing."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def liven(model: Model, by: float = 0.1) -> Model:
    """Add noise to every weight, so that none of them is a zero or a one that hides a wrong term; the same model.

    On several ranks it adds the same everywhere if the random state is the same everywhere.
    """
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * by)
    return model
