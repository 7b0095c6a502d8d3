"""Process groups by their names."""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import GroupName, ProcessGroup, _resolve_process_group


def group_of(name: str) -> ProcessGroup:
    """The process group with this name."""
    return _resolve_process_group(GroupName(name))


def group_size(name: str) -> int:
    """Number of ranks of the group."""
    return group_of(name).size()


def group_rank(name: str) -> int:
    """This rank's number inside the group."""
    return group_of(name).rank()


def device_of(device_type: str) -> torch.device:
    """This rank's device of a type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
