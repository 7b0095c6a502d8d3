"""What happens below autograd: aten ops on local tensors, in forward and in torch's own backward formulas.

Every handler here is right for any mix of layouts, since a formula may bring any. Plain tensors that arrive are whole
and the same on all ranks (constants; zeros that a formula makes for an unused output).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dpzoo.shard.diagnose import op_name
from dpzoo.shard.errors import ShardError
from dpzoo.shard.fallback import note_gather, refuse
from dpzoo.shard.function_door import aligned_with, broadcast_labels
from dpzoo.shard.moved_view import counted, wrote
from dpzoo.shard.op_names import NOT_POINTWISE, POINTWISE_NAMES
from dpzoo.shard.plan import AxisChoice, Dims, Operand, choose, layout_of
from dpzoo.shard.spec import ShardTensorSpec, stride_like
from dpzoo.shard.tensor import DISPATCH, ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing, numbers
from dpzoo.shard.transfer import move

aten = torch.ops.aten
Handler = Callable[..., Any]


def on(*ops: Any) -> Callable[[Handler], Handler]:
    """Register `handler(op, *args, **kwargs)` for aten ops."""

    def register(answer: Handler) -> Handler:
        def call(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if is_tracing():
                args, kwargs = numbers((args, kwargs))
            return answer(op, *args, **kwargs)

        for op in ops:
            DISPATCH[op] = call
        return answer

    return register


def classify(op: Any) -> Handler:
    """The handler of an aten op that has none of its own."""
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
    if op._schema.name in ("aten::set_", "aten::resize_"):  # set_ is not seen by the function door
        return refuse
    if is_pointwise(op):
        return _pointwise_inplace if writes else _pointwise
    if op._can_decompose():
        return _decomposed
    return _gathered_write if writes else _gathered


def is_pointwise(op: Any) -> bool:
    """By torch's tag, or, for ops that lack it (many backward formulas do), by the name of the function."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    name = op._schema.name.removeprefix("aten::").removeprefix("special_").removesuffix("_backward").rstrip("_")
    return torch.Tag.pointwise in op.tags or (name in POINTWISE_NAMES and name not in NOT_POINTWISE)


def _decomposed(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that torch composes of others arrives whole in inference mode; otherwise torch takes it apart."""
    return op.decompose(*args, **kwargs)


# ---------------------------------------------------------------------- pointwise
def _pointwise(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    spec, local = None, []
    for a in args:
        if isinstance(a, ShardTensor):
            if spec is None:
                spec = a._spec
            elif a._spec is not spec:
                return _aligned(op, args, kwargs)
            local.append(a._local_tensor)
        elif isinstance(a, Tensor):
            return _aligned(op, args, kwargs)
        else:
            local.append(a)
    if spec is None or spec.is_partial or (kwargs and any(isinstance(v, Tensor) for v in kwargs.values())):
        return _aligned(op, args, kwargs)
    out = op(*local, **kwargs)
    if isinstance(out, Tensor):
        return wrap(out, spec.for_local(out))
    return type(out)(wrap(o, spec.for_local(o)) for o in out)


def _aligned(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    locals_, choices, layout = align(tensors)
    it = iter(locals_)
    args, kwargs = tree_unflatten([next(it) if isinstance(t, Tensor) else t for t in leaves], tree)
    out = op(*args, **kwargs)
    return tree_map_only(Tensor, lambda o: _wrap_choice(o, tuple(range(o.ndim)), choices, layout), out)


def align(tensors: list[Tensor]) -> tuple[list[Tensor], tuple[AxisChoice, ...], Any]:
    """Local tensors of broadcasting operands in one common layout; no autograd."""
    labels, out = broadcast_labels([tuple(t.shape) for t in tensors])
    layout = next(t._spec.layout for t in tensors if isinstance(t, ShardTensor))
    operands = [
        Operand(tuple(t.shape), t.dtype.itemsize, t._spec if isinstance(t, ShardTensor) else None) for t in tensors
    ]
    choices = choose(layout, operands, Dims(labels, (out,), lambda *a: None))
    return (
        [local_in(t, layout, *layout_of(names, choices)) for t, names in zip(tensors, labels, strict=True)],
        choices,
        layout,
    )


def local_in(t: Tensor, layout: Any, cuts: Any, sizes: Any) -> Tensor:
    """The local part of a tensor in a layout; a plain tensor is sliced."""
    if isinstance(t, ShardTensor):
        if (t._spec.cuts, t._spec.sizes) == (cuts, sizes):
            return t._local_tensor
        return move(t._local_tensor, t._spec, t._spec.like(cuts=cuts, sizes=sizes))
    goal = ShardTensorSpec.make(layout, cuts, sizes, t.shape, t.dtype)
    return move(t, goal.replicated(), goal)


def _wrap_choice(local: Tensor, labels: Any, choices: Any, layout: Any) -> ShardTensor:
    cuts, sizes = layout_of(labels, choices)
    return wrap_in(local, layout, cuts, sizes)


_SPECS: dict[Any, ShardTensorSpec] = {}


def spec_in(local: Tensor, layout: Any, cuts: Any, sizes: Any) -> ShardTensorSpec:
    """The spec of the global tensor that these local tensors make up; cached on the local one's shape and strides."""
    key = (layout, cuts, sizes, local.shape, local.stride(), local.dtype)
    spec = _SPECS.get(key)
    if spec is None:
        shape = list(local.shape)
        for axis, cut in enumerate(cuts):
            if isinstance(cut, int) and cut >= 0:
                shape[cut] = sum(sizes[axis])
        spec = ShardTensorSpec.make(layout, cuts, sizes, shape, local.dtype, stride_like(shape, local))
        if len(_SPECS) > 16384:
            _SPECS.clear()
        _SPECS[key] = spec
    return spec


def wrap_in(local: Tensor, layout: Any, cuts: Any, sizes: Any) -> ShardTensor:
    """The global tensor that these local tensors make up."""
    return wrap(local, spec_in(local, layout, tuple(cuts), tuple(sizes)))


def _pointwise_inplace(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The first operand is written in its own layout."""
    target = args[0]
    if "out" in kwargs or not isinstance(target, ShardTensor):
        return _gathered_write(op, types, args, kwargs)
    leaves, tree = tree_flatten((args[1:], kwargs))
    rest, kwargs = tree_unflatten([local_for(t, target) if isinstance(t, Tensor) else t for t in leaves], tree)
    counted(op, target._local_tensor, *rest, **kwargs)
    wrote(target)
    return target


def local_for(t: Tensor, target: ShardTensor) -> Tensor:
    """The part of a broadcasting operand that belongs to the target's shard."""
    cuts, sizes = aligned_with(target._spec, t.shape)
    return local_in(t, target._spec.layout, tuple(cuts), tuple(sizes))


# ---------------------------------------------------------------------- no rule: gather
def _whole(t: Tensor) -> Tensor:
    return move(t._local_tensor, t._spec, t._spec.replicated()) if isinstance(t, ShardTensor) else t


def _gathered(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise ShardError(f"{op_name(op)}: this random op has no rule; its values would differ between ranks")
    leaves, tree = tree_flatten((args, kwargs))
    sharded = [t for t in leaves if isinstance(t, ShardTensor)]
    nbytes = sum(t.numel() * t.dtype.itemsize for t in sharded if not t._spec.is_replicated)
    if nbytes and any(n > 1 for n in sharded[0]._spec.layout.shape):
        note_gather(op, args, kwargs, nbytes)
    layout = sharded[0]._spec.layout
    args, kwargs = tree_unflatten([_whole(t) if isinstance(t, Tensor) else t for t in leaves], tree)
    n = len(layout.shape)
    return tree_map_only(Tensor, lambda o: wrap_in(o, layout, (-1,) * n, ((),) * n), op(*args, **kwargs))


def _gathered_write(op: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that writes into arguments: run it on whole copies, then put this rank's part back."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise ShardError(f"{op_name(op)}: this random in-place op has no rule; its values would differ between ranks")
    written = [
        (kwargs[a.name] if a.name in kwargs else args[i]) if (a.name in kwargs or i < len(args)) else None
        for i, a in enumerate(op._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    if any(isinstance(w, (list, tuple)) for w in written):
        raise ShardError(f"{op_name(op)} writes into lists of tensors and has no rule")
    leaves, tree = tree_flatten((args, kwargs))
    copies = [
        (_whole(t).clone() if any(t is w for w in written) else _whole(t)) if isinstance(t, Tensor) else t
        for t in leaves
    ]
    call_args, call_kwargs = tree_unflatten(copies, tree)
    op(*call_args, **call_kwargs)
    for t, copy in zip(leaves, copies, strict=True):
        if isinstance(t, Tensor) and any(t is w for w in written):
            if copy.shape != t.shape:
                raise ShardError(f"{op_name(op)} would change the shape of a sharded tensor in place")
            if isinstance(t, ShardTensor):
                counted(t._local_tensor.copy_, move(copy, t._spec.replicated(), t._spec))
                wrote(t)
            else:
                t.copy_(copy)
    return written[0] if len(written) == 1 else tuple(written)
