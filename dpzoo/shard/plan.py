"""From what an op does with its dims to what each rank must do: pure planning, no communication.

A rule names the dims of an op's operands and outputs with labels (as an einsum does) and says which labels may be
cut. The solver then chooses, for one mesh axis after the other, the label that this axis cuts, at the least cost in
bytes; everything else (who fetches what, which gradients are partial sums, how the outputs lie) follows from that.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpzoo.shard.mesh import MeshLayout
from dpzoo.shard.partition import Sizes, even_sizes, moved
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec

Label = int | str
Labels = tuple[Label | None, ...]  # one per dim; None: a dim that is never cut (a broadcast dim of size 1)


@dataclass(frozen=True)
class Dims:
    """What a rule returns.

    Attributes:
        operands: labels of each tensor operand, in the order of the rule's parameters.
        outputs: labels of each output tensor.
        local: computes the local outputs from the local operands.
        whole: labels that each rank must see whole.
        sums: labels that are contracted by a sum; cut, they leave partial sums, which are added at once.
        pin: index of an operand whose layout must not change (the target of an in-place op).
        check: looks at the operands of every call before anything is sent, and raises what torch would raise: for
            values that every rank holds whole, of which the local op would show each rank only a part.
    """

    operands: Sequence[Labels]
    outputs: Sequence[Labels]
    local: Callable[..., Any]
    whole: frozenset[Label] = frozenset()
    sums: frozenset[Label] = frozenset()
    pin: int | None = None
    check: Callable[..., None] | None = None


@dataclass(frozen=True)
class Operand:
    """One tensor argument as the solver sees it; `spec` is None for a plain tensor, held whole by every rank."""

    shape: tuple[int, ...]
    itemsize: int
    spec: ShardTensorSpec | None

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        n = self.itemsize
        for s in self.shape:
            n *= s
        return n

    def cut_label(self, axis: int, labels: Labels) -> Label | None:
        """The label of the dim that `axis` cuts, if any."""
        cut = self.spec.cuts[axis] if self.spec is not None else REPLICATED
        return labels[cut] if isinstance(cut, int) and cut >= 0 else None

    def is_cut(self, axis: int) -> bool:
        """True if `axis` cuts some dim."""
        cut = self.spec.cuts[axis] if self.spec is not None else REPLICATED
        return isinstance(cut, int) and cut >= 0


@dataclass(frozen=True)
class AxisChoice:
    """What one mesh axis cuts while the op runs, and where outputs go back to afterwards."""

    label: Label | None
    sizes: Sizes = ()
    home: Label | None = None
    home_sizes: Sizes = ()
    gathers: bool = False


def choose(layout: MeshLayout, operands: Sequence[Operand], dims: Dims) -> tuple[AxisChoice, ...]:
    """One choice per mesh axis; the same on every rank, since only global sizes decide."""
    taken: set[Label] = set()
    out = []
    for axis in layout.axes:
        choice = _choose_axis(layout, axis, operands, dims, taken)
        if choice.label is not None:
            taken.add(choice.label)
        out.append(choice)
    return tuple(_without_taken_home(c, out) for c in out)


def _without_taken_home(choice: AxisChoice, choices: Sequence[AxisChoice]) -> AxisChoice:
    """An output cannot go back to a dim that another axis cuts; it stays as the op leaves it."""
    others = [c for c in choices if c is not choice]
    if choice.home is None or all(choice.home not in (c.label, c.home) for c in others):
        return choice
    return replace(choice, home=None, home_sizes=())


def _choose_axis(
    layout: MeshLayout, axis: int, operands: Sequence[Operand], dims: Dims, taken: set[Label]
) -> AxisChoice:
    candidates: dict[tuple[Label, Sizes], int] = {}
    considered = range(len(operands)) if dims.pin is None else [dims.pin]
    for i in considered:
        op, label = operands[i], operands[i].cut_label(axis, dims.operands[i])
        if op.spec is not None and label is not None and label not in dims.whole and label not in taken:
            candidates.setdefault((label, op.spec.sizes[axis]), 0)
    if candidates:
        best = min(candidates, key=lambda c: _cost(layout, axis, operands, dims, *c))
        return AxisChoice(*best)
    cut = [i for i, op in enumerate(operands) if op.is_cut(axis)]
    if not cut or dims.pin is not None:
        return AxisChoice(None, gathers=bool(cut))
    main = max(cut, key=lambda i: operands[i].nbytes)
    spec = operands[main].spec
    assert spec is not None
    home, home_sizes = operands[main].cut_label(axis, dims.operands[main]), spec.sizes[axis]
    moved_to = _other_label(layout, axis, operands, dims, taken, main)
    if moved_to is None:
        gathers = any(operands[i].nbytes for i in cut) and layout.shape[axis] > 1
        return AxisChoice(None, (), home, home_sizes, gathers)
    return AxisChoice(*moved_to, home, home_sizes)


def _other_label(
    layout: MeshLayout, axis: int, operands: Sequence[Operand], dims: Dims, taken: set[Label], main: int
) -> tuple[Label, Sizes] | None:
    """Where the cut can go when the cut dim is needed whole: the longest dim that nobody else cuts."""
    reserved = taken | {
        label
        for i, op in enumerate(operands)
        for a in layout.axes
        if (label := op.cut_label(a, dims.operands[i])) is not None
    }
    free = [
        (n, label)
        for n, label in zip(operands[main].shape, dims.operands[main], strict=True)
        if label is not None and label not in dims.whole and label not in reserved and n > 1
    ]
    if not free:
        return None
    n, label = max(free, key=lambda f: f[0])
    return label, even_sizes(n, layout.shape[axis])


def _cost(layout: MeshLayout, axis: int, operands: Sequence[Operand], dims: Dims, label: Label, sizes: Sizes) -> int:
    """Bytes received by all ranks to bring every operand to this cut."""
    n, cost = layout.shape[axis], 0
    for op, labels in zip(operands, dims.operands, strict=True):
        if not op.is_cut(axis):
            continue
        assert op.spec is not None
        if op.cut_label(axis, labels) == label:
            cost += op.nbytes * moved(op.spec.sizes[axis], sizes) // max(1, sum(sizes))
        elif label in labels:
            cost += op.nbytes * (n - 1) // n
        else:
            cost += op.nbytes * (n - 1)
    return cost


def layout_of(
    labels: Labels, choices: Sequence[AxisChoice], home: bool = False
) -> tuple[tuple[int, ...], tuple[Sizes, ...]]:
    """Cuts and sizes of a tensor with these labels under the chosen cuts (or, with `home`, where it goes back to)."""
    cuts, sizes = [], []
    for c in choices:
        label, s = c.label, c.sizes
        if home and c.home is not None and c.home in labels:
            label, s = c.home, c.home_sizes
        if label is not None and label in labels:
            cuts.append(labels.index(label))
            sizes.append(s)
        else:
            cuts.append(REPLICATED)
            sizes.append(())
    return tuple(cuts), tuple(sizes)


def probe(op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run `op` on tensors of the same shapes without data: what torch refuses is refused here, on every rank alike.

    A shard may fit where the global tensor does not (or only on some ranks), so a rule asks before anything is sent.
    Where autocast is on it settles the dtypes itself, and only shapes are asked for here.
    """
    wide = torch.float32 if torch._C._is_any_autocast_enabled() else None

    def empty(t: Tensor) -> Tensor:
        dtype = wide if wide is not None and t.dtype.is_floating_point else t.dtype
        return torch.empty(tuple(t.shape), dtype=dtype, device="meta")

    args, kwargs = tree_map_only(Tensor, empty, (args, kwargs))
    with suppress(NotImplementedError):  # an op without a meta kernel
        op(*args, **kwargs)
