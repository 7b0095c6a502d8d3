"""Random numbers that do not depend on how a tensor is cut: each element's value comes from its global index.

A draw is a splitmix64 stream (Steele, Lea and Flood 2014): number `i` of the stream that a key starts is a hash of the
two alone, so any rank can make any element; each call has a new key. Replicas agree, shards are independent, and after
`manual_seed` the same numbers come out for any number of ranks. A checkpoint that runs a region again restores torch's
generator; the key of a call is found again by what that generator gives, so that dropout masks repeat as they must.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType

from dpzoo.shard import collectives as comm
from dpzoo.shard.errors import ShardError
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.tracing import is_tracing, kept

_MASK = (1 << 63) - 1
_PIECE = {"cpu": 2**17}  # elements that are drawn at a time, by device type
_seed: int | None = None
_count = 0
_seen: OrderedDict[int, int] = OrderedDict()  # state of torch's generator -> number of the draw made there


def manual_seed(seed: int) -> None:
    """Start the stream of random numbers of ShardTensors anew; call it with the same seed on every rank of a mesh."""
    global _seed, _count
    _seed, _count = int(seed), 0
    _seen.clear()


def get_rng_state() -> dict[str, int | None]:
    """Where the stream of random numbers of ShardTensors is; it does not depend on the number of ranks."""
    return {"seed": _seed, "count": _count}


def set_rng_state(state: Mapping[str, int | None]) -> None:
    """Go on from a state that `get_rng_state` gave; call it with the same on every rank of a mesh."""
    global _seed, _count
    _seed, _count = state["seed"], state["count"] or 0
    _seen.clear()


Key = int | Tensor  # in a graph, which draws anew at each call: a 0-d tensor


def next_key(spec: ShardTensorSpec) -> Key:
    """Key of the next draw, the same on every rank of the mesh of `spec`."""
    if is_tracing():
        with kept():
            return torch.ops.dpzoo.draw(json.dumps(spec.layout.groups), spec.layout.device_type)
    return _key_now(spec.layout.groups, spec.layout.device_type)


def _key_now(groups: Sequence[str], device: str) -> int:
    global _seed, _count
    if _seed is None:  # first use without a seed: the first rank's torch seed serves all
        start = torch.tensor(torch.initial_seed() & _MASK, device=device)
        for group in groups:
            start = comm.broadcast(start, 0, group)
        _seed = int(start)
    state = int(torch.randint(_MASK, (), device="cpu"))
    number = _seen.get(state)
    if number is None:
        number = _seen[state] = _count
        _count += 1
        if len(_seen) > 65536:
            _seen.popitem(last=False)
    return _mix_int(_seed ^ _mix_int(number + 1))


def _of_key(key: Key) -> Any:
    """Where the stream of a key starts, as int64."""
    return key if isinstance(key, Tensor) else _signed(key)


@torch.library.custom_op("dpzoo::draw", mutates_args=())
def _draw(groups: str, device: str) -> Tensor:
    return torch.tensor(_of_key(_key_now(json.loads(groups), device)), device=device)


@_draw.register_fake
def _(groups: str, device: str) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


_draw.register_effect(EffectType.ORDERED)  # never left out, merged with another draw, or put in another order


_STEP = 0x9E3779B97F4A7C15  # of splitmix64's counter


def _mix_int(z: int) -> int:
    """The next step of splitmix64 and its finaliser, on a Python integer."""
    full = (1 << 64) - 1
    z = (z + _STEP) & full
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & full
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & full
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    return z - (1 << 64) if z >= 1 << 63 else z


def _shift(t: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    if bits == 0:
        return t
    return torch.bitwise_right_shift(t, bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place."""
    z ^= _shift(z, 30)
    z *= _signed(0xBF58476D1CE4E5B9)
    z ^= _shift(z, 27)
    z *= _signed(0x94D049BB133111EB)
    z ^= _shift(z, 31)
    return z


def _global_index(spec: ShardTensorSpec, device: torch.device, dims: int) -> Tensor:
    """Flat global index of the first element of every line along the last dims, `dims` dims being left."""
    index, step = torch.zeros((), dtype=torch.int64, device=device), math.prod(spec.shape[dims:])
    for dim in reversed(range(dims)):
        at = torch.arange(spec.local_shape[dim], device=device) + spec.offsets()[dim]
        index = index + (at * step).view(-1, *([1] * (dims - 1 - dim)))
        step *= spec.shape[dim]
    return index.expand(spec.local_shape[:dims])


Numbers = Callable[[Key, Tensor], Tensor]


@dataclass(frozen=True)
class Pairs:
    """How the numbers at `2 * p` and `2 * p + 1` are made together, for less.

    Attributes:
        draws: members of the stream that a pair takes: pair `p` begins with the one at `draws * p`.
        make: of the stream's states there (which it may write to) the numbers, each pair along the last dim.
    """

    draws: int
    make: Callable[[Tensor], Tensor]


def _drawn(
    spec: ShardTensorSpec, device: torch.device, dtype: torch.dtype, numbers: Numbers, pairs: Pairs | None = None
) -> Tensor:
    """`numbers(key, global index)` for every element of the shard, some lines at a time: they stay in the cache.

    Args:
        pairs: for lines that hold whole pairs.
    """
    key = next_key(spec)
    most = _PIECE.get(device.type, 2**24)
    if is_tracing() or math.prod(spec.local_shape) <= most:
        return numbers(key, _global_index(spec, device, spec.ndim))
    lines = _global_index(spec, device, spec.ndim - 1).reshape(-1, 1)
    out = torch.empty(len(lines), spec.local_shape[-1], dtype=dtype, device=device)
    of_lines = _of_lines(spec, device, key, numbers, pairs)
    for some, piece in zip(*(t.split(max(1, most // out.shape[1])) for t in (lines, out)), strict=True):
        piece.copy_(of_lines(some))
    return out.view(spec.local_shape)


def _of_lines(
    spec: ShardTensorSpec, device: torch.device, key: Key, numbers: Numbers, pairs: Pairs | None
) -> Callable[[Tensor], Tensor]:
    """The numbers of some lines of the shard along the last dim, as a function of where the whole lines begin."""
    start, length = spec.offsets()[-1], spec.local_shape[-1]
    if pairs is None or spec.shape[-1] % 2:
        line = torch.arange(start, start + length, device=device)
        return lambda some: numbers(key, some + line)
    # Every line begins with the same member of a pair.
    each = pairs.draws
    along = torch.arange(start // 2, (start + length + 1) // 2, device=device) * _signed(each * _STEP % 2**64)
    return lambda some: pairs.make(_state_at(key, (some >> 1) * each) + along).narrow(1, start % 2, length)


def _state_at(key: Key, index: Tensor) -> Tensor:
    """Where the stream of a key is at every index: linear in it."""
    return (index * _signed(_STEP)).add_(_of_key(key))


def _hash_at(key: Key, index: Tensor) -> Tensor:
    """64 bits for every index."""
    return _mix(_state_at(key, index))


def _bits_at(key: Key, index: Tensor) -> Tensor:
    """53 bits for every index."""
    return _shift(_hash_at(key, index), 11)


def uniform(spec: ShardTensorSpec, device: torch.device, digits: int = 53) -> Tensor:
    """The shard of a global tensor of uniform numbers in [0, 1), float64.

    Args:
        digits: binary digits of the numbers; with those of a shorter dtype a cast to it cannot round up to 1.
    """
    return _drawn(
        spec, device, torch.float64, lambda k, i: _shift(_bits_at(k, i), 53 - digits).to(torch.float64) * 2.0**-digits
    )


def chance(spec: ShardTensorSpec, device: torch.device, p: float) -> Tensor:
    """The shard of a global boolean tensor that is True with probability `p`."""
    return _drawn(spec, device, torch.bool, lambda key, index: chance_at(key, index, p))


def chance_at(key: Key, index: Tensor, p: float) -> Tensor:
    """Which elements, given by their global index, are True with probability `p` in the draw of `key`."""
    return _bits_at(key, index) < int(p * 2**53)


def normal(spec: ShardTensorSpec, device: torch.device) -> Tensor:
    """The shard of a global tensor of standard normal numbers (Box and Muller 1958), float64, or float32 for narrower.

    Elements `2 * p` and `2 * p + 1` of the tensor, row by row, are the two coordinates of one point.
    """
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return _drawn(spec, device, torch.float64, _wide_normal, Pairs(2, _wide_pairs))
    return _drawn(spec, device, torch.float32, _narrow_normal, Pairs(1, _narrow_pairs))


def _wide_normal(key: Key, index: Tensor) -> Tensor:
    return _coordinate(index, *_wide_polar(_state_at(key, (index >> 1) * 2)))


def _wide_pairs(states: Tensor) -> Tensor:
    return _points(*_wide_polar(states))


def _wide_polar(states: Tensor) -> tuple[Tensor, Tensor]:
    """Of the states of two draws, which follow each other, 53 bits each."""
    v, u = (_shift(_mix(s), 11).to(torch.float64) for s in (states + _signed(_STEP), states))
    return u.mul_(-(2.0**-53)).log1p_().mul_(-2.0).sqrt_(), v.mul_(2.0 * math.pi * 2.0**-53)


def _narrow_normal(key: Key, index: Tensor) -> Tensor:
    return _coordinate(index, *_narrow_polar(_state_at(key, index >> 1)))


def _narrow_pairs(states: Tensor) -> Tensor:
    return _points(*_narrow_polar(states))


def _narrow_polar(states: Tensor) -> tuple[Tensor, Tensor]:
    """Of the states of one draw: the size of its 64 bits as a signed number, and the lower half of them."""
    bits = _mix(states)
    radius = bits.to(torch.float32).abs_().add_(1.0).mul_(2.0**-63).log_().mul_(-2.0).sqrt_()
    return radius, (bits << 32).to(torch.float32).mul_(2.0 * math.pi * 2.0**-64)


def _coordinate(index: Tensor, radius: Tensor, angle: Tensor) -> Tensor:
    """Of the point that the element at `index` belongs to: the first or the second."""
    return radius * torch.where((index & 1).bool(), angle.sin(), angle.cos())


def _points(radius: Tensor, angle: Tensor) -> Tensor:
    """Both coordinates of every point, next to each other."""
    # As complex numbers: torch interleaves those faster than it stacks.
    return torch.view_as_real(torch.complex(angle.cos().mul_(radius), angle.sin_().mul_(radius))).flatten(-2)


def integers(spec: ShardTensorSpec, device: torch.device, low: int, high: int) -> Tensor:
    """The shard of a global tensor of integers in [low, high)."""
    return low + (uniform(spec, device) * (high - low)).to(torch.int64).clamp_(max=high - low - 1)


@contextmanager
def seeded(key: Key, device: torch.device) -> Iterator[None]:
    """Inside the block torch's own generators start from `key`; afterwards they are as they were.

    Raises:
        ShardError: while a graph is made, since a graph cannot set generators.
    """
    if isinstance(key, Tensor):
        raise ShardError(
            "a random op without a rule cannot be compiled: draw with rand_like, randn_like, bernoulli or dropout, or "
            "leave it out of the graph with torch.compiler.disable"
        )
    with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        torch.manual_seed(key & _MASK)
        yield
