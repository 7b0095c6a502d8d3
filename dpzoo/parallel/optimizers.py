"""torch's optimisers on parameters that are plain, DTensors or ShardTensors, in one list.

The list kernels of torch (`foreach=True`, `fused=True`) take tensors of one kind. `on_shards` lets any elementwise
optimiser step on what each rank holds, which is all plain: every kernel works, on any mix of meshes, and nothing is
communicated. `split_param_groups` leaves the optimiser alone and gives every kind a group of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dpzoo.parallel.pieces import dtensor_like, is_partial, piece_of
from dpzoo.shard import ShardTensor
from dpzoo.shard.moved_view import wrote
from dpzoo.shard.tensor import wrap

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimisers whose update of an element depends on that element's own gradient, weight and state only."""


# ---------------------------------------------------------------------- one group per kind
def split_param_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups for a torch optimiser in which all tensors are of one kind: plain or on one mesh, one device, one dtype.

    Args:
        parameters: what torch's optimisers take: parameters, (name, parameter) pairs, or groups of them as dicts, whose
            options every part keeps.

    Returns:
        The groups, in the order in which their first parameters came.
    """
    given = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    out: list[dict[str, Any]] = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        parts: dict[Any, list[Any]] = {}
        for member in members:
            tensor = member[1] if isinstance(member, tuple) else member
            kind = (isinstance(tensor, ShardTensor), piece_of(tensor).mesh, tensor.device, tensor.dtype)
            parts.setdefault(kind, []).append(member)
        out += [{**group, "params": part} for part in parts.values()]
    return out


# ---------------------------------------------------------------------- steps on local tensors
def on_shards(optimizer: AnyOptimizer, *, elementwise: bool | None = None) -> AnyOptimizer:
    """Let `optimizer.step()` work on the local tensors of parameters, gradients and state; returns the optimiser.

    Between steps parameters and state are what they were (DTensors in state dicts, so that checkpoints do not change).
    Hooks that run inside a step see local tensors.

    Args:
        elementwise: True vouches for an optimiser that is not in `ELEMENTWISE`.

    Raises:
        ValueError: an optimiser that is not known to be elementwise: with statistics of a whole tensor (Adafactor,
            Muon, LAMB and the like) every rank would use those of its own shard, which are wrong.
    """
    if not (isinstance(optimizer, ELEMENTWISE) if elementwise is None else elementwise):
        raise ValueError(
            f"on_shards: {type(optimizer).__name__} is not known to be elementwise. If an update uses statistics of a "
            "whole tensor, each rank would take those of its shard: keep such weights plain (DDP) or let the optimiser "
            "step on DTensors. If every element is updated by itself, pass elementwise=True"
        )
    inner = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:  # it needs the parameters as the model has them
            with torch.enable_grad():
                loss = closure()
        with _local(self):
            inner()
        return loss

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


@contextmanager
def _local(optimizer: Optimizer) -> Iterator[None]:
    """Inside the block the optimiser has local tensors in place of DTensors and ShardTensors."""
    lists = [(group, group["params"]) for group in optimizer.param_groups]
    cut = [p for _, params in lists for p in params if isinstance(p, (DTensor, ShardTensor))]
    gradients = [_local_gradient(p) for p in cut]  # raises before anything is changed
    locals_ = {id(p): piece_of(p).local for p in cut}
    try:
        for p, gradient in zip(cut, gradients, strict=True):
            local = locals_[id(p)]
            local.grad = gradient
            if p in optimizer.state:
                optimizer.state[local] = {k: _unwrapped(v) for k, v in optimizer.state.pop(p).items()}
        for group, params in lists:
            group["params"] = [locals_.get(id(p), p) for p in params]
        yield
    finally:
        for group, params in lists:
            group["params"] = params
        for p in cut:
            _put_back(optimizer, p, locals_[id(p)])


def _local_gradient(p: Tensor) -> Tensor | None:
    g = p.grad
    if g is None:
        return None
    if is_partial(g) or not isinstance(g, type(p)) or g.placements != p.placements:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"on_shards: a parameter of layout {p.placements} has a gradient of layout "  # type: ignore[attr-defined]
            f"{getattr(g, 'placements', 'plain')}; redistribute the gradient to the layout of the parameter first"
        )
    return piece_of(g).local


def _unwrapped(value: Any) -> Any:
    return piece_of(value).local if isinstance(value, (DTensor, ShardTensor)) else value


def _put_back(optimizer: Optimizer, p: Tensor, local: Tensor) -> None:
    """State of the local tensor as state of the parameter: what has its shape has its layout."""
    if local.grad is not None:
        torch.autograd.graph.increment_version(p)
        local.grad = None
        if isinstance(p, ShardTensor):
            wrote(p)
    if local in optimizer.state:
        state = optimizer.state.pop(local)
        optimizer.state[p] = {k: _wrapped(v, p, local) for k, v in state.items()}


def _wrapped(value: Any, p: Tensor, local: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape != local.shape:
        return value
    if isinstance(p, ShardTensor):
        return wrap(value, p._spec.for_local(value))
    assert isinstance(p, DTensor)
    return dtensor_like(value, p)
