"""Averaged weights: an exponential moving average of what the optimiser finds, which forecasts are made with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpzoo.parallel.pieces import piece_of


class WeightAverage:
    """The average of a model's parameters over the steps, weighted by `decay` ** (steps ago).

    The average of a weight is cut as the weight is: every rank averages what it holds, whatever the meshes, and nothing
    is communicated. Weights in half precision are averaged in float32, in which small changes are not rounded away.

    Args:
        model: its parameters now are the average at the beginning.
        decay: of the weight of a step, in (0, 1). In the first steps it is `(1 + step) / (10 + step)` if that is less,
            so that the average soon forgets the random weights of the beginning.

    Attributes:
        weights: name of the parameter -> average, which is changed in place.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights: dict[str, Tensor] = {}
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the parameters as they are."""
        self.weights = {name: _wide(p.detach()).clone() for name, p in self._model.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after step `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in self._model.named_parameters():
            average = piece_of(self.weights[name]).local
            average.lerp_(piece_of(parameter.detach()).local.to(average.dtype), 1 - decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights."""
        before = {name: p.detach().clone() for name, p in self._model.named_parameters()}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(before)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])


def _wide(weight: Tensor) -> Tensor:
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight
