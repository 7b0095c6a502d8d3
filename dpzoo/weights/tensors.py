"""Tensors in memory as a source of weights: a state dict at hand, or a file that can only be read whole."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpzoo.weights.source import Slab


class TensorSource:
    """A mapping of names to tensors, behind the protocol :class:`~dpzoo.weights.source.WeightSource`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], origin: str = "a state dict", config: Mapping[str, Any] | None = None
    ) -> None:
        self._tensors, self.origin, self.config = dict(tensors), origin, config

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def sliceable(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        tensor = self._tensors[name].detach()
        return tensor if slab is None else tensor[slab]
