"""Collectives while torch.compile traces: one opaque op that carries the call as text, so that each fits in a graph.

Eager code calls the functions of `collectives.py` as they are. While a graph is traced, tensors are fake; the call then
becomes a node whose result has the shape that the shared sizes tell, and is made when the graph runs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import _TLS as _of_thread
from torch._library.effects import EffectType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from dpzoo.shard.inductor import keep_in_order

_CALLS: dict[str, Callable[..., Tensor]] = {}


def is_tracing() -> bool:
    """Is torch.compile making a graph of what runs now?"""
    return getattr(_of_thread, "tracing_context", None) is not None  # TracingContext.try_get(), at a third of its cost


def make_known(t: Tensor) -> None:
    """Let einops, if it is loaded, see `t` before a graph does.

    It keeps a table of the types it met; one that grows while a graph is made fails the guard of that graph.
    """
    einops = sys.modules.get("einops.einops")
    if einops is not None:
        einops.get_backend(t)


# ---------------------------------------------------------------------- sizes and numbers that a graph leaves open
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBER = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def numbers(call: Any) -> Any:
    """A call with a number for every symbol: plans are made of integers, so the graph is guarded on what they are."""
    return tree_map_only(SYMBOLS, lambda s: _NUMBER[type(s)](s), call)


# ---------------------------------------------------------------------- tensors that are known before the graph runs
def off_the_graph() -> Any:
    """A block whose tensors are real ones, made now, also while a graph is traced."""
    return _disable_current_modes() if is_tracing() else nullcontext()


def constant(t: Tensor) -> Tensor:
    """A real tensor as an operand of a graph; itself in eager code."""
    return torch.ops.aten.lift_fresh_copy(t) if is_tracing() else t


class RandomOps(TorchDispatchMode):
    """Notes the ops inside that draw from torch's generators; of a graph the generators tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note and go on."""
        if torch.Tag.nondeterministic_seeded in op.tags:
            self.seen.append(op)
        return op(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- collectives in a graph
@contextmanager
def kept() -> Iterator[None]:
    """What runs inside is not run again by a checkpoint in the graph: its place in the order of calls is fixed."""
    mode = get_proxy_mode()
    nodes: Any = mode.tracer.graph.nodes if mode is not None else ()
    before = len(nodes)
    yield
    for node in itertools.islice(reversed(nodes), len(nodes) - before):
        node.meta.pop("recompute", None)


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
            keep_in_order()
            bound = signature.bind(t, *args, **kwargs)
            bound.apply_defaults()
            rest = list(bound.args[1:])
            with kept():
                return torch.ops.dpzoo.collective(t, json.dumps([call.__name__, *rest]), list(shape(t, *rest)))

        return either

    return register
