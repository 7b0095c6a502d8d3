"""Fourier transforms: local along uncut dims; along a cut dim the cut moves to another dim and back (all-to-all).

A transform over several dims is done dim by dim, the uncut ones first, so that the cut has a dim to move to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.plan import Dims, Label
from dpzoo.shard.registry import handler, rule
from dpzoo.shard.rules.parts import normal_dim
from dpzoo.shard.tensor import ShardTensor

_FORWARD = {"fft": torch.fft.fft, "ifft": torch.fft.ifft, "rfft": torch.fft.rfft, "irfft": torch.fft.irfft}
_KEEPS_LENGTH = frozenset(["fft", "ifft"])


def _one_dim(name: str, func: Any) -> None:
    @rule(func, name=f"fft.{name}")
    def plan(input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None) -> Dims | None:
        if input.ndim == 0:
            return None
        d = normal_dim(dim, input.ndim)
        labels: tuple[Label, ...] = tuple(range(input.ndim))
        same = name in _KEEPS_LENGTH and n in (None, input.shape[d])
        out = labels if same else (*labels[:d], "bins", *labels[d + 1 :])
        return Dims([labels], [out], lambda t: _transform(func, t, n, d, norm), whole=frozenset([d, "bins"]))


def _transform(func: Any, t: Tensor, n: int | None, dim: int, norm: str | None) -> Tensor:
    """torch refuses to transform no rows at all: give it one and keep none."""
    if t.numel() or 0 not in [s for d, s in enumerate(t.shape) if d != dim]:
        return func(t, n, dim, norm)
    empty = next(d for d, s in enumerate(t.shape) if s == 0 and d != dim)
    row = torch.cat([t, t.new_zeros([1 if d == empty else s for d, s in enumerate(t.shape)])], empty)
    return _transform(func, row, n, dim, norm).narrow(empty, 0, 0)


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _one_dim(_name, getattr(torch.fft, _name))


def _order(x: Tensor, dims: Sequence[int]) -> list[int]:
    """Uncut dims first."""
    cut = x._spec.cut_dims if isinstance(x, ShardTensor) else {}
    return sorted(dims, key=lambda d: d in cut)


def _several_dims(name: str, base: str, default: Sequence[int] | None) -> None:
    func: Any = getattr(torch.fft, name)

    @handler(func, name=f"fft.{name}")
    def answer(
        called: Any, input: Any, s: Any = None, dim: Any = default, norm: str | None = None, *, out: Any = None
    ) -> Any:
        dim = (dim,) if isinstance(dim, int) else dim
        s = (s,) if isinstance(s, int) else s
        if not isinstance(input, ShardTensor) or out is not None or (dim is not None and len(dim) == 0):
            return gather_call(func, (), (input, s, dim, norm), {} if out is None else {"out": out})
        if dim is None:
            dim = range(input.ndim) if s is None else range(input.ndim - len(s), input.ndim)
        dims = [normal_dim(d, input.ndim) for d in dim]
        lengths = dict(zip(dims, [None] * len(dims) if s is None else [None if n == -1 else n for n in s], strict=True))
        if len(lengths) != len(dims):
            return gather_call(func, (), (input, s, dim, norm), {})
        last, rest = dims[-1], dims[:-1]
        if base == "rfft":
            input, inner = torch.fft.rfft(input, lengths[last], last, norm), "fft"
        elif base == "irfft":
            inner = "ifft"
        else:
            rest, inner = dims, base
        for d in _order(input, rest):
            input = _FORWARD[inner](input, lengths[d], d, norm)
        return torch.fft.irfft(input, lengths[last], last, norm) if base == "irfft" else input


for _base in ("fft", "ifft", "rfft", "irfft"):
    _several_dims(f"{_base}2", _base, (-2, -1))
    _several_dims(f"{_base}n", _base, None)


@handler(torch.fft.fftshift, torch.fft.ifftshift, name="fft.fftshift")
def fftshift(func: Any, input: Any, dim: Any = None) -> Any:
    """A roll by half of each dim."""
    dims = range(input.ndim) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    sign = 1 if func is torch.fft.fftshift else -1
    half = [input.shape[d] // 2 if sign == 1 else -(input.shape[d] // 2) for d in dims]
    return torch.roll(input, tuple(half), tuple(dims)) if len(half) else input
