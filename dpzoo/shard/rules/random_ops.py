"""Dropout and random fills on shards; see `dpzoo.shard.random` for where the numbers come from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import random
from dpzoo.shard.fallback import gather_call, refuse
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import whole_values
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap


def _uniform_like(x: ShardTensor, shape: Any = None, dtype: torch.dtype | None = None) -> ShardTensor:
    """Uniform numbers in the layout of `x`; `shape` may set dims to 1 (whole features dropped at once)."""
    spec = whole_values(x._spec)
    if shape is not None and tuple(shape) != tuple(spec.shape):
        cut = [isinstance(c, int) and c >= 0 and shape[c] == 1 for c in spec.cuts]
        spec = spec.like(
            cuts=[REPLICATED if g else c for g, c in zip(cut, spec.cuts, strict=True)],
            sizes=[() if g else s for g, s in zip(cut, spec.sizes, strict=True)],
            shape=shape,
        )
    return wrap(random.uniform(spec, x.device), spec.of_dtype(torch.float64).like(shape=spec.shape))


def _drop(x: ShardTensor, p: float, training: bool, inplace: bool, shape: Any = None) -> Tensor:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0.0:
        return x
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    mask = (_uniform_like(x, shape) >= p).to(x.dtype) * scale
    return x.mul_(mask) if inplace else x * mask


@handler(F.dropout, torch.dropout, name="dropout")
def dropout(
    func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Any:
    """Drop elements: independent between shards, the same on replicas, the same for any number of ranks."""
    return _drop(input, p, training if train is None else train, inplace)


def _feature_dropout(func: Any, spatial: int | None) -> None:
    @handler(func, name=func.__name__)
    def answer(called: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        lead = 2 if spatial is None or input.ndim > spatial + 1 else 1
        return _drop(input, p, training, inplace, [*input.shape[:lead], *[1] * (input.ndim - lead)])


_feature_dropout(F.dropout1d, 1)
_feature_dropout(F.dropout2d, None)
_feature_dropout(F.dropout3d, 3)


@handler(
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.rrelu,
    F.gumbel_softmax,
    torch.multinomial,
    torch.Tensor.multinomial,
    torch.Tensor.exponential_,
    torch.Tensor.cauchy_,
    torch.Tensor.geometric_,
    torch.Tensor.log_normal_,
    torch.poisson,
    torch.binomial,
    name="random ops refused",
)
def refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Random ops whose values would differ between ranks."""
    return refuse(func, (), args, kwargs)


def _like(x: ShardTensor, dtype: torch.dtype | None) -> ShardTensorSpec:
    return whole_values(x._spec).of_dtype(dtype or x.dtype)


def _made(x: ShardTensor, values: Tensor, dtype: torch.dtype | None, requires_grad: bool = False) -> ShardTensor:
    spec = _like(x, dtype)
    local = values.to(spec.dtype)
    return wrap(local, spec.for_local(local), requires_grad)


@handler(*spellings("rand_like"), name="rand_like")
def rand_like(func: Any, input: Any, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> ShardTensor:
    """Uniform numbers in [0, 1)."""
    return _made(input, random.uniform(_like(input, dtype), input.device), dtype, requires_grad)


@handler(*spellings("randn_like"), name="randn_like")
def randn_like(func: Any, input: Any, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> ShardTensor:
    """Standard normal numbers."""
    return _made(input, random.normal(_like(input, dtype), input.device), dtype, requires_grad)


@handler(*spellings("randint_like"), name="randint_like")
def randint_like(
    func: Any, input: Any, *bounds: int, low: int = 0, high: int | None = None, dtype: Any = None, **_: Any
) -> ShardTensor:
    """Integers in [low, high)."""
    if bounds:
        low, high = (
            (bounds[0], bounds[1]) if len(bounds) > 1 else ((low, bounds[0]) if high is None else (bounds[0], high))
        )
    assert high is not None
    return _made(input, random.integers(_like(input, dtype), input.device, low, high), dtype)


@handler(*spellings("bernoulli"), name="bernoulli")
def bernoulli(func: Any, input: Any, p: float | None = None, *, generator: Any = None, out: Any = None) -> Any:
    """0 or 1 with the probability that the input gives (or `p` everywhere)."""
    if out is not None or generator is not None:
        return refuse(func, (), (input,), {})
    return (_uniform_like(input) < (input.detach() if p is None else p)).to(input.dtype)


@handler(
    torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, name="random fills"
)
def fills(func: Any, self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    """In-place random fills."""
    if not isinstance(self, ShardTensor) or generator is not None:
        return (
            gather_call(func, (), (self, *args), kwargs)
            if not isinstance(self, ShardTensor)
            else refuse(func, (), (self,), kwargs)
        )
    return self.copy_(_filled(func.__name__, self, *args, **kwargs))


def _filled(name: str, x: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    spec = whole_values(x._spec)
    if name == "uniform_":
        low, high = (*args, *([0.0, 1.0][len(args) :]))[:2]
        low, high = kwargs.get("from", low), kwargs.get("to", high)
        return _made(x, low + random.uniform(spec, x.device) * (high - low), None)
    if name == "normal_":
        mean, std = (*args, *([0.0, 1.0][len(args) :]))[:2]
        return _made(x, kwargs.get("mean", mean) + random.normal(spec, x.device) * kwargs.get("std", std), None)
    if name == "bernoulli_":
        p = args[0] if args else kwargs.get("p", 0.5)
        return (_uniform_like(x) < p).to(x.dtype)
    limit = (
        2**24
        if x.dtype is torch.float32
        else 2**53
        if x.dtype is torch.float64
        else torch.iinfo(x.dtype).max
        if not x.dtype.is_floating_point
        else 2**8
    )
    low, high = (0, args[0]) if len(args) == 1 else args[:2] if args else (0, limit)
    return _made(x, random.integers(spec, x.device, low, high), None)
