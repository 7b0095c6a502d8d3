"""What torch writes in place in lists of tensors: fused steps of its optimisers, and the unscaling of its GradScaler.

Every element is updated by itself, so each rank runs torch's kernel on what it holds. Only the finding of an inf is
told to the other ranks: a step is skipped by all of them or by none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dpzoo.shard import collectives as comm
from dpzoo.shard.errors import ShardError
from dpzoo.shard.moved_view import wrote
from dpzoo.shard.registry import handler
from dpzoo.shard.tensor import ShardTensor

_FUSED = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("_fused_ada") or name == "_fused_sgd_")


@handler(*_FUSED, name="fused optimizers")
def fused_step(func: Any, *args: Any, **kwargs: Any) -> None:
    """`torch._fused_*_(parameters, gradients, state lists, ...)`."""
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    for row in zip(*lists, strict=True):
        _check_alike(func, [t for t in row if isinstance(t, Tensor) and t.ndim])  # the count of steps has no dim
    _on_locals(func, args, kwargs)


def _check_alike(func: Any, row: Sequence[Tensor]) -> None:
    first = row[0]._spec if isinstance(row[0], ShardTensor) else None
    for t in row:
        spec = t._spec if isinstance(t, ShardTensor) else None
        if (first and (first.cuts, first.sizes)) != (spec and (spec.cuts, spec.sizes)):
            raise ShardError(
                f"{func.__name__}: a parameter of layout {first.describe() if first else 'plain'} has a gradient or "
                f"state of layout {spec.describe() if spec else 'plain'}; redistribute it to that of the parameter"
            )


@handler(torch._amp_foreach_non_finite_check_and_unscale_, name="unscale")
def unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """`torch.amp.GradScaler.unscale_`: `found_inf` becomes 1 on all ranks that share one of the gradients."""
    cut = [t for t in grads if isinstance(t, ShardTensor)]
    if any(t._spec.is_partial for t in cut):
        raise ShardError(
            "a gradient is a sum of parts, of which each may be finite where the sum is not; "
            "use dpzoo.parallel.GradScaler, or redistribute() the gradient first"
        )
    _on_locals(func, (grads, found_inf, inv_scale), {})
    axes = {g: n for t in cut for g, n in zip(t._spec.layout.groups, t._spec.layout.shape, strict=True)}
    for group, size in axes.items():
        if size > 1:
            found_inf.copy_(comm.all_reduce(found_inf, group, "max"))


def _on_locals(func: Any, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        func(*tree_map_only(ShardTensor, lambda t: t._local_tensor, args), **kwargs)
    for t in tree_leaves(args):
        if isinstance(t, ShardTensor):
            torch.autograd.graph.increment_version(t)
            wrote(t)
