"""The data-parallel axis is torch's own DistributedDataParallel; the domain axis needs no wrapper at all."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.shard import sync_module_over_mesh
from dpzoo.train.team import Team


def start_equal(model: nn.Module, team: Team) -> nn.Module:
    """Give all ranks the first one's weights, and return the module to train: gradients are averaged over replicas.

    A model whose weights are sharded (`fully_shard`) is left as it is, one that is wrapped already too.

    Raises:
        ValueError: more than one data-parallel axis with replicas.
    """
    sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if team.mesh is None or sharded:
        return model
    sync_module_over_mesh(model, team.mesh)
    axes = [axis for axis in team.data_axes if team.mesh.size(axis) > 1]
    if not axes or isinstance(model, DistributedDataParallel):
        return model
    if len(axes) > 1:
        raise ValueError(
            f"{team.mesh} has {len(axes)} data-parallel axes; make one of them, or wrap the model yourself and pass it"
        )
    return DistributedDataParallel(model, process_group=team.mesh.get_group(axes[0]))


def without_averaging(model: nn.Module, hold: bool) -> AbstractContextManager[Any]:
    """If `hold`, gradients of this pass are added up and averaged with those of a later one."""
    return model.no_sync() if hold and isinstance(model, DistributedDataParallel) else nullcontext()
