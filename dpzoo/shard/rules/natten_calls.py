"""NATTEN's own functions, called with ShardTensors by a model that knows nothing of them.

`natten.functional.na1d`, `na2d`, `na3d` and `neighborhood_attention_generic` (which NATTEN's modules call) are plain
Python that never asks whether an argument overrides it. So they are wrapped when NATTEN is imported, before or after
this module, and hand a call with a ShardTensor to the handler of their name; every other call goes on unchanged. NATTEN
itself is never imported here.
"""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from dpzoo.ops.neighborhood import neighborhood_attention_with_lse
from dpzoo.shard.errors import MissingShardPatch
from dpzoo.shard.tensor import ShardTensor

_MODULE = "natten.functional"
_RANKS = {"na1d": 1, "na2d": 2, "na3d": 3, "neighborhood_attention_generic": None}
_MARK = "_answers_shard_tensors"


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Any,
    stride: Any = 1,
    dilation: Any = 1,
    is_causal: Any = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Any = None,
    backend: str | None = None,
    q_tile_shape: Any = None,
    kv_tile_shape: Any = None,
    backward_q_tile_shape: Any = None,
    backward_kv_tile_shape: Any = None,
    backward_kv_splits: Any = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
    *,
    ndim: int | None = None,
    name: str = "neighborhood_attention_generic",
) -> Any:
    """A call with NATTEN's parameters; those that choose kernels and tiles do not change the result and are ignored."""
    if additional_keys is not None or additional_values is not None:
        raise MissingShardPatch(
            f"natten.functional.{name}: additional_keys and additional_values are not supported with sharded tensors; "
            "attend to them by scaled_dot_product_attention, or gather with full_tensor() first"
        )
    tensors = (query, key, value)
    if return_lse and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise MissingShardPatch(
            f"natten.functional.{name}: return_lse=True has no gradient with sharded tensors; call it under "
            "torch.no_grad() or on detached tensors, or gather with full_tensor() first"
        )
    ndim = query.ndim - 3 if ndim is None else ndim
    # NATTEN takes a scale of 0 for none given.
    out, lse = neighborhood_attention_with_lse(
        ndim, query, key, value, kernel_size, stride, dilation, is_causal, scale or None
    )
    return (out, lse) if return_lse else out


_SIGNATURE = inspect.signature(_attention)


def _answer(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    return _attention(*args, **kwargs, ndim=_RANKS[name], name=name)


def _register(name: str) -> None:
    def handler(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return _answer(name, args, kwargs)

    ShardTensor.register_named_function_handler(f"{_MODULE}.{name}", handler)


def overridable(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, except that a call with a ShardTensor goes to the handler registered for it."""
    name = func.__name__

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, ShardTensor) for a in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        if is_dynamo_compiling():
            return _answer(name, args, kwargs)
        return ShardTensor.__torch_function__(call, (ShardTensor,), args, kwargs)

    setattr(call, _MARK, True)
    return call


def wrap_functions(module: ModuleType) -> None:
    """Wrap the functions of `natten.functional`, also where other modules of NATTEN already hold them."""
    for name in _RANKS:
        original = getattr(module, name, None)
        if original is None or hasattr(original, _MARK):
            continue
        wrapped = overridable(original)
        for holder in [m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "natten"]:
            if getattr(holder, name, None) is original:
                setattr(holder, name, wrapped)


class _WrapAfterImport(importlib.abc.MetaPathFinder):
    """Finds `natten.functional` as the other finders do, and has it wrapped once it has run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                wrap_functions(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


for _name in _RANKS:
    _register(_name)
if _MODULE in sys.modules:
    wrap_functions(sys.modules[_MODULE])
else:
    sys.meta_path.insert(0, _WrapAfterImport())
