"""Random numbers that do not depend on how a tensor is cut: each element's value comes from its global index.

A draw is `hash(key, global index)`, with a new key for every call. Replicas agree, shards are independent, and after
`manual_seed` the same numbers come out for any number of ranks. A checkpoint that runs a region again restores torch's
generator; the key of a call is found again by what that generator gives, so that dropout masks repeat as they must.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dpzoo.shard import collectives as comm
from dpzoo.shard.spec import ShardTensorSpec

_MASK = (1 << 63) - 1
_seed: int | None = None
_count = 0
_seen: OrderedDict[int, int] = OrderedDict()  # state of torch's generator -> number of the draw made there


def manual_seed(seed: int) -> None:
    """Start the stream of random numbers of ShardTensors anew; call it with the same seed on every rank of a mesh."""
    global _seed, _count
    _seed, _count = int(seed), 0
    _seen.clear()


def next_key(spec: ShardTensorSpec) -> int:
    """Key of the next draw, the same on every rank of the mesh of `spec`."""
    global _seed, _count
    if _seed is None:  # first use without a seed: the first rank's torch seed serves all
        start = torch.tensor(torch.initial_seed() & _MASK, device=spec.layout.device_type)
        for axis in spec.layout.axes:
            start = comm.broadcast(start, 0, spec.layout.groups[axis])
        _seed = int(start)
    state = int(torch.randint(_MASK, (), device="cpu"))
    number = _seen.get(state)
    if number is None:
        number = _seen[state] = _count
        _count += 1
        if len(_seen) > 65536:
            _seen.popitem(last=False)
    return _mix_int(_seed ^ _mix_int(number + 1))


def _mix_int(z: int) -> int:
    """splitmix64 finaliser (Steele, Lea and Flood 2014) on a Python integer."""
    full = (1 << 64) - 1
    z = (z + 0x9E3779B97F4A7C15) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


def _shift(t: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    if bits == 0:
        return t
    return (t >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _global_index(spec: ShardTensorSpec, device: torch.device) -> Tensor:
    """Flat global index of every element of the shard."""
    index, step = torch.zeros((), dtype=torch.int64, device=device), 1
    for dim in reversed(range(spec.ndim)):
        at = torch.arange(spec.local_shape[dim], device=device) + spec.offsets()[dim]
        index = index + (at * step).view(-1, *([1] * (spec.ndim - 1 - dim)))
        step *= spec.shape[dim]
    return index.expand(spec.local_shape)


def _bits(spec: ShardTensorSpec, device: torch.device, streams: int = 1) -> list[Tensor]:
    """Independent 53-bit integers for every element of the shard."""
    key = next_key(spec)
    index = _global_index(spec, device)
    return [_bits_at(key, index * streams + s) for s in range(streams)]


def _bits_at(key: int, index: Tensor) -> Tensor:
    return _shift(_mix(_mix(index + _signed(key)) + _signed(_mix_int(key))), 11)


def uniform(spec: ShardTensorSpec, device: torch.device, digits: int = 53) -> Tensor:
    """The shard of a global tensor of uniform numbers in [0, 1), float64.

    Args:
        digits: binary digits of the numbers; with those of a shorter dtype a cast to it cannot round up to 1.
    """
    return _shift(_bits(spec, device)[0], 53 - digits).to(torch.float64) * 2.0**-digits


def chance(spec: ShardTensorSpec, device: torch.device, p: float) -> Tensor:
    """The shard of a global boolean tensor that is True with probability `p`."""
    return _bits(spec, device)[0] < int(p * 2**53)


def chance_at(key: int, index: Tensor, p: float) -> Tensor:
    """Which elements, given by their global index, are True with probability `p` in the draw of `key`."""
    return _bits_at(key, index) < int(p * 2**53)


def normal(spec: ShardTensorSpec, device: torch.device) -> Tensor:
    """The shard of a global tensor of standard normal numbers (Box and Muller 1958), float64."""
    u, v = (b.to(torch.float64) * 2.0**-53 for b in _bits(spec, device, 2))
    return (-2.0 * torch.log1p(-u)).sqrt() * torch.cos(2.0 * math.pi * v)


def integers(spec: ShardTensorSpec, device: torch.device, low: int, high: int) -> Tensor:
    """The shard of a global tensor of integers in [low, high)."""
    return low + (uniform(spec, device) * (high - low)).to(torch.int64).clamp_(max=high - low - 1)


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Inside the block torch's own generators start from `key`; afterwards they are as they were."""
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(key & _MASK)
        yield
