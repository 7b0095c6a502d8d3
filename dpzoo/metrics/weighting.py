"""Means over points that count differently, and what is asked of the fields that are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Dims = int | Sequence[int] | None
"""Dims of the truth over which a mean is taken; None: all of them."""


def wide(*fields: Tensor) -> list[Tensor]:
    """Fields in one floating dtype, float32 or finer."""
    dtype = torch.float32
    for f in fields:
        dtype = torch.promote_types(dtype, f.dtype)
    return [f.to(dtype) for f in fields]


def weighted_mean(field: Tensor, weights: Tensor | None = None, dims: Dims = None) -> Tensor:
    """``sum(w f) / sum(w)`` over ``dims``; NaN where nothing counts.

    Args:
        weights: At least 0, bool too, broadcast to the field. A point of weight 0 takes no part, also if it is NaN.

    Raises:
        ValueError: weights that do not broadcast to the field.
    """
    over = all_dims(field.ndim, dims)
    if weights is None:
        return field.mean(over) if over else field
    check_weights(field, weights)
    w = weights.to(field.dtype).expand(field.shape)
    total = torch.where(w > 0, field * w, 0.0)
    return total.sum(over) / w.sum(over) if over else total / w


def all_dims(ndim: int, dims: Dims) -> tuple[int, ...]:
    """The dims that ``dims`` stands for, counted from the front."""
    if dims is None:
        return tuple(range(ndim))
    return tuple(d % ndim for d in ([dims] if isinstance(dims, int) else dims))


def check_weights(field: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless ``weights`` broadcasts to the shape of the field."""
    fits = weights.ndim <= field.ndim and all(
        w in (1, n) for w, n in zip(reversed(weights.shape), reversed(field.shape), strict=False)
    )
    if not fits:
        raise ValueError(f"weights {tuple(weights.shape)} do not broadcast to the field {tuple(field.shape)}")


def check_members(forecast: Tensor, truth: Tensor, member_dim: int, least: int, what: str) -> int:
    """The forecast's member dim, counted from the front.

    Raises:
        ValueError: a forecast that is not the truth's shape with a dim of members more, or too few members.
    """
    dim = member_dim % max(forecast.ndim, 1)
    rest = tuple(n for d, n in enumerate(forecast.shape) if d != dim)
    if rest != tuple(truth.shape):
        raise ValueError(
            f"{what}: without its dim {member_dim} of members the forecast {tuple(forecast.shape)} must have the "
            f"truth's shape {tuple(truth.shape)}, it has {rest}"
        )
    if forecast.shape[dim] < least:
        raise ValueError(f"{what} needs {least} members or more, got {forecast.shape[dim]} (dim {member_dim})")
    return dim
