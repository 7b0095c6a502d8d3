"""Dropout and random fills on shards; see `dpzoo.shard.random` for where the numbers come from.

Ops that have no rule for their numbers run on gathered tensors with one seed on all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init
from torch.utils._pytree import tree_leaves

from dpzoo.shard import random
from dpzoo.shard.diagnose import op_name, where
from dpzoo.shard.errors import MissingShardPatch
from dpzoo.shard.fallback import gather_call, refuse
from dpzoo.shard.registry import handler, spellings
from dpzoo.shard.rules.parts import whole_values
from dpzoo.shard.spec import REPLICATED, ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor, wrap
from dpzoo.shard.tracing import is_tracing


def _no_generator(func: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise MissingShardPatch(
            f"{op_name(func)}{where()}: a generator= may be in another state on every rank, so that replicas would "
            "differ; leave it out and call dpzoo.shard.manual_seed(seed), which does not depend on the number of ranks"
        )


# ---------------------------------------------------------------------- dropout
def _kept(x: ShardTensor, p: float, features: bool) -> ShardTensor:
    """Where `x` survives; with `features` one decision for all that follows the first two dims."""
    spec = whole_values(x._spec)
    if features and spec.ndim > 2:
        shape = (*spec.shape[:2], *[1] * (spec.ndim - 2))
        whole = [isinstance(c, int) and c >= 2 for c in spec.cuts]
        spec = spec.like(
            cuts=[REPLICATED if w else c for w, c in zip(whole, spec.cuts, strict=True)],
            sizes=[() if w else s for w, s in zip(whole, spec.sizes, strict=True)],
            shape=shape,
        )
    spec = spec.of_dtype(torch.bool).like(shape=spec.shape)
    return wrap(random.chance(spec, x.device, 1.0 - p), spec)


def _check_p(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _drop(x: ShardTensor, p: float, training: bool, inplace: bool, features: bool = False) -> Tensor:
    _check_p(p)
    if not training or p == 0.0:
        return x
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    mask = _kept(x, p, features).to(x.dtype) * scale
    return x.mul_(mask) if inplace else x * mask


@handler(F.dropout, name="dropout")
def dropout(func: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop elements: independent between shards, the same on replicas, the same for any number of ranks."""
    return _drop(input, p, training, inplace)


@handler(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_, name="torch.dropout")
def torch_dropout(func: Any, input: Any, p: float, train: bool) -> Any:
    """The functions under `F.dropout` and `F.dropout2d`."""
    torch.dropout(torch.empty(0), p, train)  # torch's own error for a p out of range
    return _drop(input, p, train, func.__name__.endswith("_"), func.__name__.startswith("feature"))


def _feature_dropout(func: Any, unbatched: int | None) -> None:
    """Dropout of whole channels; an input of `unbatched` dims has no batch dim."""

    @handler(func, name=func.__name__)
    def answer(called: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if input.ndim != unbatched:
            return _drop(input, p, training, inplace, features=True)
        return _drop(input.unsqueeze(0), p, training, inplace, features=True).squeeze(0)


_feature_dropout(F.dropout1d, 2)
_feature_dropout(F.dropout2d, None)
_feature_dropout(F.dropout3d, 4)

_ALPHA = 1.7580993408473766  # lambda * alpha of SELU (Klambauer et al. 2017, arXiv:1706.02515)


def _alpha_dropout(func: Any, features: bool) -> None:
    @handler(func, name=func.__name__)
    def answer(called: Any, input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        _check_p(p)
        if not training or p == 0.0:
            return input
        a = 0.0 if p == 1.0 else 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
        kept = _kept(input, p, features).to(input.dtype)
        scale, shift = kept * a, (kept - 1.0 + p) * (_ALPHA * a)
        return input.mul_(scale).add_(shift) if inplace else input * scale + shift


_alpha_dropout(F.alpha_dropout, False)
_alpha_dropout(F.feature_alpha_dropout, True)


@handler(*spellings("rrelu"), torch.rrelu_, name="rrelu")
def rrelu(
    func: Any, input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: Any = False
) -> Any:
    """Leaky ReLU with a random slope in training."""
    F.rrelu(torch.empty(0), lower, upper)  # torch says what is wrong with the bounds
    x = input.detach()
    slope = lower + torch.rand_like(x) * (upper - lower) if training else torch.full_like(x, (lower + upper) / 2)
    slope = slope.masked_fill(x > 0, 1.0)
    return input.mul_(slope) if inplace is True or func is torch.rrelu_ else input * slope


# ---------------------------------------------------------------------- new tensors like another
def _like(x: ShardTensor, dtype: torch.dtype | None) -> ShardTensorSpec:
    return whole_values(x._spec).of_dtype(dtype or x.dtype)


def _made(x: ShardTensor, values: Tensor, dtype: torch.dtype | None, requires_grad: bool = False) -> ShardTensor:
    local = values.to(dtype or x.dtype)
    return wrap(local, _like(x, dtype).for_local(local), requires_grad)


@handler(*spellings("rand_like"), name="rand_like")
def rand_like(func: Any, input: Any, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> ShardTensor:
    """Uniform numbers in [0, 1)."""
    spec = _like(input, dtype)
    return _made(input, random.uniform(spec, input.device, _digits(spec.dtype)), dtype, requires_grad)


def _digits(dtype: torch.dtype) -> int:
    """Binary digits of numbers in [0, 1) of this dtype, as torch fills them."""
    return {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 53)


@handler(*spellings("randn_like"), name="randn_like")
def randn_like(func: Any, input: Any, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> ShardTensor:
    """Standard normal numbers."""
    return _made(input, random.normal(_like(input, dtype), input.device), dtype, requires_grad)


@handler(*spellings("randint_like"), name="randint_like")
def randint_like(
    func: Any, input: Any, *bounds: int, low: int = 0, high: int | None = None, dtype: Any = None, **_: Any
) -> ShardTensor:
    """Integers in [low, high)."""
    given = [*bounds, *([] if high is None else [high])]
    low, high = (low, given[0]) if len(given) == 1 else (given[0], given[1])
    if not low < high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    return _made(input, random.integers(_like(input, dtype), input.device, low, high), dtype)


@handler(*spellings("bernoulli"), name="bernoulli")
def bernoulli(func: Any, input: Any, p: Any = None, *, generator: Any = None, out: Any = None) -> Any:
    """0 or 1 with the probability that the input gives (or `p` everywhere)."""
    _no_generator(func, generator)
    if out is not None:
        return refuse(func, (), (input,), {"out": out})
    _check_probabilities(input.detach() if p is None else p)
    spec = whole_values(input._spec)
    numbers = wrap(random.uniform(spec, input.device), spec.of_dtype(torch.float64).like(shape=spec.shape))
    drawn = (numbers < (input.detach() if p is None else p)).to(input.dtype)
    return drawn + input * 0 if input.requires_grad and p is None else drawn  # torch gives it a gradient of zeros


def _check_probabilities(p: Any) -> None:
    """Raise torch's error on every rank for a probability out of range; CUDA checks values on the device only."""
    if not isinstance(p, Tensor):
        torch.bernoulli(torch.empty(0), p)
    elif p.device.type == "cpu" and not is_tracing() and not bool(((p >= 0) & (p <= 1)).all()):
        torch.bernoulli(torch.tensor(2.0))


# ---------------------------------------------------------------------- fills
_UNIFORM_FILLS: dict[str, Callable[..., Any]] = {
    "uniform_": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "exponential_": lambda u, lambd=1.0: -torch.log1p(-u) / lambd,
    "cauchy_": lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(math.pi * (u - 0.5)),
    "geometric_": lambda u, p: torch.ceil(torch.log1p(-u) / math.log1p(-p)).clamp_(min=1.0),
}
_NORMAL_FILLS: dict[str, Callable[..., Any]] = {
    "normal_": lambda z, mean=0.0, std=1.0: mean + z * std,
    "log_normal_": lambda z, mean=1.0, std=2.0: (mean + z * std).exp(),
}


@handler(
    *(getattr(torch.Tensor, name) for name in (*_UNIFORM_FILLS, *_NORMAL_FILLS, "bernoulli_", "random_")),
    name="random fills",
)
def fills(func: Any, self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    """In-place random fills."""
    _no_generator(func, generator)
    if not isinstance(self, ShardTensor):  # a plain target, filled with sharded probabilities
        return gathered(func, self, *args, **kwargs)
    func(torch.empty(0, dtype=self.dtype), *args, **kwargs)  # torch refuses what it refuses
    named = {{"from": "low", "to": "high"}.get(k, k): v for k, v in kwargs.items()}
    return self.copy_(_filled(func.__name__, self, args, named))


def _filled(name: str, x: ShardTensor, args: Any, kwargs: dict[str, Any]) -> Tensor:
    spec = whole_values(x._spec)
    if name in _UNIFORM_FILLS:
        digits = _digits(x.dtype) if name == "uniform_" else 53
        return _made(x, _UNIFORM_FILLS[name](random.uniform(spec, x.device, digits), *args, **kwargs), None)
    if name in _NORMAL_FILLS:
        return _made(x, _NORMAL_FILLS[name](random.normal(spec, x.device), *args, **kwargs), None)
    if name == "bernoulli_":
        return bernoulli(torch.bernoulli, x.detach(), args[0] if args else kwargs.get("p", 0.5))
    bounds = (0, args[0]) if len(args) == 1 else args or (kwargs.get("low", 0), kwargs.get("high"))
    high = _random_limit(x.dtype) if bounds[1] is None else bounds[1]
    return _made(x, random.integers(spec, x.device, bounds[0], high), None)


def _random_limit(dtype: torch.dtype) -> int:
    """`random_()` without bounds fills with the integers that the dtype represents exactly."""
    if dtype is torch.bool:
        return 2
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max
    return {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11}.get(dtype, 2**8) + 1


def _init(name: str, fill: Callable[..., Any]) -> None:
    func = getattr(init, name)

    @handler(func, name=f"init.{name}")
    @torch.no_grad()
    def answer(called: Any, tensor: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        return fill(tensor, *args, **({} if generator is None else {"generator": generator}), **kwargs)


def _kaiming_uniform(x: Any, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu", **rest: Any) -> Any:
    """He et al. 2015, arXiv:1502.01852."""
    fan_in, fan_out = init._calculate_fan_in_and_fan_out(x)
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    fan = fan_in if mode.lower() == "fan_in" else fan_out
    bound = math.sqrt(3.0) * init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return x.uniform_(-bound, bound, **rest)


_init("constant_", lambda x, val: x.fill_(val))
_init("normal_", lambda x, mean=0.0, std=1.0, **rest: x.normal_(mean, std, **rest))
_init("uniform_", lambda x, a=0.0, b=1.0, **rest: x.uniform_(a, b, **rest))
_init("kaiming_uniform_", _kaiming_uniform)


# ---------------------------------------------------------------------- the rest
@handler(
    *spellings("multinomial", "poisson", "binomial", "normal", "native_dropout"),
    torch.alpha_dropout, torch.alpha_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
    F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d,
    F.fractional_max_pool3d_with_indices,
    name="random ops gathered",
)  # fmt: skip
def gathered(func: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
    """Random ops without a rule: whole tensors and one seed on every rank, so that all ranks draw the same numbers."""
    _no_generator(func, generator)
    out = kwargs.get("out")
    if isinstance(out, Tensor) and func.__name__ == "multinomial" and out.dtype is not torch.int64:
        raise RuntimeError(f"multinomial expects Long tensor out, got: {out.dtype}")
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardTensor))
    key = random.next_key(first._spec)

    @functools.wraps(func)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with random.seeded(key, first.device):
            return func(*args, **kwargs)

    return gather_call(drawn, (), args, kwargs)
