"""What answers a call: the tables behind the two doors, and how a function that is met for the first time gets in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Filled by registry.py and the rules; kept here so that the doors are one dict lookup away.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
DISPATCH: dict[Any, Callable[..., Any]] = {}
NAMED: dict[str, Callable[..., Any]] = {}
ANSWERED: dict[str, Callable[..., Any]] = {}  # aten ops that users answer, by name


def _spellings_of(func: Any) -> tuple[Any, ...]:
    """What torch may hand to `__torch_function__` when `func` is called."""
    if isinstance(func, torch.library.CustomOpDef):
        func = func._opoverload.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return (func, *(getattr(func, name) for name in func.overloads()))
    return (func,)


def names_of(func: Any) -> tuple[str, ...]:
    """The names under which `register_named_function_handler` finds a function or an op."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if isinstance(func, torch._ops.OpOverload):
        name = func._schema.name
        return (name, name.replace("::", "."), f"{name}.{func._overloadname}", str(func))
    qualname = getattr(func, "__qualname__", getattr(func, "__name__", ""))
    return (f"{getattr(func, '__module__', None)}.{qualname}", str(func))


def _of_user(handler: Callable[..., Any]) -> Callable[..., Any]:
    from dpzoo.shard.from_local import unchecked

    return unchecked(handler)


def resolve(func: Any) -> Callable[..., Any]:
    """First call of `func`: find its handler (by name, by family, or the fallback) and remember it."""
    from dpzoo.shard import function_door

    named = next((NAMED[n] for n in names_of(func) if n in NAMED), None)
    handler = named or function_door.classify(func)
    if handler is function_door.fallback.gather_call and _known_below(func):
        handler = function_door.native
    FUNCTIONS[func] = handler
    return handler


def _known_below(op: Any) -> bool:
    """Is this an aten op that only the door below autograd knows? Modes that count ops call those from Python."""
    from dpzoo.shard import dispatch_door

    return isinstance(op, torch._ops.OpOverload) and (op in DISPATCH or dispatch_door.is_pointwise(op))


def resolve_op(op: Any) -> Callable[..., Any]:
    """First arrival of an aten op below autograd: find its handler and remember it."""
    from dpzoo.shard import dispatch_door

    named = next((NAMED[n] for n in names_of(op) if n in NAMED), None)
    handler = named or dispatch_door.classify(op)
    DISPATCH[op] = handler
    return handler


class Registering:
    """The part of ShardTensor that lets users add handlers."""

    __slots__ = ()

    @staticmethod
    def register_function_handler(func: Callable[..., Any], handler: Callable[..., Any]) -> None:
        """Let `handler(func, types, args, kwargs)` answer calls of `func`; it wins over built-in rules.

        A custom op may be given as what `torch.library.custom_op` returns or as `torch.ops.namespace.op`.
        """
        handler = _of_user(handler)
        for spelling in _spellings_of(func):
            FUNCTIONS[spelling] = handler

    @staticmethod
    def register_dispatch_handler(op: Any, handler: Callable[..., Any]) -> None:
        """Let `handler(op, types, args, kwargs)` answer an aten op below autograd; it wins over built-in rules."""
        DISPATCH[op] = ANSWERED[str(op)] = _of_user(handler)

    @staticmethod
    def register_named_function_handler(name: str, handler: Callable[..., Any]) -> None:
        """As `register_function_handler`, for a function named by "module.qualname" or an op named "namespace::op"."""
        NAMED[name] = handler = _of_user(handler)
        if name.startswith("aten"):
            ANSWERED[name] = handler
        for table in (FUNCTIONS, DISPATCH):
            for func in [f for f in table if name in names_of(f)]:
                table[func] = handler
