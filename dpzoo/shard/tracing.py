"""Collectives while torch.compile traces: one opaque op that carries the call as text, so that each fits in a graph.

Eager code calls the functions of `collectives.py` as they are. While a graph is traced, tensors are fake; the call then
becomes a node whose result has the shape that the shared sizes tell, and is made when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_CALLS: dict[str, Callable[..., Tensor]] = {}


def is_tracing() -> bool:
    """Is torch.compile making a graph of what runs now?"""
    return TracingContext.try_get() is not None


@torch.library.custom_op("dpzoo::collective", mutates_args=())
def _collective(t: Tensor, call: str, shape: Sequence[int]) -> Tensor:
    name, *args = _frozen(json.loads(call))
    out = _CALLS[name](t, *args)
    assert list(out.shape) == list(shape), f"{call} gives {tuple(out.shape)}, the graph was made for {tuple(shape)}"
    shared = out.untyped_storage()._cdata == t.untyped_storage()._cdata  # a node's result has memory of its own
    return out.clone(memory_format=torch.contiguous_format) if shared else out.contiguous()


@_collective.register_fake
def _(t: Tensor, call: str, shape: Sequence[int]) -> Tensor:
    return t.new_empty(shape)


# All ranks must send in the same order, whatever a backend does to a graph that is not quite the same on each of them.
_collective.register_effect(EffectType.ORDERED)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def traceable(shape: Callable[..., Sequence[int]]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Let a collective `call(t, ...)` of plain arguments be traced; `shape(t, ...)` is that of its result."""

    def register(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        signature = inspect.signature(call)
        _CALLS[call.__name__] = call

        @functools.wraps(call)
        def either(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if t.__class__ is Tensor or not isinstance(t, (FakeTensor, FunctionalTensor)):
                return call(t, *args, **kwargs)
            bound = signature.bind(t, *args, **kwargs)
            bound.apply_defaults()
            rest = list(bound.args[1:])
            return torch.ops.dpzoo.collective(t, json.dumps([call.__name__, *rest]), list(shape(t, *rest)))

        return either

    return register
