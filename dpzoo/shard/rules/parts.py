"""Small pieces that several rule families share: dims of reductions, and an op that runs on the shards as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as _NoTorchFunction

from dpzoo.shard import collectives as comm
from dpzoo.shard.bridges import from_shard, grad_spec, relayout, to_shard
from dpzoo.shard.dispatch_door import spec_in
from dpzoo.shard.function_door import native
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.partition import Interval, Sizes, own_intervals
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import is_tracing
from dpzoo.shard.transfer import move


def normal_dims(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that a `dim` argument means: None and () are all of them; raises IndexError like torch."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(normal_dim(d, ndim) for d in dims)


def normal_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front; raises IndexError like torch."""
    n = max(ndim, 1)
    if not -n <= dim < n:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})")
    return dim % n


def whole_values(spec: ShardTensorSpec) -> ShardTensorSpec:
    """The layout with partial sums added up."""
    if not spec.is_partial:
        return spec
    return spec.like(cuts=tuple(REPLICATED if isinstance(c, str) else c for c in spec.cuts))


def on_shards(
    x: ShardTensor, op: Callable[[Tensor], Tensor], cuts: Sequence[Cut], sizes: Sequence[Sizes]
) -> ShardTensor:
    """Run `op` on the shard as it is; the result is cut as told. Differentiable."""
    return global_of(op(to_shard(x, whole_values(x._spec))), x._spec, cuts, sizes)


def global_of(local: Tensor, like: ShardTensorSpec, cuts: Sequence[Cut], sizes: Sequence[Sizes]) -> ShardTensor:
    """The global tensor that these local tensors make up, on the mesh of `like`. Differentiable."""
    return from_shard(local, spec_in(local, like.layout, tuple(cuts), tuple(sizes)))


def from_intervals(
    x: ShardTensor,
    dim: int,
    sizes: tuple[int, ...],
    want: Callable[[Interval], Sequence[Interval]],
    finish: Callable[[Tensor], Tensor],
) -> ShardTensor:
    """A result cut along `dim` in `sizes`, of which each rank fetches what it is made of. Differentiable.

    Args:
        want: the input intervals of an output interval, in order.
        finish: makes this rank's shard of the result from what arrived.
    """
    spec = whole_values(x._spec)
    axis = spec.axis_of(dim)
    assert axis is not None
    wanted = tuple(tuple(i for i in want(o) if i[0] < i[1]) if o[0] < o[1] else () for o in own_intervals(sizes))
    local = fetch(to_shard(x, spec), dim, spec.sizes[axis], wanted, spec.layout.groups[axis])
    out_sizes = list(spec.sizes)
    out_sizes[axis] = sizes
    return global_of(finish(local), spec, spec.cuts, out_sizes)


def native_part(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a view op that takes a part of a dim.

    Its gradient formula makes a tensor of zeros and may not know how a cut dim was cut, so `x` restores its own layout.
    """
    out = native(func, (ShardTensor,), (x, *args), kwargs)
    if isinstance(x, ShardTensor) and torch.is_grad_enabled():
        part = out[0] if isinstance(out, (tuple, list)) and out else out
        if part._spec.sizes != x._spec.sizes or func is torch.Tensor.diagonal:
            _restore_gradient_layout(x)
    return out


def _restore_gradient_layout(x: ShardTensor) -> None:
    spec = grad_spec(x._spec)
    with _NoTorchFunction():
        # The id tells a tensor with its hook from a deep copy, which has the attribute but no hook.
        if x.requires_grad and x.__dict__.get("_restored_by_hook") != (id(x), spec):
            x.register_hook(lambda g: relayout(g, spec) if isinstance(g, ShardTensor) else None)
            x.__dict__["_restored_by_hook"] = (id(x), spec)


def layout_without(spec: ShardTensorSpec, dims: Sequence[int], keepdim: bool) -> tuple[list[Cut], list[Sizes]]:
    """Cuts and sizes after `dims` are reduced away."""
    cuts, sizes = [], []
    for cut, size in zip(spec.cuts, spec.sizes, strict=True):
        gone = isinstance(cut, str) or cut == REPLICATED or cut in dims
        cuts.append(REPLICATED if gone else cut if keepdim else cut - sum(d < cut for d in dims))  # type: ignore[operator]
        sizes.append(() if gone else size)
    return cuts, sizes


def cut_axes(spec: ShardTensorSpec, dims: Sequence[int]) -> tuple[int, ...]:
    """Mesh axes of more than one rank that cut one of `dims`."""
    return tuple(
        a for a, c in enumerate(spec.cuts) if isinstance(c, int) and c in dims and c >= 0 and spec.layout.shape[a] > 1
    )


def fill_empty(local: Tensor, dims: Sequence[int], value: Any) -> Tensor:
    """A shard without elements gets one row of `value` along each empty dim in `dims`; the graph stays connected."""
    for d in dims:
        if local.ndim and local.shape[d] == 0:
            row = [*local.shape[:d], 1, *local.shape[d + 1 :]]
            local = torch.cat([local, local.new_full(row, value)], d)
    return local


def lowest(dtype: torch.dtype) -> Any:
    """Smallest value: what the maximum of nothing is."""
    if dtype is torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """Largest value: what the minimum of nothing is."""
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


# ---------------------------------------------------------------------- index values
_NOTHING = (2**62, -(2**62))


def check_index(
    index: Tensor, lowest_valid: int, n: int, look_up: Callable[[Tensor], Any], ignored: int | None = None
) -> None:
    """Raise on all ranks what torch raises for a value below `lowest_valid`, or from `n` on. All ranks call it.

    A plain index is whole on every rank, so each of them can look. Of a cut index each rank sees a part: they agree by
    one reduction of two numbers per mesh axis that cuts it, on CPU only. CUDA checks indices on the device,
    asynchronously; a collective before each lookup would make the host wait for it.

    Args:
        look_up: the op on a stand-in of length `n` and an index of one value; it raises torch's own error.
        ignored: a value that stands for nothing.
    """
    if index.device.type != "cpu" or not index.numel() or is_tracing():
        return
    local, groups = _local_values(index)
    if ignored is not None:
        local = local[local != ignored]
    low, high = (int(v) for v in local.aminmax()) if local.numel() else _NOTHING
    if groups:
        flags = torch.tensor([-low, high])
        for group in groups:
            flags = comm.all_reduce(flags, group, "max")
        low, high = -int(flags[0]), int(flags[1])
    if low != _NOTHING[0] and (low < lowest_valid or high >= n):
        look_up(torch.tensor([low if low < lowest_valid else high], dtype=local.dtype))


def _local_values(index: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """What this rank sees of an index, and the groups that see other parts."""
    if not isinstance(index, ShardTensor):
        return index.detach(), ()
    spec = whole_values(index._spec)
    return move(index._local_tensor, index._spec, spec), spec.layout.groups_over(cut_axes(spec, range(spec.ndim)))
