"""From the model and the optimiser that a user wrote to those that a mesh trains with."""

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dpzoo.parallel import parallelize
from dpzoo.train.config import TrainConfig
from dpzoo.train.team import Team

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def prepare_model(model: nn.Module, config: TrainConfig, team: Team) -> nn.Module:
    """Compile as configured, give all ranks the first one's weights, and return the module to train.

    A model that is wrapped already, or whose weights are sharded, is left to who did it.
    """
    if config.compile:
        model.compile(**({} if config.compile is True else {"backend": config.compile}))
    wrapped = isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in model.parameters())
    if team.mesh is None or wrapped:
        return model
    names = team.mesh.mesh_dim_names
    if names is None:
        return parallelize(model, team.mesh, strategy=config.parallel)
    data = tuple(names[axis] for axis in team.data_axes)
    domain = tuple(name for name in names if name not in data)
    return parallelize(model, team.mesh, strategy=config.parallel, ddp_axis=data, domain_axis=domain)


def prepare_optimizer(model: nn.Module, optimizer: Optimizer | MakeOptimizer) -> Optimizer:
    """The optimiser of a prepared model.

    Raises:
        ValueError: it was made of parameters that the model no longer has.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer(model.parameters())
    ours = set(model.parameters())
    if any(p not in ours for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimiser holds parameters that the model does not have: with parallel='fsdp' they are replaced by "
            "sharded ones. Pass a function that makes the optimiser: fit(model, lambda weights: AdamW(weights), ...)"
        )
    return optimizer


def reshard(model: nn.Module) -> None:
    """Let go of whole weights that FSDP2 keeps after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
