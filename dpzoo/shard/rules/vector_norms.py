"""Norms over dims: the norm of the ranks' norms. Matrix norms need the whole matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.bridges import to_shard
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.registry import handler
from dpzoo.shard.rules.parts import fill_empty
from dpzoo.shard.rules.reducing import Plan, reduces, reduction_of
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tensor import ShardTensor

aten = torch.ops.aten


def _norm_plan(spec: ShardTensorSpec, p: float, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Plan:
    """p-norm over dims."""
    if math.isinf(p) and spec.ndim:
        extreme = torch.amax if p > 0 else torch.amin
        dims = () if dim is None else dim
        return lambda x: extreme((x if dtype is None else x.to(dtype)).abs(), dims, keepdim)
    r = reduction_of(spec, dim, keepdim)
    wide = torch.float32 if (dtype or spec.dtype) in (torch.float16, torch.bfloat16) else dtype

    def run(x: ShardTensor) -> Tensor:
        local = to_shard(x, r.spec)
        if not r.axes:
            return r.leave(torch.linalg.vector_norm(local, p, r.dims, keepdim, dtype=dtype))
        local = fill_empty(local, r.dims, math.inf) if p < 0 and not r.empty else local
        part = torch.linalg.vector_norm(local, p, r.dims, keepdim, dtype=wide)
        out = r.sum(part) if p == 0 else torch.linalg.vector_norm(r.stack(part), p, 0)
        return r.leave(out.to(torch.empty(0, dtype=dtype or spec.dtype).abs().dtype))

    return run


@reduces("vector_norm", aten=(aten.linalg_vector_norm.default,))
def vector_norm(
    spec: ShardTensorSpec,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan | None:
    """`torch.linalg.vector_norm`."""
    return _norm_plan(spec, float(ord), dim, keepdim, dtype)


@reduces("norm", "frobenius_norm")
def norm(
    spec: ShardTensorSpec,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan | None:
    """`torch.norm` and `Tensor.norm`: vector norms; the nuclear norm is gathered."""
    if p == "nuc" or isinstance(p, (tuple, list)):
        return None
    return _norm_plan(spec, 2.0 if p in ("fro", None) else float(p), dim, keepdim, dtype)


@reduces("linalg.norm", funcs=(torch.linalg.norm,))
def _linalg_norm(
    spec: ShardTensorSpec, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Plan | None:
    """`torch.linalg.norm`: vector cases and the Frobenius norm; other matrix norms are gathered."""
    dims = tuple(range(spec.ndim)) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if ord is None or (ord == "fro" and len(dims) == 2):
        return _norm_plan(spec, 2.0, dim, keepdim, dtype)
    if isinstance(ord, (int, float)) and len(dims) == 1:
        return _norm_plan(spec, float(ord), dims, keepdim, dtype)
    return None


@handler(F.normalize, name="normalize")
def normalize(func: Any, input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Divide by the norm along a dim."""
    if out is not None:
        return gather_call(func, (), (input, p, dim, eps), {"out": out})
    return input / input.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(input)


@handler(F.cosine_similarity, torch.cosine_similarity, name="cosine_similarity")
def cosine_similarity(func: Any, x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Dot product over norms along a dim of the broadcast operands; each norm is bounded below by eps, as in torch."""
    x1, x2 = torch.broadcast_tensors(x1, x2)
    n1, n2 = (torch.linalg.vector_norm(x, 2, dim, True).clamp_min(eps) for x in (x1, x2))
    return ((x1 / n1) * (x2 / n2)).sum(dim)


@handler(torch.dist, torch.Tensor.dist, name="dist")
def dist(func: Any, input: Any, other: Any, p: float = 2) -> Any:
    """Norm of a difference."""
    return torch.linalg.vector_norm(input - other, p)


@handler(F.pairwise_distance, name="pairwise_distance")
def pairwise_distance(func: Any, x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    """Norm of differences along the last dim."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)
