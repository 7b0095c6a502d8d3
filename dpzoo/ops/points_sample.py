"""Choosing some of many points: far from each other, or at random. Results are indices, the same for any cutting."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dpzoo.ops.points_search import check_finite, measured, squared_distances

_ROUNDS = 6


def farthest_point_sample(points: Tensor, n: int, start: int = 0) -> Tensor:
    """Begin with point `start`, then always take the point farthest from all taken ones (the first of several).

    Args:
        points: (N, d) or (B, N, d).
        n: how many, at most N.

    Returns:
        Indices (n,) or (B, n), all different, in the order of choice.

    Raises:
        ValueError: shapes or numbers out of range, coordinates that are not finite.

    Eldar et al. 1997, "The farthest point strategy for progressive image sampling"; n passes over the points.
    """
    if has_torch_function((points,)):
        return handle_torch_function(farthest_point_sample, (points,), points, n, start)
    check_sample("farthest_point_sample", points, n, start)
    check_finite("farthest_point_sample", points)
    coordinates = measured(points.detach())
    chosen = torch.empty((*points.shape[:-2], n), dtype=torch.int64, device=points.device)
    gaps = torch.full_like(coordinates[..., 0], math.inf)
    at = torch.full_like(chosen[..., :1], start)
    for i in range(n):
        chosen[..., i : i + 1] = at
        here = coordinates.gather(-2, at.unsqueeze(-1).expand(*at.shape, points.shape[-1]))
        narrow_gaps(gaps, coordinates, here)
        gaps.scatter_(-1, at, -math.inf)
        at = gaps.argmax(-1, keepdim=True)
    return chosen


def narrow_gaps(gaps: Tensor, coordinates: Tensor, here: Tensor) -> None:
    """Lower each point's squared distance to the chosen ones (..., N) by a new choice (..., 1, d), in place."""
    torch.minimum(gaps, squared_distances(coordinates, here), out=gaps)


def random_sample(points: Tensor, n: int, seed: int) -> Tensor:
    """Indices of `n` different points, at random, in random order.

    Args:
        points: (N, d) or (B, N, d), of which only N is used: every sample of a batch gets the same indices.
        n: how many, at most N; memory and time do not grow with N.
        seed: The same seed gives the same indices, on any device and any number of ranks.

    Returns:
        (n,), int64.

    Raises:
        ValueError: shapes or numbers out of range.
    """
    if has_torch_function((points,)):
        return handle_torch_function(random_sample, (points,), points, n, seed)
    check_sample("random_sample", points, n)
    return permuted(torch.arange(n), points.shape[-2], seed).to(points.device)


def check_sample(name: str, points: Tensor, n: int, start: int = 0) -> None:
    """Raise ValueError unless `n` of these points can be had, from `start` on."""
    if points.ndim not in (2, 3):
        raise ValueError(f"{name}: points (N, d) or (B, N, d), got {tuple(points.shape)}")
    if not 0 <= n <= points.shape[-2]:
        raise ValueError(f"{name}: n must lie between 0 and the number of points, {points.shape[-2]}; got {n}")
    if n and not 0 <= start < points.shape[-2]:
        raise ValueError(f"{name}: start must be the index of one of {points.shape[-2]} points, got {start}")


def permuted(index: Tensor, total: int, seed: int) -> Tensor:
    """Where a random permutation of `range(total)` sends these indices, computed for each by itself.

    A Feistel network permutes a power of 4 that holds `total`; what falls outside goes on until it is inside.
    """
    half = max(1, (max(total - 1, 1).bit_length() + 1) // 2)
    keys = [_mix(seed * _ROUNDS + r) for r in range(_ROUNDS)]
    out = _feistel(index, half, keys)
    while len(outside := (out >= total).nonzero().squeeze(-1)):
        out[outside] = _feistel(out[outside], half, keys)
    return out


def _feistel(index: Tensor, half: int, keys: list[int]) -> Tensor:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right ^ key) & mask)
    return (left << half) | right


def _scramble(z: Tensor) -> Tensor:
    """A bijective hash of non-negative int64 (multiplications wrap); shifts see 63 bits."""
    positive = (1 << 63) - 1
    z = (z ^ ((z & positive) >> 31)) * 0x7FB5D329728EA185
    z = (z ^ ((z & positive) >> 27)) * -0x7E25210B43D22BB3
    return (z ^ ((z & positive) >> 33)) & positive


def _mix(z: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014), 63 bits of it."""
    full = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return (z ^ (z >> 31)) & ((1 << 63) - 1)
