"""What one rank's memory holds, measured in two ways.

`activation_bytes` counts exactly what autograd keeps for backward: the part that domain parallelism shares out.
`PeakMemory` is what the operating system saw, allocator and libraries included: honest, but coarse for a small model.
"""

import resource
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpzoo.demo.data import ForecastPairs


def activation_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Bytes of this rank's tensors that `forward` keeps for backward; storages are counted once, weights not at all."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = local.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(kept.values())


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMemory:
    """Peak resident memory of this process above its level when this object was made.

    The first optimizer step of a process imports a large part of torch, the first read imports zarr. Both happen here
    first, on throwaway objects, so that they count as start-up and not as memory of the run.
    """

    def __init__(self) -> None:
        ForecastPairs([0])[0]
        weight = nn.Parameter(torch.ones(1))
        weight.square().backward()
        torch.optim.AdamW([weight]).step()
        self._start = _peak_bytes()

    def bytes(self) -> int:
        """Bytes above the start level, so far."""
        return _peak_bytes() - self._start
