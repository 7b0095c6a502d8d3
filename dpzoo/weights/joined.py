"""Several sources as one: the shards of a large model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpzoo.weights.source import Slab, WeightSource


class JoinedSource:
    """Names, and the source in which each lies."""

    def __init__(self, homes: Mapping[str, WeightSource], origin: str, config: Mapping[str, Any] | None) -> None:
        self._homes, self.origin, self.config = dict(homes), origin, config

    def names(self) -> tuple[str, ...]:
        return tuple(self._homes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._homes[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._homes[name].dtype(name)

    def sliceable(self, name: str) -> bool:
        return self._homes[name].sliceable(name)

    def read(self, name: str, slab: Slab | None = None) -> Tensor:
        return self._homes[name].read(name, slab)
