"""`F.interpolate` on cut dims: each output row is a weighted sum of a few input rows, found by torch's own arithmetic.

Growing by 2, 4, 8, ... runs torch's kernel on the shard and a halo: such factors are exact in binary, so that
coordinates that start at the shard are those of the domain. Else, along a cut dim, rank r fetches the rows its outputs
touch and applies the taps, which come from resizing probes of the global length with torch itself, so that every mode,
scale and rounding is torch's; the uncut dims are resized by torch. Resizing is separable in all modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.local_bridges import fetch
from dpzoo.shard.partition import Sizes, own_intervals, starts
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.meta import output_shape
from dpzoo.shard.rules.parts import fill_empty, global_of, whole_values
from dpzoo.shard.rules.window import Windows, run_windows
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor
from dpzoo.shard.tracing import constant, off_the_graph

_ONE_DIM = {"bilinear": "linear", "trilinear": "linear"}
_HALO = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}
_PROBE_ROWS = 512


@dataclass(frozen=True)
class _Method:
    """How coordinates and weights are made."""

    mode: str
    align_corners: bool | None
    antialias: bool

    @property
    def is_nearest(self) -> bool:
        return self.mode in ("nearest", "nearest-exact")

    def run(self, t: Tensor, sizes: Sequence[int], scales: Sequence[float | None]) -> Tensor:
        """torch's own resize; where scales are given, they and not the sizes make the coordinates."""
        how: dict[str, Any] = {"mode": self.mode, "align_corners": self.align_corners, "antialias": self.antialias}
        if self.mode == "area" or None in scales:
            return F.interpolate(t, size=list(sizes), **how)
        return F.interpolate(t, scale_factor=[float(s) for s in scales if s is not None], **how)


@handler(F.interpolate, name="interpolate")
def interpolate(
    func: Any,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Resize the spatial dims in any mode."""
    args = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    method = _Method(mode, align_corners, antialias)
    exact = method.is_nearest or input.dtype.is_floating_point  # torch rounds bytes in fixed point: not separable
    if not isinstance(input, ShardTensor) or not exact:
        return gather_call(func, (), (input, *args), {})
    shape = output_shape(F.interpolate, input, *args)
    scales = _scales(scale_factor, input.ndim - 2, recompute_scale_factor)
    spec = whole_values(input._spec)
    cut = [d for d in spec.cut_dims if d >= 2]
    factors = {d: _exact_factor(spec.shape[d], shape[d], scales[d - 2]) for d in cut}
    grows = mode in _HALO and not align_corners and not antialias and all(factors.values())
    if grows or not cut:
        return _on_halo(input, spec, method, shape, scales, factors)
    half = input.dtype.is_floating_point and input.dtype.itemsize == 2
    x: Any = input.float() if half and not method.is_nearest else input  # sums in float, as torch does
    return _by_taps(x, spec.of_dtype(x.dtype), method, shape, scales, cut).to(input.dtype)


def _scales(scale_factor: Any, n: int, recompute: bool | None) -> tuple[float | None, ...]:
    """The factor torch uses for its coordinates: the one given, unless it is to be recomputed from the sizes."""
    if scale_factor is None or recompute:
        return (None,) * n
    listed = isinstance(scale_factor, (tuple, list))
    return tuple(float(s) for s in scale_factor) if listed else (float(scale_factor),) * n


def _exact_factor(n: int, n_out: int, scale: float | None) -> int:
    """The power of two by which a dim grows; 0 if it does something else."""
    factor = n_out // n if n else 0
    power = factor > 0 and factor & (factor - 1) == 0
    return factor if power and factor * n == n_out and scale in (None, float(factor)) else 0


# ---------------------------------------------------------------------- shard and halo
def _on_halo(
    x: ShardTensor,
    spec: ShardTensorSpec,
    method: _Method,
    shape: Sequence[int],
    scales: Sequence[float | None],
    factors: dict[int, int],
) -> ShardTensor:
    plans = {d: _halo_windows(spec.sizes[spec.cut_dims[d]], f, _HALO[method.mode]) for d, f in factors.items()}

    def local(t: Tensor) -> Tensor:
        return method.run(t, [t.shape[d] * factors[d] if d in factors else shape[d] for d in range(2, t.ndim)], scales)

    return run_windows(x, spec, plans, local, (0, 1))


@lru_cache(maxsize=1024)
def _halo_windows(sizes: Sizes, factor: int, halo: int) -> Windows:
    n, wanted, pads, skips = sum(sizes), [], [], []
    for lo, hi in own_intervals(sizes):
        a, b = max(0, lo - halo), min(n, hi + halo)
        empty = lo == hi
        wanted.append(() if empty else ((a, b),))
        pads.append((1, 0) if empty else (0, 0))
        skips.append(0 if empty else (lo - a) * factor)
    return Windows(tuple(wanted), tuple(pads), tuple(s * factor for s in sizes), tuple(skips))


# ---------------------------------------------------------------------- taps
def _by_taps(
    x: ShardTensor,
    spec: ShardTensorSpec,
    method: _Method,
    shape: Sequence[int],
    scales: Sequence[float | None],
    cut: Sequence[int],
) -> ShardTensor:
    local, sizes = to_shard(x, spec), list(spec.sizes)
    for d in cut:
        local, sizes[spec.cut_dims[d]] = _resize_dim(local, spec, d, shape[d], scales[d - 2], method)
    if len(cut) < x.ndim - 2:
        missing = [d for d in range(x.ndim) if local.shape[d] == 0]
        full = fill_empty(local, missing, 0)
        rest = [full.shape[d] if d in cut else shape[d] for d in range(2, x.ndim)]
        local = method.run(full, rest, [1.0 if d in cut and s is not None else s for d, s in enumerate(scales, 2)])
        for d in missing:
            local = local.narrow(d, 0, 0)
    return global_of(local, spec, spec.cuts, sizes)


def _resize_dim(
    local: Tensor, spec: ShardTensorSpec, dim: int, n_out: int, scale: float | None, method: _Method
) -> tuple[Tensor, Sizes]:
    """This rank's output rows of one cut dim, and how the output is cut."""
    axis, n = spec.cut_dims[dim], spec.shape[dim]
    borders = [0, *[min(n_out, round(b * n_out / n)) for b in starts(spec.sizes[axis])[1:-1]], n_out]
    me = spec.layout.coords[axis]
    a, b = borders[me], borders[me + 1]
    with off_the_graph():
        index, weight = _taps(n, n_out, scale, method, local.dtype)
        spans = [
            (int(index[a:b].min()), int(index[a:b].max()) + 1) if a < b else (0, 0)
            for a, b in zip(borders, borders[1:], strict=False)
        ]
        index, weight = index[a:b] - spans[me][0], weight[a:b].clone()
    wanted = tuple((s,) if s[0] < s[1] else () for s in spans)
    local = fetch(local, dim, spec.sizes[axis], wanted, spec.layout.groups[axis])
    out = _apply(local, dim, constant(index), constant(weight), method) if a < b else local.narrow(dim, 0, 0)
    return out, tuple(y - x for x, y in zip(borders, borders[1:], strict=False))


def _apply(t: Tensor, dim: int, index: Tensor, weight: Tensor, method: _Method) -> Tensor:
    """Output row j is `sum_k weight[j, k] * t[index[j, k]]`."""
    index = index.to(t.device)
    if method.is_nearest:
        return t.index_select(dim, index[:, 0])
    weight = weight.to(t).reshape(*weight.shape, *[1] * (t.ndim - 1 - dim))
    total = t.index_select(dim, index[:, 0]) * weight[:, 0]
    for k in range(1, index.shape[1]):
        total = total + t.index_select(dim, index[:, k]) * weight[:, k]
    return total


@lru_cache(maxsize=256)
def _taps(n: int, n_out: int, scale: float | None, method: _Method, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(index, weight), each (n_out, taps), as torch has them for inputs of `dtype`."""
    if method.is_nearest:
        # Row numbers, in digits that every dtype holds: torch makes coordinates in a precision that follows the dtype.
        digits = torch.stack([(torch.arange(n) >> 7 * k) & 127 for k in range(5)]).to(dtype)
        found = _resize_1d(digits, n_out, scale, method).long()
        return sum(found[k] << 7 * k for k in range(5))[:, None], torch.ones(n_out, 1)  # type: ignore[index]
    rows, columns, values = [], [], []
    for lo in range(0, n, _PROBE_ROWS):
        probe = torch.zeros(min(n - lo, _PROBE_ROWS), n, dtype=dtype)
        probe.diagonal(lo).fill_(1.0)
        response = _resize_1d(probe, n_out, scale, method)
        i, j = response.nonzero(as_tuple=True)
        rows.append(j)
        columns.append(i + lo)
        values.append(response[i, j])
    return _as_table(torch.cat(rows), torch.cat(columns), torch.cat(values), n_out)


def _as_table(out: Tensor, source: Tensor, weight: Tensor, n_out: int) -> tuple[Tensor, Tensor]:
    """Triples (output, input, weight) as one row of taps per output; short rows repeat an input with weight 0."""
    order = torch.argsort(out, stable=True)
    out, source, weight = out[order], source[order], weight[order]
    counts = torch.bincount(out, minlength=n_out)
    position = torch.arange(len(out)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    width = max(1, int(counts.max())) if n_out else 1
    index, weights = torch.zeros(n_out, width, dtype=torch.int64), weight.new_zeros(n_out, width)
    index[out, position], weights[out, position] = source, weight
    return torch.where(weights == 0, index[:, :1], index), weights


def _resize_1d(rows: Tensor, n_out: int, scale: float | None, method: _Method) -> Tensor:
    """Resize the last dim of (rows, n) by torch in the mode's one-dimensional form."""
    if method.mode in ("bicubic", "lanczos") or method.antialias:
        flat = _Method("bilinear" if method.mode == "linear" else method.mode, method.align_corners, method.antialias)
        scales = (None, None) if scale is None else (1.0, scale)
        return flat.run(rows[:, None, None, :], (1, n_out), scales)[:, 0, 0]
    one = _Method(_ONE_DIM.get(method.mode, method.mode), method.align_corners, False)
    return one.run(rows[:, None, :], (n_out,), (scale,))[:, 0]
