"""Where rules live: one table from a function, in all its spellings, to the rule that plans it.

`@rule(*spellings("softmax"))` registers a planning rule: a function with the op's own parameters that returns `Dims`.
`@handler(...)` registers code that composes other ops (differentiable by construction). Both answer
`__torch_function__`.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dpzoo.shard import autocast
from dpzoo.shard.execute import CompiledPlan, compile_plan
from dpzoo.shard.plan import Dims
from dpzoo.shard.tensor import FUNCTIONS, ShardTensor
from dpzoo.shard.tracing import SYMBOLS, numbers

RULE_OF: dict[str, Callable[..., Any]] = {}  # rule name -> its answer, for handlers that end in a planned rule
RULES: dict[str, tuple[Any, ...]] = {}  # rule name -> the functions it answers: the index of what is covered
PLANS: dict[Any, CompiledPlan] = {}
_MAX_PLANS = 16384
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "self": "input"}

_PLACES = (torch, torch.Tensor, F, torch.linalg, torch.special, torch._C._nn, torch.fft, operator)


def spellings(*names: str, inplace: bool = False) -> tuple[Any, ...]:
    """All public functions and methods with one of these names, each once."""
    found: dict[Any, None] = {}
    for name in names:
        for place in _PLACES:
            func = getattr(place, name, None)
            if callable(func) and not isinstance(func, type):
                found.setdefault(func)
    return tuple(found)


def rule(*funcs: Any, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a planning rule for functions; the rule's parameters are those of the op (tensor operands in order)."""

    def register(plan_rule: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(plan_rule)
        RULES[name or plan_rule.__name__] = funcs

        def answer(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return run_rule(plan_rule, signature, func, types, args, kwargs)

        RULE_OF[name or plan_rule.__name__] = answer
        for func in funcs:
            FUNCTIONS[func] = answer
        return plan_rule

    return register


def handler(
    *funcs: Any, name: str | None = None, adopt: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler that gets the call as it was written: `handler(func, *args, **kwargs)`.

    Args:
        adopt: DTensors among the arguments arrive as ShardTensors; not where it matters which tensor it is.
    """

    def register(answer: Callable[..., Any]) -> Callable[..., Any]:
        RULES[name or answer.__name__] = funcs
        respond = autocast.widening(name or answer.__name__, answer)

        def call(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if adopt and (has_strangers(args) or (kwargs and has_strangers(kwargs.values()))):
                args, kwargs = adopted((args, kwargs))
            return respond(func, *args, **kwargs)

        for func in funcs:
            FUNCTIONS[func] = call
        return answer

    return register


# ---------------------------------------------------------------------- DTensors and symbols among the arguments
def has_strangers(values: Iterable[Any]) -> bool:
    """Does a call hold what `adopted` turns into something else?"""
    for v in values:
        kind = v.__class__
        if kind is ShardTensor or kind in _KNOWN:
            continue
        if isinstance(v, _STRANGERS) or (isinstance(v, (list, tuple)) and any(isinstance(t, _STRANGERS) for t in v)):
            return True
    return False


_KNOWN = frozenset((int, float, bool, str, type(None), torch.nn.Parameter, Tensor))
_STRANGERS = (DTensor, *SYMBOLS)


def adopted(call: Any) -> Any:
    """A call with every DTensor as a ShardTensor (no communication) and every symbol of a graph as a number."""
    return tree_map_only(DTensor, ShardTensor.from_dtensor, numbers(call))


class _StrangerFoundError(Exception):
    pass


# ---------------------------------------------------------------------- running a planned rule
def run_rule(
    plan_rule: Callable[..., Any],
    signature: inspect.Signature,
    func: Any,
    types: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> Any:
    """Find or make the plan of this call and execute it; calls a rule declines go to the fallback."""
    tensors: list[Tensor] = []
    try:
        key: Any = (plan_rule, func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else None)
        if (repeats := _repeats(tensors)) is not None:
            key = (key, repeats)
        if autocast.is_on():
            key = (key, autocast.state())
        plan = PLANS.get(key)
    except _StrangerFoundError:
        return run_rule(plan_rule, signature, func, types, *adopted((args, kwargs)))
    except TypeError:  # an argument that cannot be hashed
        key, plan = None, None
    if plan is None:
        plan = _make_plan(plan_rule, signature, func, args, kwargs, tensors)
        if plan is None:
            from dpzoo.shard.fallback import gather_call

            return gather_call(func, types, args, kwargs)
        if key is not None:
            if len(PLANS) >= _MAX_PLANS:
                PLANS.clear()
            PLANS[key] = plan
    return plan.run(tensors, func, args, kwargs)


def _key(args: Iterable[Any], tensors: list[Tensor]) -> Any:
    """A hashable key of the arguments (layouts for tensors), and the tensors in order of appearance."""
    out: list[Any] = []
    for a in args:
        if a is None or a.__class__ is str:
            out.append(a)
        elif isinstance(a, ShardTensor):
            out.append(a._spec)
            tensors.append(a)
        elif isinstance(a, Tensor):
            if isinstance(a, DTensor):
                raise _StrangerFoundError
            out.append((a.shape, a.dtype, a.__class__ is torch.nn.Parameter))
            tensors.append(a)
        elif a.__class__ is tuple or a.__class__ is list:
            out.append((a.__class__, _key(a, tensors)))
        elif a.__class__ is float:
            out.append((float, a.hex()))
        elif a.__class__ is int or a.__class__ is bool:
            out.append((a.__class__, a))
        elif isinstance(a, list):  # of a graph, whose lists are of a class of their own
            out.append((list, _key(a, tensors)))
        elif isinstance(a, SYMBOLS):
            raise _StrangerFoundError
        else:
            out.append((a.__class__, a))
    return tuple(out)


def _make_plan(
    plan_rule: Callable[..., Any],
    signature: inspect.Signature,
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    tensors: list[Tensor],
) -> CompiledPlan | None:
    named = {_ALIASES.get(k, k) if _ALIASES.get(k, k) in signature.parameters else k: v for k, v in kwargs.items()}
    try:
        bound = signature.bind(*args, **named)
    except TypeError:
        return None  # a spelling with parameters the rule does not know
    bound.apply_defaults()
    operands = _tensors_in(bound.arguments.values())
    if not any(isinstance(t, ShardTensor) for t in tensors):
        return None
    dims = plan_rule(*bound.args, **bound.kwargs)
    if dims is None or dims is NotImplemented:
        return None
    order = [next(i for i, t in enumerate(tensors) if t is o) for o in operands]
    assert isinstance(dims, Dims)
    return compile_plan(func, dims, [tensors[i] for i in order], order)


def _repeats(tensors: list[Tensor]) -> tuple[int, ...] | None:
    """Which operands are one and the same tensor: a plan knows its operands by identity, so `x @ x` is not `x @ y`."""
    seen = [id(t) for t in tensors]
    return None if len(set(seen)) == len(seen) else tuple(map(seen.index, seen))


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    out: list[Tensor] = []
    for v in values:
        if isinstance(v, Tensor):
            out.append(v)
        elif isinstance(v, (tuple, list)):
            out.extend(_tensors_in(v))
    return out
