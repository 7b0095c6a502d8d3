"""What is looked at and set right in a model before it is wrapped."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.shard import ShardError, ShardTensor

FSDP1 = (
    "FSDP1 is not supported: it keeps the weights of a module as views of one flat tensor, so a weight that meets a "
    "ShardTensor is no leaf of its own, and its flat tensors do not compose with tensor subclasses; use "
    "strategy='fsdp' (torch's fully_shard) or 'ddp'"
)


def check_wrappable(model: nn.Module) -> None:
    """Raise `ShardError`, on every rank, for a model that is wrapped already or not there yet."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, FullyShardedDataParallel):
            raise ShardError(f"{where} is wrapped in FullyShardedDataParallel. {FSDP1}")
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise ShardError(f"{where} is wrapped already ({type(module).__name__}): pass the plain model")
    for name, t in _tensors(model):
        if isinstance(t, (DTensor, ShardTensor)):
            raise ShardError(f"{name} is a {type(t).__name__}: pass a model with plain parameters and buffers")
        if t.is_meta:
            raise ShardError(f"{name} is on the meta device: give it a value first, e.g. model.to_empty(device=...)")


def make_contiguous(model: nn.Module, keep_memory_formats: bool) -> None:
    """Give memory of its own, in order, to every parameter and buffer that cannot be wrapped as it lies.

    Parameters stay the same objects.

    Args:
        keep_memory_formats: leave tensors that only have another order of dims, as channels_last; DDP takes them,
            FSDP2 does not.
    """
    for _, t in _tensors(model):
        if not (t.is_contiguous() or (keep_memory_formats and torch.ops.aten.is_non_overlapping_and_dense(t))):
            t.data = t.data.contiguous()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
