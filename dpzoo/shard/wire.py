"""How tensors travel: as their bytes, so that every dtype works on every backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllToAllOptions, ProcessGroup

# Calls go to the process group itself: torch's functions around it cost as much as a small message.
_NOW, _LATER = AllToAllOptions(), AllToAllOptions()
_NOW.asyncOp, _LATER.asyncOp = False, True


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a tensor, row-major: its own memory where that is how it lies."""
    if t.is_complex() or t.is_neg():
        t = t.resolve_conj().resolve_neg()  # the bytes of a lazy conjugate are those of its base
    t = t.detach().contiguous()
    # as_strided: it may keep an odd stride where a dim has size 0 or 1, which a dtype view refuses.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def start_all_to_all(
    received: Tensor, sent: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], pg: ProcessGroup, wait: bool
) -> dist.Work | None:
    """Start to send `in_splits[r]` rows of `sent` to rank r, and to receive `out_splits[r]` from it; see `finished`."""
    options = _NOW if wait else _LATER
    return finished(pg.alltoall_base(received, sent, list(out_splits), list(in_splits), options), wait)


def finished(work: dist.Work | None, wait: bool) -> dist.Work | None:
    """With `wait`, come back when the work is done; what is left to wait for, if anything."""
    if wait and work is not None:
        work.wait()
    return None if wait else work
