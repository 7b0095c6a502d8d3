"""Reshapes above autograd: move borders first where a view would tear a cut dim, then let torch view the shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call, note_gather
from dpzoo.shard.function_door import native
from dpzoo.shard.moved_view import relaid_view
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import normal_dim, normal_dims, whole_values
from dpzoo.shard.rules.view_plan import without_cut
from dpzoo.shard.rules.view_reshape import reshape_source, resolve_size
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor

_SOURCES: dict[tuple[ShardTensorSpec, tuple[int, ...]], tuple[ShardTensorSpec, int]] = {}


def reshape_to(x: Any, size: Sequence[int], op: Any = torch.Tensor.reshape) -> Any:
    """`x` in a new shape, its borders moved first where that is needed."""
    if not isinstance(x, ShardTensor):
        return op(x, size)
    size = tuple(size)
    key = (x._spec, size)
    found = _SOURCES.get(key)
    if found is None:
        if len(_SOURCES) > 16384:
            _SOURCES.clear()
        source = reshape_source(whole_values(x._spec), resolve_size(x.shape, size))
        found = _SOURCES[key] = (source, _gathered_bytes(x._spec, source))
    source, gathered = found
    if gathered:
        note_gather(op, (x, size), {}, gathered)
    return native(op, (ShardTensor,), (x if source is x._spec else relaid_view(x, source), size), {})


def _gathered_bytes(spec: ShardTensorSpec, source: ShardTensorSpec) -> int:
    """The size of a tensor of which an axis cuts less than before; a dim of size 1 is only shared."""
    lost = [
        axis
        for axis, n in enumerate(spec.layout.shape)
        if n > 1 and spec.sizes[axis] and source.cuts[axis] == REPLICATED and sum(spec.sizes[axis]) > 1
    ]
    return spec.shape.numel() * spec.dtype.itemsize if lost else 0


_UNMOVED: set[Any] = set()  # layouts and sizes, as they are given, of calls for which no border has to move


def _reshape_unmoved(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """view and reshape of a kind met before, for which torch may view the shards at once; else `reshape`."""
    if not kwargs and args[0].__class__ is ShardTensor:
        key = (args[0]._spec, args[1:])
        try:
            if key in _UNMOVED:
                return native(func, types, args, kwargs)
        except TypeError:  # a list of sizes, or a symbol of a graph
            return _RESHAPE(func, types, args, kwargs)
        if all(size.__class__ is int for size in args[1:]) and _stays(args[0]._spec, args[1:]):
            if len(_UNMOVED) > 16384:
                _UNMOVED.clear()
            _UNMOVED.add(key)
    return _RESHAPE(func, types, args, kwargs)


def _stays(spec: ShardTensorSpec, size: tuple[int, ...]) -> bool:
    return reshape_source(whole_values(spec), resolve_size(spec.shape, size)) is spec


def _sizes(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else tuple(size)


@handler(torch.Tensor.view, torch.Tensor.reshape, torch.reshape, name="reshape")
def reshape(func: Any, *args: Any, **kwargs: Any) -> Any:
    """view and reshape."""
    x, *size = args or (kwargs.pop("input"),)
    if isinstance(size[0] if size else kwargs.get("dtype"), torch.dtype):
        return native(func, (ShardTensor,), (x, *size), kwargs)
    wanted = _sizes(tuple(size)) if size else tuple(kwargs.get("shape", kwargs.get("size", ())))
    return reshape_to(x, wanted, torch.Tensor.view if func is torch.Tensor.view else torch.Tensor.reshape)


_RESHAPE = FUNCTIONS[torch.Tensor.view]
for _func in (torch.Tensor.view, torch.Tensor.reshape):
    FUNCTIONS[_func] = _reshape_unmoved


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
        input = relaid_view(input, without_cut(whole_values(input._spec), *asked))
    return native(torch.Tensor.squeeze, (ShardTensor,), (input, tuple(asked)), {})


@handler(*spellings("expand", "broadcast_to", "expand_as"), name="expand")
def expand(func: Any, input: Any, *size: Any, **kwargs: Any) -> Any:
    """Repeat dims of size 1 without memory; a cut dim of size 1 is shared first."""
    if getattr(func, "__name__", "") == "expand_as":
        wanted: tuple[int, ...] = tuple((size[0] if size else kwargs["other"]).shape)
    else:
        wanted = _sizes(tuple(size)) if size else tuple(kwargs["size"])
    if isinstance(input, ShardTensor):
        lead = len(wanted) - input.ndim
        grown = [d for d in range(input.ndim) if lead >= 0 and input.shape[d] == 1 and wanted[d + lead] not in (1, -1)]
        input = relaid_view(input, without_cut(whole_values(input._spec), *grown))
    return native(torch.Tensor.expand, (ShardTensor,), (input, wanted), {})


_ATLEAST = ("atleast_1d", "atleast_2d", "atleast_3d")


@handler(*spellings(*_ATLEAST), *(getattr(torch._VF, name) for name in _ATLEAST), name="atleast_nd")  # type: ignore[attr-defined]
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


@handler(*spellings("broadcast_tensors"), name="broadcast_tensors")
def broadcast_tensors(func: Any, *tensors: Any) -> Any:
    """Every tensor expanded to the common shape."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors
    shape = torch.broadcast_shapes(*(t.shape for t in given))
    return tuple(t.expand(shape) for t in given)


@handler(torch.meshgrid, torch._VF.meshgrid, name="meshgrid")  # type: ignore[attr-defined]
def meshgrid(func: Any, *tensors: Any, indexing: str = "ij") -> Any:
    """Coordinates as views of the given vectors."""
    given = list(tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)) else tensors)
    if indexing not in ("ij", "xy") or any(t.ndim > 1 for t in given):
        return gather_call(func, (), tuple(given), {"indexing": indexing})
    order = [1, 0, *range(2, len(given))] if indexing == "xy" and len(given) > 1 else list(range(len(given)))
    shape = [given[i].numel() for i in order]
    return tuple(
        t.reshape([-1 if order[d] == i else 1 for d in range(len(given))]).expand(shape) for i, t in enumerate(given)
    )


@handler(*spellings("diag"), name="diag")
def diag(func: Any, input: Any, diagonal: int = 0, *, out: Any = None) -> Any:
    """The diagonal of a matrix, as a copy; a matrix with a given diagonal is gathered."""
    if out is not None or input.ndim != 2:
        return gather_call(func, (), (input, diagonal), {} if out is None else {"out": out})
    return input.diagonal(diagonal).clone()


@handler(torch.linalg.diagonal, name="linalg.diagonal")
def linalg_diagonal(func: Any, A: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """The diagonal of the last two dims."""
    return A.diagonal(offset, dim1, dim2)


# ---------------------------------------------------------------------- copies of views
_COPIED = (
    "alias", "detach", "diagonal", "expand", "narrow", "permute", "select", "split", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unfold", "unsqueeze", "view", "view_as_complex", "view_as_real",
)  # fmt: skip


def _copy_op(name: str) -> None:
    base = torch.Tensor.view_as if name == "alias" else getattr(torch.Tensor, name, None) or getattr(torch, name)

    @handler(*spellings(f"{name}_copy"), name=f"{name}_copy")
    def answer(func: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            return gather_call(func, (), args, kwargs)
        if not args:
            args = (kwargs.pop("input", kwargs.pop("self", None)),)
        out = base(args[0], args[0]) if name == "alias" else base(*args, **kwargs)
        return out.clone() if isinstance(out, Tensor) else type(out)(part.clone() for part in out)


for _name in _COPIED:
    _copy_op(_name)
