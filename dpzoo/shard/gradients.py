"""Gradients of plain tensors (weights): complete on every rank when `backward()` returns.

An op on shards gives each rank its part of a weight's gradient. For a leaf weight the parts are collected in buckets,
summed over the group while backward goes on, and added to `.grad` by an engine callback at the end; so the parts never
mix with what other, unsharded uses of the same weight add to `.grad`. A tensor that was computed from weights (a
modulation, say; plain, or a replicated ShardTensor) and a weight of DDP enter ops by a node that waits, see `lent`:
their parts travel in buckets too.
Where somebody reads the gradient earlier (hooks on the weight, `autograd.grad`, second order, FSDP2) it is summed at
once instead. And where a wrapper averages over the domain as well, a part is only scaled (see `averaging.py`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dpzoo.shard import averaging
from dpzoo.shard.backward_order import late_place
from dpzoo.shard.gradient_buckets import Join, accumulate, sum_over, task_now
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing

__all__ = ["accumulate", "sum_over"]  # and what is defined here
MODES = ("bucket", "eager", "flat")
_mode = "bucket"


class When(IntEnum):
    """When the parts of a weight's gradient become its gradient; zero, and so false, if that is at once."""

    NOW = 0
    LENT = 1  # when the node of `lent` runs, for the weights and tensors that have one
    AT_THE_END = 2
    BY_THE_WRAPPER = 3


@contextmanager
def grad_sync(mode: str) -> Iterator[None]:
    """How weight gradients are summed over the domain; asked while forward runs.

    Args:
        mode: "bucket" (default): asynchronous and coalesced, complete when `backward()` returns. "eager": each one at
            once; use it when something reads `weight.grad` before `backward()` returns and registers no hook on the
            weight. "flat": not at all where a wrapper has promised to average over the domain too, else eager; this is
            what `dpzoo.parallel.parallelize` does.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"grad_sync takes 'bucket', 'eager' or 'flat', got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def flat_sync() -> AbstractContextManager[None]:
    """`grad_sync("flat")` for the forward of a wrapper; a user's "eager" around it stays."""
    return grad_sync("eager" if _mode == "eager" else "flat")


def may_defer() -> When:
    """Asked in forward: until when may the gradients that follow from it stay parts?

    Not beyond their arrival at the weight inside a DDP forward, which reads gradients as they arrive (so does FSDP2,
    whose weights `collect` knows). Not at all when forward runs inside a backward pass (a reentrant checkpoint), where
    nobody can tell whether a wrapper is at work; nor in a graph, which has no end-of-backward callback and outlives its
    mode.
    """
    if _mode == "eager" or torch._C._current_graph_task_id() != -1 or is_tracing():
        return When.NOW
    if _mode == "flat":
        return When.BY_THE_WRAPPER
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        return When.LENT
    return When.AT_THE_END


# ---------------------------------------------------------------------- tensors that somebody waits for
def lent(p: Tensor | None, groups: tuple[str, ...]) -> Tensor | None:
    """An operand that the ranks of `groups` hold alike and get parts of the gradient of, as an op on shards takes it.

    A tensor that was computed from others, and a weight whose gradient DDP reads as it arrives, get a node in between:
    the parts go into a bucket, and the node hands on their sum. It runs late, so that the parts of all tensors of one
    origin (modulations of all blocks, all weights of DDP) are one collective; a mere view of a weight, at which nobody
    looks, waits for the end as a weight does.
    Another view of a tensor that has such a node gets none: its parts are summed at once.
    """
    if p is None or not groups or not p.requires_grad or not torch.is_grad_enabled():
        return p
    node = p.grad_fn
    if node is None:
        if may_defer() is not When.LENT or averaging.is_fully_sharded(p):
            return p
    elif not may_defer() or is_lent_node(node):
        return p
    number = 0 if node is None else late_place(node, p.output_nr)
    return p if number is None else _Lent.apply(p, number)


_RESHAPED = ("ViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2")


class _Lent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, number: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx._set_sequence_nr(number)
        ctx.spec = ctx.view = None
        if isinstance(p, ShardTensor):
            ctx.spec = p._spec
            return wrap(p._local_tensor, p._spec)
        if type(p.grad_fn).__name__ in _RESHAPED:
            ctx.view = p
        return p.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        """What was summed at once, and, of nodes that hand on to one edge the first to run, what waited."""
        if not torch.is_grad_enabled():
            for total in task_now().take(ctx.next_functions[0]):
                if ctx.spec is not None:
                    total = wrap(total, ctx.spec.for_local(total))
                g = total if g is None else g + total
        return g, None


_LENT_NODE: Any = _Lent._backward_cls  # type: ignore[attr-defined]


def is_lent(t: Tensor) -> bool:
    """Whether `lent` made this tensor: its node waits for parts."""
    return is_lent_node(t.grad_fn)


def is_lent_node(node: Any) -> bool:
    """Whether this is the node of such a tensor."""
    return node.__class__ is _LENT_NODE


def collect(
    when: When, node: Any, g: Tensor, groups: tuple[str, ...], join: Join | None = None
) -> tuple[bool, Tensor | None]:
    """Take over the partial gradient `g` of the leaf, or of the lent tensor, behind `node`.

    Args:
        join: how the ranks make one gradient of their parts, if not by a sum.

    Returns:
        Whether that was possible, else `g` must be summed at once; and what the node gets for now.

    Every rank answers alike: the graph, the hooks and the mode are the same on all ranks.
    """
    if not when or torch.is_grad_enabled():
        return False, None
    if is_lent_node(node):
        if torch._C._will_engine_execute_node(node):
            weight = _reshaped_leaf(node.view) if when is When.AT_THE_END else None
            task_now().add(node.next_functions[0] if weight is None else weight, g, groups, join)
        return True, None
    weight = _leaf(node) if when is not When.LENT else None
    if weight is None:
        return False, None
    if when is When.AT_THE_END and averaging.is_fully_sharded(weight):
        return False, None
    scale = averaging.factor(weight, groups) if when is When.BY_THE_WRAPPER else 1
    if scale is None:
        return False, None
    runs = _runs(node)
    if runs is None:
        return False, None
    if not runs:  # backward(inputs=...) does not ask for this weight, nothing to sum
        return True, None
    if when is When.BY_THE_WRAPPER:
        return True, g * scale
    task_now().add(weight, g, groups, join)
    return True, None


def _leaf(node: Any) -> Tensor | None:
    """The weight whose gradient the node accumulates, if nobody looks at it on the way."""
    weight = getattr(node, "variable", None)
    if weight is None or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return weight


def _reshaped_leaf(view: Tensor | None) -> Tensor | None:
    """The weight that `view` is another shape of, if nobody looks at the gradient on the way: it waits till the end."""
    if view is None or view._backward_hooks or view.retains_grad:
        return None
    grad_fn: Any = view.grad_fn
    ((node, _),) = grad_fn.next_functions
    weight = _leaf(node)
    return None if weight is None or averaging.is_fully_sharded(weight) or not _runs(node) else weight


def _runs(node: Any) -> bool | None:
    """Whether this pass runs the node of a leaf; None if autograd.grad was asked for it, which hands it out itself."""
    try:
        runs: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return runs


def weight_grad(ctx: Any, position: int, g: Tensor, groups: tuple[str, ...]) -> Tensor | None:
    """What a Function returns for its plain input at `position`: the complete gradient, None if it is summed later."""
    if not groups:
        return g
    taken, instead = collect(ctx.defer, ctx.next_functions[position][0], g, groups)
    return instead if taken else sum_over(g, groups)


def again(ctx: Any, rule: Any, tensors: tuple[Tensor | None, ...], g: Tensor) -> tuple[Tensor | None, ...]:
    """The backward of a one-node op for second derivatives: run the planned rule again and differentiate through it."""
    used = [t for t, needed in zip(tensors, ctx.needs_input_grad, strict=False) if needed and t is not None]
    with torch.enable_grad():
        out = rule(*tensors)
    found = iter(torch.autograd.grad(out, used, g, create_graph=True))
    return tuple(
        next(found) if needed and t is not None else None
        for t, needed in zip(tensors, ctx.needs_input_grad, strict=False)
    )
