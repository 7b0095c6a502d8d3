"""All parts of a dim at once: split, chunk, unbind and relatives.

Autograd's own formulas fill in the gradients of parts that nobody used with zeros of the global size. Here one node
joins what arrives, and what does not is zeros of the shard's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.bridges import as_sharded, grad_spec, relayout, shard_of_grad
from dpzoo.shard.dispatch_door import spec_in
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import native
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import normal_dim
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move

_TYPES = (ShardTensor,)


class _AllParts(torch.autograd.Function):
    """The parts, as views of the input; their gradients are joined along `dim` (stacked where the dim is gone)."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, func: Any, rest: tuple[Any, ...], dim: int) -> tuple[Tensor, ...]:
        parts = tuple(native(func, _TYPES, (x, *rest), {}))
        ctx.spec, ctx.dim, ctx.specs = x._spec, dim, tuple(p._spec for p in parts)
        ctx.join = torch.stack if parts and parts[0].ndim < x.ndim else torch.cat
        ctx.set_materialize_grads(False)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):
            return None, None, None, None
        home = grad_spec(ctx.spec)
        if torch.is_grad_enabled():
            whole = ctx.join([_or_zeros(g, s) for g, s in zip(grads, ctx.specs, strict=True)], ctx.dim)
            return relayout(whole, home), None, None, None
        like = next(g for g in grads if g is not None)
        parts = [_local_or_zeros(g, grad_spec(s), like) for g, s in zip(grads, ctx.specs, strict=True)]
        return _at_home(ctx.join(parts, ctx.dim), ctx, home), None, None, None


def _local_or_zeros(g: Tensor | None, spec: ShardTensorSpec, like: Tensor) -> Tensor:
    if g is None:
        return torch.zeros(spec.local_shape, dtype=spec.dtype, device=like.device)
    return shard_of_grad(g, spec)


def _or_zeros(g: Tensor | None, spec: ShardTensorSpec) -> ShardTensor:
    if g is not None:
        return as_sharded(g, spec)
    spec = grad_spec(spec)
    return wrap(torch.zeros(spec.local_shape, dtype=spec.dtype, device=spec.layout.device_type), spec)


def _at_home(local: Tensor, ctx: Any, home: ShardTensorSpec) -> ShardTensor:
    """Joined local parts in the layout of the input; they lie otherwise only where a cut dim was taken apart."""
    if local.shape == home.local_shape and not (ctx.join is torch.stack and ctx.dim in home.cuts):
        return wrap(local, home.for_local(local))
    cuts, sizes = list(home.cuts), list(home.sizes)
    axis = home.axis_of(ctx.dim)
    if axis is not None:
        cuts[axis], sizes[axis] = -1, ()
    source = spec_in(local, home.layout, tuple(cuts), tuple(sizes))
    return wrap(out := move(local, source, home), home.for_local(out))


def all_parts(func: Any, x: Any, rest: tuple[Any, ...], dim: int) -> tuple[Tensor, ...]:
    """`func(x, *rest)`, a function of torch that returns views of all parts of `dim`; differentiable."""
    if isinstance(x, ShardTensor) and torch.is_grad_enabled() and x.requires_grad:
        return _AllParts.apply(x, func, rest, dim)  # type: ignore[no-any-return]
    return tuple(native(func, _TYPES, (x, *rest), {}))


_RENAMED = {"unsafe_split": "split", "unsafe_chunk": "chunk"}
_SIZES = {  # what says where to cut, in all spellings
    "split": ("split_size", "split_size_or_sections"),
    "split_with_sizes": ("split_sizes",),
    "chunk": ("chunks",),
    "tensor_split": ("indices_or_sections", "sections", "indices"),
    "hsplit": ("sections", "indices"),
    "vsplit": ("sections", "indices"),
    "dsplit": ("sections", "indices"),
}


@handler(*spellings(*_SIZES, *_RENAMED), name="split")
def split(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Parts along a dim are views of the shards."""
    name = _RENAMED.get(func.__name__, func.__name__)
    x, sizes, dim = _arguments(name, args, dict(kwargs))
    if not isinstance(x, Tensor) or sizes is None or isinstance(sizes, Tensor):
        return gather_call(func, (), args, kwargs)
    if name in ("hsplit", "vsplit", "dsplit"):
        d = {"hsplit": int(x.ndim > 1), "vsplit": 0, "dsplit": 2}[name]
        return all_parts(getattr(Tensor, name), x, (sizes,), d)
    if name == "split":
        call = torch._VF.split if isinstance(sizes, int) else torch._VF.split_with_sizes  # type: ignore[attr-defined]
    else:
        call = getattr(Tensor, name)
    return all_parts(call, x, (sizes, dim), normal_dim(dim, x.ndim))


def _arguments(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
    """Tensor, sizes and dim, by position or keyword; None for what is not there."""
    given = list(args)
    x = given.pop(0) if given else next((kwargs[k] for k in ("input", "self", "tensor") if k in kwargs), None)
    sizes = given.pop(0) if given else next((kwargs[k] for k in _SIZES[name] if k in kwargs), None)
    dim = given.pop(0) if given else kwargs.get("dim", kwargs.get("axis", 0))
    return x, sizes, dim


@handler(*spellings("unbind"), name="unbind")
def unbind(func: Any, input: Any, dim: int = 0) -> Any:
    """All rows of a dim."""
    return all_parts(Tensor.unbind, input, (dim,), normal_dim(dim, input.ndim))
