"""The one executor: bring every operand to where the plan wants it, run the local op, wrap what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.autocast import summands
from dpzoo.shard.bridges import from_shard, plain_to_shard, relayout, to_shard
from dpzoo.shard.local_bridges import sum_over
from dpzoo.shard.plan import Dims, Operand, choose, layout_of
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec, stride_like
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.transfer import move


class _Entry:
    """How one operand reaches the local op."""

    __slots__ = ("index", "move_from", "spec", "sum_axes")

    def __init__(
        self, index: int, spec: ShardTensorSpec, sum_axes: tuple[int, ...], move_from: ShardTensorSpec | None
    ) -> None:
        self.index, self.spec, self.sum_axes, self.move_from = index, spec, sum_axes, move_from

    def fetch(self, t: Tensor, grad: bool) -> Tensor:
        if isinstance(t, ShardTensor):
            if grad and t.requires_grad:
                return to_shard(t, self.spec, self.sum_axes)
            return t._local_tensor if self.move_from is None else move(t._local_tensor, self.move_from, self.spec)
        if grad and t.requires_grad and (self.sum_axes or not self.spec.is_replicated):
            return plain_to_shard(t, self.spec, self.sum_axes)
        return t if self.spec.is_replicated else plain_to_shard(t, self.spec, ())


class _Exit:
    """How one local output becomes a global tensor; its spec is made at the first run and reused."""

    __slots__ = ("cuts", "groups", "home", "layout", "rounded", "sizes", "spec")

    def __init__(self, layout: Any, cuts: Any, sizes: Any, groups: tuple[str, ...], home: Any) -> None:
        self.layout, self.cuts, self.sizes, self.groups, self.home = layout, cuts, sizes, groups, home
        self.spec: ShardTensorSpec | None = None
        self.rounded: torch.dtype | None = None  # of a sum whose summands are wider

    def leave(self, local: Tensor) -> Tensor:
        if self.groups:
            local = self._summed(local)
        spec = self.spec
        if spec is None or spec.dtype is not local.dtype:
            spec = self.spec = self._spec_of(local)
        out = from_shard(local, spec) if local.requires_grad else wrap(local, spec)
        return relayout(out, spec.like(cuts=self.home[0], sizes=self.home[1])) if self.home is not None else out

    def _summed(self, local: Tensor) -> Tensor:
        """Partial sums added up, in float32 for half precision, so that the error does not grow with the ranks."""
        wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
        dtype = self.rounded or local.dtype
        if local.requires_grad:
            return sum_over(wide, self.groups).to(dtype)
        for group in self.groups:
            wide = comm.all_reduce(wide, group)
        return wide.to(dtype)

    def _spec_of(self, local: Tensor) -> ShardTensorSpec:
        shape = list(local.shape)
        for axis, cut in enumerate(self.cuts):
            if cut != REPLICATED:
                shape[cut] = sum(self.sizes[axis])
        return ShardTensorSpec.make(self.layout, self.cuts, self.sizes, shape, local.dtype, stride_like(shape, local))


class CompiledPlan:
    """A planned call: cached on the layouts and static arguments of its operands."""

    __slots__ = ("check", "entries", "exits", "gathered", "local")

    def __init__(self, dims: Dims, entries: list[_Entry], exits: list[_Exit], gathered: int) -> None:
        self.local, self.check = dims.local, dims.check
        if len(exits) == 1 and exits[0].groups:
            self.local, exits[0].rounded = summands(dims.local, [e.spec for e in entries])
        self.entries, self.exits, self.gathered = entries, exits, gathered

    def run(self, tensors: Sequence[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """Execute; `func`, `args` and `kwargs` only serve the report of a gather."""
        if self.gathered:
            from dpzoo.shard.fallback import note_gather

            note_gather(func, args, kwargs, self.gathered)
        if self.check is not None:
            self.check(*[tensors[e.index] for e in self.entries])
        grad = torch.is_grad_enabled()
        out = self.local(*[e.fetch(tensors[e.index], grad) for e in self.entries])
        if isinstance(out, Tensor):
            return self.exits[0].leave(out)
        left = [x.leave(o) for x, o in zip(self.exits, out, strict=True)]
        return type(out)(left) if type(out) in (tuple, list) else type(out)(tuple(left))


def compile_plan(func: Any, dims: Dims, tensors: Sequence[Tensor], order: Sequence[int]) -> CompiledPlan:
    """Solve the dims of a call and prepare everything that can be prepared once."""
    layout = same_mesh(func, tensors)
    specs = [t._spec if isinstance(t, ShardTensor) else None for t in tensors]
    operands = [Operand(tuple(t.shape), t.dtype.itemsize, s) for t, s in zip(tensors, specs, strict=True)]
    choices = choose(layout, operands, dims)
    entries = []
    for i, (t, spec, labels) in enumerate(zip(tensors, specs, dims.operands, strict=True)):
        cuts, sizes = layout_of(labels, choices)
        sum_axes = tuple(
            a for a, c in enumerate(choices) if c.label is not None and cuts[a] == REPLICATED and layout.shape[a] > 1
        )
        target = ShardTensorSpec.make(layout, cuts, sizes, t.shape, t.dtype, spec.stride if spec is not None else None)
        same = spec is not None and (spec.cuts, spec.sizes) == (cuts, sizes)
        entries.append(
            _Entry(order[i], spec if same and spec is not None else target, sum_axes, None if same else spec)
        )
    gathered = sum(
        op.nbytes
        for op, labels in zip(operands, dims.operands, strict=True)
        if any(c.gathers and op.is_cut(a) for a, c in enumerate(choices))
    )
    return CompiledPlan(dims, entries, [_exit(layout, labels, dims, choices) for labels in dims.outputs], gathered)


def _exit(layout: Any, labels: Any, dims: Dims, choices: Any) -> _Exit:
    cuts, sizes = layout_of(labels, choices)
    for axis, c in enumerate(choices):
        assert c.label is None or cuts[axis] != REPLICATED or c.label in dims.sums, (
            f"label {c.label} is lost: declare it whole"
        )
    groups = layout.groups_over(a for a, c in enumerate(choices) if c.label is not None and cuts[a] == REPLICATED)
    home = layout_of(labels, choices, home=True)
    return _Exit(layout, cuts, sizes, groups, home if home != (cuts, sizes) else None)


def same_mesh(func: Any, tensors: Sequence[Tensor]) -> Any:
    """The mesh of the sharded operands, the first's of equal ones; raises `LayoutError` when they differ."""
    layouts = {t._spec.layout: None for t in tensors if isinstance(t, ShardTensor)}
    first = next(iter(layouts))
    if len(layouts) > 1 and not all(layout.equals(first) for layout in layouts):
        from dpzoo.shard.diagnose import op_name, operands_text, where
        from dpzoo.shard.errors import LayoutError

        raise LayoutError(
            f"{op_name(func)}{where()}: operands live on different meshes {list(layouts)} ({operands_text(tensors)}); "
            "bring them onto one mesh, e.g. full_tensor() and scatter_tensor"
        )
    return first
