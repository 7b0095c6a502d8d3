"""Bring values into a model that lives on many ranks: whole tensors from the first rank, shards by each rank itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dpzoo.pretrained.agree import Team
from dpzoo.pretrained.parts import part_of
from dpzoo.shard import ShardTensor
from dpzoo.shard import collectives as comm
from dpzoo.weights import DamagedWeightsError, Slab
from dpzoo.weights.pieces import PIECE_BYTES, pieces
from dpzoo.weights.plan import LoadPlan, while_writing

Item = tuple[str, Slab, Tensor]
# Each value in a message begins where any dtype may.
ALIGNMENT = 16


def fill_shards(plan: LoadPlan, targets: Mapping[str, ShardTensor | DTensor]) -> None:
    """Each rank reads its own slab of each sharded tensor. Nothing is communicated.

    Raises:
        DamagedWeightsError: on this rank alone, when it could not read on.
    """
    with torch.no_grad(), while_writing(plan.report.origin):
        for name, target in targets.items():
            local, bounds = part_of(name, target)
            starts = [a for a, _ in bounds]
            for slab in pieces(bounds, local.dtype.itemsize):
                here = tuple(slice(s.start - a, s.stop - a) for s, a in zip(slab, starts, strict=True))
                local[here].copy_(plan.read(name, slab))


def fill_whole(read: Callable[[str, Slab], Tensor], targets: Mapping[str, Tensor], team: Team, origin: str) -> None:
    """The first rank reads each plain tensor once and sends it to the others, many small ones in one message.

    A message carries whether it was read well, so that a file that fails under way is an error on all ranks.

    Raises:
        DamagedWeightsError: on all ranks, when the first could not read on.
    """
    with torch.no_grad():
        for group in _groups(targets):
            if team.is_many:
                _send(read, group, team, origin)
                continue
            with while_writing(origin):
                for name, slab, target in group:
                    target[slab].copy_(read(name, slab))


def _groups(targets: Mapping[str, Tensor]) -> Iterator[list[Item]]:
    """Pieces of the targets, together as large as a message."""
    group: list[Item] = []
    size = 0
    for name, target in targets.items():
        plain = target.detach()
        for slab in pieces([(0, n) for n in plain.shape], plain.dtype.itemsize):
            nbytes = plain[slab].nbytes
            if group and size + nbytes > PIECE_BYTES:
                yield group
                group, size = [], 0
            group.append((name, slab, plain))
            size += nbytes
    if group:
        yield group


def _send(read: Callable[[str, Slab], Tensor], group: list[Item], team: Team, origin: str) -> None:
    assert team.layout is not None
    spans, end = [], ALIGNMENT  # byte 0 says whether the rest is good
    for _, slab, target in group:
        nbytes = target[slab].nbytes
        spans.append((end, end + nbytes))
        end += math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
    message = torch.empty(end, dtype=torch.uint8)
    message[0] = 0
    error: Exception | None = None
    if team.is_first:
        try:
            with while_writing(origin):
                for (name, slab, target), (a, b) in zip(group, spans, strict=True):
                    value = read(name, slab).to(target.dtype).contiguous()
                    message[a:b] = value.view(-1).view(torch.uint8)
            message[0] = 1
        except DamagedWeightsError as caught:
            error = caught
    message = message.to(comm.device_of(team.layout.device_type))
    for axis in reversed(team.layout.axes):
        message = comm.broadcast(message, 0, team.layout.groups[axis])
    if not message[0]:
        team.settle(error)
    for (_, slab, target), (a, b) in zip(group, spans, strict=True):
        part = target[slab]
        part.copy_(message[a:b].view(target.dtype).view(part.shape))
