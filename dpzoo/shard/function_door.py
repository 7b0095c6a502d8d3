"""What `__torch_function__` does with a function that has no rule of its own: pointwise, native, or the fallback.

*Native* functions go on to C++ autograd and arrive again, op by op, at the dispatch door.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dpzoo.shard import fallback
from dpzoo.shard.bridges import from_shard, plain_to_shard, relayout
from dpzoo.shard.diagnose import op_name
from dpzoo.shard.diagnose import where as where_in
from dpzoo.shard.errors import ShardError
from dpzoo.shard.execute import same_mesh
from dpzoo.shard.op_names import LOCAL_GRADIENT, MAY_ALIAS, NATIVE_NAMES, NOT_POINTWISE, POINTWISE_NAMES, REFUSED
from dpzoo.shard.partition import Sizes
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import run_rule
from dpzoo.shard.spec import REPLICATED, Cut, ShardTensorSpec
from dpzoo.shard.tables import ANSWERED
from dpzoo.shard.tensor import ShardTensor, wrap

native = torch._C._disabled_torch_function_impl


def base_name(func: Any) -> str:
    """`__radd__` -> `radd`, `add_` -> `add`, `_threshold` -> `threshold`, `special_ndtr` -> `ndtr`."""
    name = getattr(func, "__name__", "") or ""
    return name.strip("_").removeprefix("special_")


def is_pointwise(func: Any) -> bool:
    """Every output element depends on the elements at the same (broadcast) place of the operands."""
    name, raw = base_name(func), getattr(func, "__name__", "") or ""
    dunder = raw.startswith("__") or getattr(func, "__module__", "") in ("_operator", "operator")
    if name in NOT_POINTWISE and not (dunder and name == "rand"):
        return False
    if name in POINTWISE_NAMES:
        return True
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, "special_" + name, None)
    if packet is None:
        return False
    ops = [getattr(packet, o) for o in packet.overloads()]
    return any(torch.Tag.pointwise in o.tags for o in ops) and not any(
        torch.Tag.nondeterministic_seeded in o.tags for o in ops
    )


def classify(func: Any) -> Callable[..., Any]:
    """The handler of a function met for the first time."""
    name = getattr(func, "__name__", "") or ""
    if name.startswith("_foreach_"):
        from dpzoo.shard.foreach import foreach

        return foreach
    if is_pointwise(func):
        if fallback.is_inplace(func):
            return pointwise_inplace
        special = {"where": where, "sgn": sgn}.get(base_name(func))
        if special is not None:
            return special
        if base_name(func) in LOCAL_GRADIENT:
            return _aligned
        return pointwise_now if isinstance(func, _COMPILED) and base_name(func) not in MAY_ALIAS else pointwise
    if name in NATIVE_NAMES:
        return native
    if name in REFUSED:
        return fallback.refuse
    return fallback.gather_call


# ---------------------------------------------------------------------- pointwise
def pointwise(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Operands of one layout go straight on; others are aligned first, so that each gradient has its own layout."""
    if kwargs:
        return _pointwise_keywords(func, types, args, kwargs)
    spec = None
    for a in args:
        if isinstance(a, ShardTensor):
            if spec is None:
                spec = a._spec
            elif a._spec is not spec:
                return _aligned(func, types, args, kwargs)
        elif isinstance(a, Tensor):
            return _aligned(func, types, args, kwargs)
    if spec is None or spec.is_partial:
        return _aligned(func, types, args, kwargs)
    return native(func, types, args, kwargs)


def pointwise_now(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`pointwise` of a compiled function whose result is always new: where nothing is recorded, it skips autograd.

    Not where users answer ops: they would not hear of this one.
    """
    if kwargs or ANSWERED:
        return pointwise(func, types, args, kwargs)
    spec, local, recording = None, [], torch.is_grad_enabled()
    for a in args:
        if isinstance(a, ShardTensor):
            if recording and a.requires_grad:
                return pointwise(func, types, args, kwargs)
            if spec is None:
                spec = a._spec
            elif a._spec is not spec:
                return _aligned(func, types, args, kwargs)
            local.append(a._local_tensor)
        elif isinstance(a, Tensor):
            return _aligned(func, types, args, kwargs)
        else:
            local.append(a)
    if spec is None or spec.is_partial:
        return _aligned(func, types, args, kwargs)
    out = func(*local)
    if isinstance(out, Tensor):
        return wrap(out, spec.for_local(out))
    return type(out)(wrap(o, spec.for_local(o)) for o in out)


_COMPILED = (type(Tensor.add), type(torch.add))


def _pointwise_keywords(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(kwargs.get("out"), Tensor):
        return fallback.into_out(pointwise, func, types, args, kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    spec: Any = getattr(tensors[0], "_spec", None)
    alike = isinstance(spec, ShardTensorSpec) and all(isinstance(t, ShardTensor) and t._spec is spec for t in tensors)
    if kwargs.get("inplace") and args and isinstance(args[0], ShardTensor):
        return native(func, types, args, kwargs) if alike else pointwise_inplace(func, types, args, kwargs)
    return native(func, types, args, kwargs) if alike and not spec.is_partial else _aligned(func, types, args, kwargs)


def where(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`torch.where`: a choice between two tensors, or, of a condition alone, the indices at which it holds."""
    return (pointwise if len(args) + len(kwargs) > 1 else fallback.gather_call)(func, types, args, kwargs)


def sgn(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Of real numbers the sign, whose gradient is zeros that are stored (torch's sgn has zeros that are not)."""
    first = args[0] if args else kwargs["input"]
    return _aligned(func, types, args, kwargs) if first.is_complex() else pointwise(torch.sign, types, args, kwargs)


def _aligned(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    plan_rule = _BROADCAST.get(func)
    if plan_rule is None:
        plan_rule = _BROADCAST[func] = _BroadcastRule(func)
    return run_rule(plan_rule, _ANY_SIGNATURE, func, types, args, kwargs)


def broadcast_labels(shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int | None, ...]], tuple[int | None, ...]]:
    """Labels of operands that broadcast together (right-aligned), and of the result."""
    out = torch.broadcast_shapes(*shapes)
    n = len(out)
    labels = [
        tuple(
            (n - len(s) + i) if size == out[n - len(s) + i] and not (size == 1 and out[n - len(s) + i] != 1) else None
            for i, size in enumerate(s)
        )
        for s in shapes
    ]
    return labels, tuple(range(n))


class _AnySignature(inspect.Signature):
    """Binds everything by position: the rule sees the call as it was written."""

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return _Bound(args, kwargs)


class _Bound:
    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}

    def apply_defaults(self) -> None:
        pass


class _BroadcastRule:
    """The rule of every pointwise function: broadcast dims, the function itself as the local op."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Dims | None:
        values = [*args, *kwargs.values()]
        slots = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        if any(isinstance(v, (list, tuple)) and any(isinstance(x, Tensor) for x in v) for v in values):
            return None
        operands, out = broadcast_labels([tuple(values[i].shape) for i in slots])
        func, n, names = self.func, len(args), tuple(kwargs)
        template = [None if i in slots else v for i, v in enumerate(values)]
        outputs = (out, out) if base_name(func) == "frexp" else (out,)

        def local(*tensors: Tensor) -> Any:
            call = list(template)
            for slot, t in zip(slots, tensors, strict=True):
                call[slot] = t
            return func(*call[:n], **dict(zip(names, call[n:], strict=True)))

        return Dims(operands, outputs, local)


_ANY_SIGNATURE = _AnySignature()
_BROADCAST: dict[Any, _BroadcastRule] = {}


def pointwise_inplace(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The target keeps its layout; the other operands come to it."""
    target = args[0] if args else kwargs.get("input")
    if isinstance(target, DTensor):
        return _into_dtensor(func, types, target, args, kwargs)
    if not isinstance(target, ShardTensor):  # a plain target: it takes whole values
        whole = [fallback.whole(a) for a in args]
        try:
            return func(*whole, **{k: fallback.whole(v) for k, v in kwargs.items()})
        except TypeError as error:  # of `plain += sharded`, Python would make `plain = plain + sharded`
            raise ShardError(f"{op_name(func)}{where_in()}: {error}") from error
    if target._spec.is_partial:
        raise ShardError(
            f"{op_name(func)}{where_in()} on the partial value {target._spec.describe()}: redistribute it to "
            "Replicate or Shard first"
        )
    others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    if base_name(func) in LOCAL_GRADIENT and any(t.requires_grad for t in (target, *others)):
        return target.copy_(getattr(Tensor, base_name(func))(target.clone(), *args[1:], **kwargs))
    _check_fits(func, target, others)
    rest = [_to_layout_of(a, target, func) for a in args[1:]]
    return native(func, types, (target, *rest), {k: _to_layout_of(v, target, func) for k, v in kwargs.items()})


def _into_dtensor(func: Any, types: Any, target: DTensor, args: Any, kwargs: dict[str, Any]) -> DTensor:
    """The same memory is written as that of a ShardTensor."""
    if target.requires_grad and torch.is_grad_enabled():
        raise ShardError(
            f"{op_name(func)}{where_in()} into a DTensor that needs a gradient: the other operand is a ShardTensor. "
            "Use the op that makes a new tensor, or run it under no_grad"
        )
    same: Any = target.detach()
    view = ShardTensor.from_dtensor(same)
    pointwise_inplace(func, types, (view, *args[1:]), {k: v for k, v in kwargs.items() if k != "input"})
    return target


def _check_fits(func: Any, target: ShardTensor, others: list[Tensor]) -> None:
    """An in-place op does not grow its target; raised here, since on an empty shard the local op may not notice."""
    shape = torch.broadcast_shapes(target.shape, *(t.shape for t in others))
    if shape != target.shape:
        raise RuntimeError(
            f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(shape)} ({op_name(func)})"
        )


def _to_layout_of(a: Any, target: ShardTensor, func: Any) -> Any:
    """An operand of an in-place op, brought to the cuts of the target where it has the cut dim."""
    if not isinstance(a, Tensor):
        return a
    if isinstance(a, DTensor):
        a = ShardTensor.from_dtensor(a)
    cuts, sizes = aligned_with(target._spec, a.shape)
    if isinstance(a, ShardTensor):
        same_mesh(func, (target, a))
        return relayout(a, a._spec.like(cuts=cuts, sizes=sizes))
    goal = ShardTensorSpec.make(target._spec.layout, cuts, sizes, a.shape, a.dtype)
    local = plain_to_shard(a, goal, ())  # a global value like any other: its gradient arrives whole, not as summands
    return from_shard(local, goal.for_local(local))


def aligned_with(spec: ShardTensorSpec, shape: Sequence[int]) -> tuple[list[Cut], list[Sizes]]:
    """Cuts and sizes of an operand of `shape` that broadcasts against a tensor of `spec`, shard by shard."""
    shift = spec.ndim - len(shape)
    cuts: list[Cut] = []
    sizes: list[Sizes] = []
    for cut, cut_sizes in zip(spec.cuts, spec.sizes, strict=True):
        dim = cut - shift if isinstance(cut, int) and cut >= 0 else REPLICATED
        fits = dim >= 0 and shape[dim] == spec.shape[dim + shift]
        cuts.append(dim if fits else REPLICATED)
        sizes.append(cut_sizes if fits else ())
    return cuts, sizes
