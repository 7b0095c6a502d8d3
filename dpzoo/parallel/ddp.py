"""DDP over the data-parallel axis, or over it and the domain at once."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpzoo.parallel.axes import Axes, flat
from dpzoo.shard.averaging import average_later
from dpzoo.shard.gradients import flat_sync


class FlatDataParallel(DistributedDataParallel):
    """torch's DDP over all ranks (data parallel x domain), as the only reduction of gradients.

    Its module gives it `n` times this rank's part where a gradient is a sum over n ranks of the domain; the mean over
    all ranks is then the sum over the domain and the mean over the replicas.
    """

    def __init__(self, module: nn.Module, axes: Axes, **options: Any) -> None:
        super().__init__(module, process_group=axes.all_ranks().get_group(), **options)
        ignored = self.parameters_to_ignore
        average_later((p for n, p in module.named_parameters() if n not in ignored), axes.domain_groups)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The forward of the module; see `DistributedDataParallel.forward`."""
        with flat_sync():
            return super().forward(*inputs, **kwargs)


def wrap_ddp(model: nn.Module, axes: Axes, reduction: str, options: dict[str, Any]) -> nn.Module:
    """The model in DDP; itself where there are no replicas, since the domain needs no wrapper."""
    if axes.ddp is None or axes.replicas == 1:
        return model
    options = {"init_sync": False} | options
    if reduction == "flat" and axes.domain is not None:
        return FlatDataParallel(model, axes, **options)
    return DistributedDataParallel(model, process_group=flat(axes.ddp).get_group(), **options)
