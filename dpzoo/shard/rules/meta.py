"""Ask torch what an op does with the global shapes: its output shape, or the error it raises, on every rank alike.

A shard may fit where the global tensor does not (or only on some ranks), so a rule asks before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SHAPES: dict[Any, torch.Size] = {}
_MAX_SHAPES = 8192


def output_shape(func: Callable[..., Any], *args: Any) -> torch.Size:
    """Shape of what `func` returns (of its first result) for tensors of these global shapes; raises what torch raises.

    Tensors come one by one among `args`, not in lists.
    """
    try:
        key = (func, torch._C._is_any_autocast_enabled(), *map(_static, args))
        shape = _SHAPES.get(key)
    except TypeError:  # an argument that cannot be hashed: torch will say what is wrong with it
        return _ask(func, args)
    if shape is None:
        if len(_SHAPES) >= _MAX_SHAPES:
            _SHAPES.clear()
        shape = _SHAPES[key] = _ask(func, args)
    return shape


def _static(a: Any) -> Any:
    if isinstance(a, Tensor):
        return tuple(a.shape), a.dtype
    return tuple(a) if isinstance(a, (list, tuple)) else (a.__class__, a)


def _ask(func: Callable[..., Any], args: tuple[Any, ...]) -> torch.Size:
    # Where autocast is on it settles the dtypes itself, and only shapes are asked for here.
    dtype = torch.float32 if torch._C._is_any_autocast_enabled() else None
    with torch.no_grad():
        try:
            return _first(func(*[_without_data(a, dtype) for a in args])).shape
        except Exception:
            pass
        return as_torch(func, *args)


def as_torch(func: Callable[..., Any], *args: Any) -> torch.Size:
    """As `output_shape`, by torch's real kernel: meta kernels check less, and raise errors of their own.

    Zeros of the global shape take the memory of one number; meant for calls that are about to fail.
    """
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _first(func(*[_zeros(a) for a in args])).shape


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def _without_data(a: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(a, Tensor):
        return a
    keep = dtype is None or not a.dtype.is_floating_point
    return torch.empty(a.shape, dtype=a.dtype if keep else dtype, device="meta")


def _zeros(a: Any) -> Any:
    return torch.zeros((), dtype=a.dtype).expand(a.shape) if isinstance(a, Tensor) else a
