"""Clip gradients by their joint norm, when some are whole on every rank and others are cut over one mesh or several.

As `torch.nn.utils.clip_grad_norm_`, which takes plain gradients or DTensors of one mesh: the norm of every gradient,
then the norm of these norms. A rank finds the part of its own shards; what is cut over the same groups travels
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dpzoo.parallel.pieces import piece_of, reduced
from dpzoo.shard import ShardTensor
from dpzoo.shard import collectives as comm


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place so that their joint norm is at most `max_norm`. All ranks of the meshes call it.

    Args:
        parameters: a model, a parameter or several; plain, DTensors, ShardTensors, on any meshes. Plain gradients must
            be complete, the same on every rank, as they are when `backward()` has returned.
        max_norm: the largest norm.
        norm_type: any p, `math.inf` too.
        error_if_nonfinite: raise, on every rank, instead of scaling by a norm that is inf or nan.
        foreach: False works on one gradient after the other; else on lists of them.

    Returns:
        The norm before, a plain 0-d tensor with the same bits on every rank.

    Raises:
        RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite` says so.
    """
    grads = _gradients(parameters)
    total = grad_norm(grads, norm_type, foreach)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {float(norm_type)} of the gradients is {total.item()}: they cannot be clipped. Look "
            "for inf or nan in the loss, or pass error_if_nonfinite=False to scale them all the same"
        )
    _scale(grads, (max_norm / (total + 1e-6)).clamp(max=1.0), foreach)
    return total


def _gradients(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [p.grad for p in given if p.grad is not None]


@torch.no_grad()
def grad_norm(grads: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None) -> Tensor:
    """The norm of the gradients' norms, a plain 0-d tensor with the same bits on every rank.

    One small reduction for each set of process groups over which gradients are cut; none if all are whole.
    """
    if not grads:
        return torch.tensor(0.0)
    p = float(norm_type)
    pieces = [piece_of(reduced(g)) for g in grads]
    norms = _local_norms([piece.local for piece in pieces], p, foreach)
    for groups in dict.fromkeys(piece.groups for piece in pieces if piece.groups):
        members = [i for i, piece in enumerate(pieces) if piece.groups == groups]
        merged = _merged(torch.stack([norms[i].double() for i in members]), p, groups)
        for i, norm in zip(members, merged, strict=True):
            norms[i] = norm.to(norms[i].dtype)
    device = norms[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), p)


def _local_norms(tensors: list[Tensor], p: float, foreach: bool | None) -> list[Tensor]:
    """The norm of every tensor, in float32 at least; that of no elements is the identity of its reduction."""
    full = [t for t in tensors if t.numel()]
    if foreach is False:
        found = iter([torch.linalg.vector_norm(t, p, dtype=_wide(t.dtype)) for t in full])
    else:
        found = iter(_by_kind(full, p))
    nothing = math.inf if p < 0 else 0.0
    return [next(found) if t.numel() else t.new_full((), nothing, dtype=_wide(t.dtype).to_real()) for t in tensors]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _by_kind(tensors: list[Tensor], p: float) -> list[Tensor]:
    kinds = [(t.device, t.dtype) for t in tensors]
    found: dict[int, Tensor] = {}
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        norms = torch._foreach_norm([tensors[i] for i in members], p, dtype=_wide(kind[1]))
        found |= dict(zip(members, norms, strict=True))
    return [found[i] for i in range(len(tensors))]


def _merged(norms: Tensor, p: float, groups: tuple[str, ...]) -> Tensor:
    """Norms of shards (n,), float64, as the norms of the whole tensors."""
    if math.isinf(p):
        # A reduction by maximum or minimum may lose a nan: it travels beside.
        op = "max" if p > 0 else "min"
        nan = norms.isnan()
        values = norms.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
        for group in groups:
            values, nan = comm.all_reduce(values, group, op), comm.all_reduce(nan, group)
        return values.masked_fill(nan, math.nan)
    sums = norms if p == 0 else norms.pow(p)
    for group in groups:
        sums = comm.all_reduce(sums, group)
    return sums if p == 0 else sums.pow(1 / p)


def _scale(grads: list[Tensor], factor: Tensor, foreach: bool | None) -> None:
    """Multiply in place. Also a sum of parts is scaled by scaling every part."""
    lists: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for g in grads:
        if isinstance(g, ShardTensor):
            g.mul_(factor.to(g.device))
            continue
        local = g._local_tensor if isinstance(g, DTensor) else g
        lists.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), tensors in lists.items():
        if foreach is False:
            for t in tensors:
                t.mul_(factor.to(device))
        else:
            torch._foreach_mul_(tensors, factor.to(device))
