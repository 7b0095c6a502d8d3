"""How tensors travel: as their bytes, so that every dtype works on every backend."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a tensor, row-major: its own memory where that is how it lies."""
    if t.is_complex() or t.is_neg():
        t = t.resolve_conj().resolve_neg()  # the bytes of a lazy conjugate are those of its base
    t = t.detach().contiguous()
    # as_strided: it may keep an odd stride where a dim has size 0 or 1, which a dtype view refuses.
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)
