"""Forecasts of events, "the value reaches a threshold", counted against what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpzoo.metrics.weighting import Dims, all_dims, check_weights


@dataclass(frozen=True)
class Contingency:
    """How often an event was forecast and happened; each ``(T, ...)``, T thresholds first.

    Counts of several fields add: ``a + b``. Add them before dividing, for a mean of ratios is another number.
    """

    hits: Tensor
    misses: Tensor
    false_alarms: Tensor
    correct_negatives: Tensor

    def __add__(self, other: Contingency) -> Contingency:
        return Contingency(
            self.hits + other.hits,
            self.misses + other.misses,
            self.false_alarms + other.false_alarms,
            self.correct_negatives + other.correct_negatives,
        )

    @property
    def csi(self) -> Tensor:
        """Critical success index, ``hits / (hits + misses + false alarms)``; NaN if there was no event at all."""
        return self.hits / (self.hits + self.misses + self.false_alarms)

    @property
    def detected(self) -> Tensor:
        """Probability of detection, ``hits / (hits + misses)``."""
        return self.hits / (self.hits + self.misses)

    @property
    def false_alarm_ratio(self) -> Tensor:
        """``false alarms / (hits + false alarms)``."""
        return self.false_alarms / (self.hits + self.false_alarms)

    @property
    def bias(self) -> Tensor:
        """Events forecast over events that happened."""
        return (self.hits + self.false_alarms) / (self.hits + self.misses)


def contingency(
    forecast: Tensor,
    truth: Tensor,
    thresholds: Sequence[float],
    *,
    weights: Tensor | None = None,
    dims: Dims = None,
) -> Contingency:
    """Count hits, misses and false alarms at each threshold; an event is a value >= the threshold.

    Args:
        weights: How much a point counts, broadcast to the fields; bool too. Where it is 0, NaN is harmless; elsewhere
            NaN is no event.
        dims: Dims over which points are counted; all without it.

    Shape: two fields ``(...)`` -> entries of ``(T,)``, followed by what ``dims`` leaves. In float64: a float32 cannot
    count beyond 16 million points.

    Raises:
        ValueError: fields of different shapes, or no threshold.
    """
    check_events(forecast, truth, thresholds, "contingency")
    over = all_dims(truth.ndim, dims)
    ones = torch.ones_like(truth, dtype=torch.float64)
    if weights is not None:
        check_weights(truth, weights)
        ones = ones * weights
    rows = []
    for threshold in thresholds:
        said, seen = forecast >= threshold, truth >= threshold
        quarters = (said & seen, ~said & seen, said & ~seen, ~(said | seen))
        rows.append([(ones * q).sum(over) if over else ones * q for q in quarters])
    return Contingency(*(torch.stack(column) for column in zip(*rows, strict=True)))


def critical_success_index(
    forecast: Tensor,
    truth: Tensor,
    thresholds: Sequence[float],
    *,
    weights: Tensor | None = None,
    dims: Dims = None,
) -> Tensor:
    """CSI at each threshold, from 0 to 1 (perfect), ``(T,)`` and what ``dims`` leaves; see :func:`contingency`."""
    return contingency(forecast, truth, thresholds, weights=weights, dims=dims).csi


def check_events(forecast: Tensor, truth: Tensor, thresholds: Sequence[float], what: str) -> None:
    """Raise ValueError unless two fields can be compared at thresholds."""
    if tuple(forecast.shape) != tuple(truth.shape):
        raise ValueError(
            f"{what}: forecast {tuple(forecast.shape)} and truth {tuple(truth.shape)} differ in shape; take the "
            "members of an ensemble one by one"
        )
    if not thresholds:
        raise ValueError(f"{what}: give one threshold or more")
