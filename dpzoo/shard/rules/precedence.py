"""Answers that stand before those a function already has, and may leave a call to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dpzoo.shard.function_door import classify
from dpzoo.shard.registry import RULES, adopted, has_strangers
from dpzoo.shard.rules.remote_layout import DeclinedError
from dpzoo.shard.tensor import FUNCTIONS

_NAMES = {"self": "input", "axis": "dim"}


def put_before(
    name: str, funcs: Sequence[Any], answer: Callable[..., Any], when: Callable[..., bool] | None = None
) -> None:
    """Let `answer(*args, **kwargs)` answer calls of `funcs`, unless it raises `DeclinedError`; call it after all rules.

    Calls with parameters that the answer does not have go to the earlier one as well.

    Args:
        when: a quick look at the positional arguments, for functions that are called all the time.
    """
    RULES[name] = tuple(funcs)
    signature = inspect.signature(answer)
    for func in funcs:
        FUNCTIONS[func] = _either(answer, signature, FUNCTIONS.get(func) or classify(func), when)


def _either(
    answer: Callable[..., Any], signature: inspect.Signature, earlier: Callable[..., Any], when: Any
) -> Callable[..., Any]:
    def call(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if when is not None and not when(*args):
            return earlier(func, types, args, kwargs)
        if has_strangers(args) or has_strangers(kwargs.values()):
            args, kwargs = adopted((args, kwargs))
        try:
            bound = signature.bind(*args, **{_NAMES.get(k, k): v for k, v in kwargs.items()})
        except TypeError:
            return earlier(func, types, args, kwargs)
        try:
            return answer(*bound.args, **bound.kwargs)
        except DeclinedError:
            return earlier(func, types, args, kwargs)

    return call
