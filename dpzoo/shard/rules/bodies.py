"""Functions that torch itself composes in Python from other functions.

Their own body runs, so that they behave exactly as torch's; every call inside finds its rule. Only the question at the
top of each body, whether some argument overrides the function, is answered with no.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from dpzoo.shard.registry import handler

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def body_of(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` without its check for overrides."""
    assert isinstance(func, types.FunctionType)
    space = {**func.__globals__, **dict.fromkeys(_QUESTIONS, lambda *_: False)}
    body = types.FunctionType(func.__code__, space, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _composed(func: Callable[..., Any]) -> None:
    body = body_of(func)

    @handler(func, name=func.__name__)
    def answer(called: Any, *args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs)


for _func in (
    F.gaussian_nll_loss,
    F.gumbel_softmax,
    F.linear_cross_entropy,
    F.multi_head_attention_forward,
    F.multilabel_soft_margin_loss,
    F.triplet_margin_with_distance_loss,
):
    _composed(_func)
