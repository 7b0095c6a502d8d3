"""Weights whose gradients a wrapper averages over the domain as well, so that the sum over it needs no collective.

DDP or FSDP2 over all ranks (data parallel x domain) takes the mean of what the ranks hold. The mean over the domain of
`n * part` is the sum of the n parts, and the mean of a gradient that is whole on every rank is that gradient. So a part
is multiplied by the number of ranks it is a part of, a whole gradient by one, and both may be added together before.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed._composable_state import _module_state_mapping
from torch.utils.weak import WeakTensorKeyDictionary

# weight -> the groups of the domain, by name, and their sizes
_averaged: MutableMapping[Tensor, Mapping[str, int]] = WeakTensorKeyDictionary()
# weight -> what `is_fully_sharded` found
_gathered: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()


def average_later(weights: Iterable[Tensor], groups: Mapping[str, int]) -> None:
    """Promise that what backward adds to the `.grad` of these leaves is averaged over the ranks of all `groups`.

    It counts for what is recorded under `grad_sync("flat")`. A wrapper that averages over more ranks is right as well:
    it takes the mean over the domains.

    Args:
        groups: name and size of the process groups over which parts would be summed otherwise.
    """
    for weight in weights:
        _averaged[weight] = groups


def factor(weight: Tensor, groups: tuple[str, ...]) -> int | None:
    """What to multiply a part by, one of the ranks of `groups`; None if nobody promised to average over all of them."""
    promised = _averaged.get(weight)
    if promised is None or not all(group in promised for group in groups):
        return None
    return prod(promised[group] for group in groups)


def is_fully_sharded(weight: Tensor) -> bool:
    """Is this the gathered form of a weight that FSDP2 manages? It reads the gradient as it arrives, unmarked.

    Asked of the weight alone: which other FSDP2 models are still in memory depends on when garbage is collected, and
    that differs between ranks, which must all decide alike.
    """
    if not _module_state_mapping:
        return False
    known = _gathered.get(weight)
    if known is None:
        states = [state for reference in list(_module_state_mapping.values()) if (state := reference()) is not None]
        groups = (group for state in states for group in _parameter_groups(state))
        known = any(getattr(p, "_unsharded_param", None) is weight for group in groups for p in group.fsdp_params)
        _gathered[weight] = known
    return known


def _parameter_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]
