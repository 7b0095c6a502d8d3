"""What may be asked of neighborhood attention: arguments per dim, and the errors that NATTEN raises for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def per_dim(name: str, value: Any, ndim: int, least: int = 1) -> list[int]:
    """One int per spatial dim; raises ValueError for anything that is not one, or below `least`."""
    value = 1 if value is None and least == 1 else value
    numbers = [value] * ndim if isinstance(value, int) else list(value) if isinstance(value, Sequence) else []
    if len(numbers) != ndim or not all(isinstance(n, int) and n >= least for n in numbers):
        raise ValueError(
            f"na{ndim}d: {name} must be an int >= {least}, or {ndim} of them (one a spatial dim), got {value!r}"
        )
    return numbers


def causal_per_dim(value: Any, ndim: int) -> list[bool]:
    """One bool per spatial dim; raises ValueError for anything else."""
    value = False if value is None else value
    flags = [value] * ndim if isinstance(value, bool) else list(value) if isinstance(value, Sequence) else []
    if len(flags) != ndim or not all(isinstance(f, bool) for f in flags):
        raise ValueError(f"na{ndim}d: is_causal must be a bool, or {ndim} of them (one a spatial dim), got {value!r}")
    return flags


def check_tensors(ndim: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless queries, keys and values fit each other."""
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == ndim + 3:
        raise ValueError(f"na{ndim}d takes tensors (batch, {ndim} spatial dims, heads, head_dim), got {shapes}")
    if q.shape[: ndim + 1] != k.shape[: ndim + 1] or q.shape[: ndim + 1] != v.shape[: ndim + 1]:
        raise ValueError(f"na{ndim}d: query, key and value must match in batch size and spatial dims, got {shapes}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"na{ndim}d: query and key must match in head_dim, got {shapes}")
    if k.shape[-2] != v.shape[-2] or k.shape[-2] == 0 or q.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"na{ndim}d: key and value need one number of heads that divides that of query, got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"na{ndim}d: query, key and value must have one floating dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"na{ndim}d: tensors are on different devices: {q.device}, {k.device} and {v.device}")


def check_fits(ndim: int, grid: Sequence[int], kernel: list[int], stride: list[int], dilation: list[int]) -> None:
    """Raise ValueError for a window that is larger than the grid, or a stride larger than the window."""
    if any(k * d > n for n, k, d in zip(grid, kernel, dilation, strict=True)):
        raise ValueError(
            f"na{ndim}d: kernel_size {tuple(kernel)} times dilation {tuple(dilation)} must fit into the grid "
            f"{tuple(grid)} along every dim; use a smaller dilation or kernel, or pad the grid"
        )
    if any(s > k for s, k in zip(stride, kernel, strict=True)):
        raise ValueError(
            f"na{ndim}d: stride {tuple(stride)} must not be larger than kernel_size {tuple(kernel)} along any dim"
        )


def check_bias(bias: Tensor | None, q: Tensor, kernel: list[int]) -> None:
    """Raise ValueError unless the table has an entry for every head and relative position."""
    if bias is None:
        return
    expected = (q.shape[-2], *(2 * k - 1 for k in kernel))
    if tuple(bias.shape) != expected or bias.device != q.device or not bias.dtype.is_floating_point:
        raise ValueError(
            f"na{len(kernel)}d: rel_pos_bias for {q.shape[-2]} heads and kernel_size {tuple(kernel)} has shape "
            f"{expected} and the device of query ({q.device}), got {bias.dtype}{tuple(bias.shape)} on {bias.device}"
        )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where it is on, as torch's own attention takes them."""
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    to = torch.get_autocast_dtype(kind)
    return tuple(t.to(to) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors)
