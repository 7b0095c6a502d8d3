"""Reshapes above autograd: move borders first where a view would tear a cut dim, then let torch view the shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import relayout
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import native
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import normal_dim, normal_dims, whole_values
from dpzoo.shard.rules.views import reshape_source, resolve_size, without_cut
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor

_SOURCES: dict[tuple[ShardTensorSpec, tuple[int, ...]], ShardTensorSpec] = {}


def reshape_to(x: Any, size: Sequence[int], op: Any = torch.Tensor.reshape) -> Any:
    """`x` in a new shape, its borders moved first where that is needed."""
    if not isinstance(x, ShardTensor):
        return op(x, size)
    size = tuple(size)
    key = (x._spec, size)
    source = _SOURCES.get(key)
    if source is None:
        if len(_SOURCES) > 16384:
            _SOURCES.clear()
        source = _SOURCES[key] = reshape_source(whole_values(x._spec), resolve_size(x.shape, size))
    return native(op, (ShardTensor,), (x if source is x._spec else relayout(x, source), size), {})


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else tuple(size)


@handler(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, name="reshape")
def reshape(func: Any, x: Any, *size: Any, **kwargs: Any) -> Any:
    """view and reshape."""
    if isinstance(size[0] if size else kwargs.get("dtype"), torch.dtype):
        return native(func, (ShardTensor,), (x, *size), kwargs)
    wanted = _sizes(size) if size else tuple(kwargs.get("shape", kwargs.get("size", ())))
    return reshape_to(x, wanted, torch.Tensor.view if func is torch.Tensor.view else torch.Tensor.reshape)


@handler(torch.Tensor.view_as, torch.Tensor.reshape_as, name="reshape_as")
def reshape_as(func: Any, x: Any, other: Tensor) -> Any:
    """view_as and reshape_as."""
    return reshape_to(x, other.shape, torch.Tensor.view if func is torch.Tensor.view_as else torch.Tensor.reshape)


@handler(*spellings("flatten", "ravel"), name="flatten")
def flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Merge a run of dims."""
    n = input.ndim
    if n == 0:
        return reshape_to(input, (1,))
    first, last = normal_dim(start_dim, n), normal_dim(end_dim, n)
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if first == last:
        return input
    return reshape_to(input, (*input.shape[:first], math.prod(input.shape[first : last + 1]), *input.shape[last + 1 :]))


@handler(*spellings("unflatten"), name="unflatten")
def unflatten(func: Any, input: Any, dim: Any, sizes: Sequence[int]) -> Any:
    """Split one dim."""
    if not isinstance(dim, int):
        return gather_call(func, (), (input, dim, sizes), {})
    d = normal_dim(dim, input.ndim)
    return reshape_to(input, (*input.shape[:d], *resolve_size((input.shape[d],), tuple(sizes)), *input.shape[d + 1 :]))


@handler(*spellings("squeeze"), name="squeeze")
def squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    """Drop dims of global size 1, wherever their one row lives."""
    asked = [d for d in normal_dims(dim, input.ndim) if input.ndim and input.shape[d] == 1] if dim != () else []
    if isinstance(input, ShardTensor):
        input = relayout(input, without_cut(whole_values(input._spec), *asked))
    return native(torch.Tensor.squeeze, (ShardTensor,), (input, tuple(asked)), {})


@handler(*spellings("expand", "broadcast_to", "expand_as"), name="expand")
def expand(func: Any, input: Any, *size: Any, **kwargs: Any) -> Any:
    """Repeat dims of size 1 without memory; a cut dim of size 1 is shared first."""
    if getattr(func, "__name__", "") == "expand_as":
        wanted: tuple[int, ...] = tuple((size[0] if size else kwargs["other"]).shape)
    else:
        wanted = _sizes(size) if size else tuple(kwargs["size"])
    if isinstance(input, ShardTensor):
        lead = len(wanted) - input.ndim
        grown = [d for d in range(input.ndim) if lead >= 0 and input.shape[d] == 1 and wanted[d + lead] not in (1, -1)]
        input = relayout(input, without_cut(whole_values(input._spec), *grown))
    return native(torch.Tensor.expand, (ShardTensor,), (input, wanted), {})


@handler(*spellings("atleast_1d", "atleast_2d", "atleast_3d"), name="atleast_nd")
def atleast(func: Any, *tensors: Any) -> Any:
    """At least n dims, as torch orders them."""
    n = int(func.__name__[-2])
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    out = []
    for t in given:
        while t.ndim < n:
            t = t.unsqueeze(0) if t.ndim < 2 else t.unsqueeze(-1)
        out.append(t)
    return out[0] if len(given) == 1 and given is tensors else tuple(out)
