"""`torch._foreach_*` on lists with ShardTensors: the loop it stands for, so that each element takes its own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import fallback


def foreach(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The handler of every `torch._foreach_*` function."""
    name = func.__name__.removeprefix("_foreach_")
    single = _single(name)
    if single is None:
        return fallback.refuse(func, types, args, kwargs)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    for other in lists[1:]:
        if len(other) != len(lists[0]):
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {len(lists[0])} and {len(other)}"
            )
    out = [
        _call(single, name, [_item(a, i, k) for k, a in enumerate(args)], {k: _item(v, i) for k, v in kwargs.items()})
        for i in range(len(lists[0]))
    ]
    return None if name.endswith("_") else out


def _item(value: Any, i: int, position: int = 0) -> Any:
    """What concerns tensor `i`; a fourth argument that is a vector holds one scalar per tensor."""
    if isinstance(value, Tensor) and position == 3 and value.ndim == 1:
        return value[i].item()
    return value[i] if isinstance(value, (list, tuple)) else value


def _single(name: str) -> Callable[..., Any] | None:
    """The op on one tensor; `maximum` and `minimum` by a scalar or a tensor are clamps."""
    renamed = {
        "norm": torch.linalg.vector_norm,
        "maximum": Tensor.clamp_min,
        "minimum": Tensor.clamp_max,
        "maximum_": Tensor.clamp_min_,
        "minimum_": Tensor.clamp_max_,
    }
    return renamed.get(name) or getattr(Tensor, name, None)


def _call(single: Callable[..., Any], name: str, call: list[Any], keywords: dict[str, Any]) -> Any:
    """One element; scalars that the list op takes by position are keywords of the op on one tensor."""
    base = name.rstrip("_")
    if base in ("addcmul", "addcdiv") and len(call) == 4:
        return single(*call[:3], value=call[3])
    if base in ("add", "sub") and len(call) == 3:
        return single(call[0], call[1], alpha=call[2])
    if base == "pow" and not isinstance(call[0], Tensor):
        return torch.pow(*call)
    return single(*call, **keywords)
