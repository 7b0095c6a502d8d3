"""The state of an optimiser by the names of parameters, which another mesh, with other groups, can take up.

Torch numbers parameters in the order of the groups. Names stay the same when groups are split by mesh, when modules are
wrapped for activation checkpointing or compiled, and when some parameters had no gradient yet and so have no state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and torch's activation checkpointing put into names."""


def plain_name(name: str) -> str:
    """A parameter's name in the model as it was written."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter once, by its plain name; those of the model inside if it is DistributedDataParallel."""
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    return ((plain_name(name), p) for name, p in inside.named_parameters())


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """`{"kind": class, "groups": {number: options and names}, "state": {name: state}}`; tensors are not copied.

    Raises:
        ValueError: a parameter in the optimiser is not one of the model.
    """
    names = {p: name for name, p in named_parameters(model)}
    groups: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        if any(p not in names for p in group["params"]):
            raise ValueError(
                "the optimiser holds a parameter that the model does not have; make the optimiser when the model is "
                "complete (fully_shard replaces parameters)"
            )
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups[str(number)] = options | {"parameters": [names[p] for p in group["params"]]}
        state |= {names[p]: dict(optimizer.state[p]) for p in group["params"] if optimizer.state.get(p)}
    return {"kind": type(optimizer).__name__, "groups": groups, "state": state}


def state_like(parameter: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor to load state into: cut as its parameter is if it has its shape, else whole on every rank."""
    if parameter is None:
        return torch.empty(shape, dtype=dtype)
    if parameter.shape == shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    whole = torch.zeros(shape, dtype=dtype, device=parameter.device if shape else "cpu")
    if shape and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Give the optimiser what `optimizer_state` found; options that were not stored stay as they are.

    Raises:
        ValueError: it is the state of another kind of optimiser.
    """
    kind = type(optimizer).__name__
    if stored["kind"] != kind:
        raise ValueError(f"it holds the state of {stored['kind']}, this run has {kind}")
    names = {p: name for name, p in named_parameters(model)}
    by_name = {name: group for group in stored["groups"].values() for name in group["parameters"]}
    groups, state, number = [], {}, 0
    for group in optimizer.param_groups:
        found = by_name.get(names[group["params"][0]], {}) if group["params"] else {}
        numbers = range(number, number + len(group["params"]))
        options = {key: found.get(key, value) for key, value in group.items() if key != "params"}
        groups.append(options | {"params": list(numbers)})
        for index, p in zip(numbers, group["params"], strict=True):
            if (own := stored.get("state", {}).get(names[p])) is not None:
                state[index] = own
        number += len(numbers)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
