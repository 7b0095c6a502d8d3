"""Fields of conditions, joined to what a network denoises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dpzoo.models.hub import HubMixin


def join_fields(batch_size: int, *fields: Tensor | None) -> Tensor | None:
    """Fields joined along the channels, in the order given; those of one sample serve all of the batch.

    Shape: each ``(B or 1, C_i, *grid)`` or None -> ``(B, sum of C_i, *grid)``, or None if there is none.

    Raises:
        ValueError: a field of another batch size or on another grid.
    """
    present = [f for f in fields if f is not None]
    for f in present:
        if f.shape[0] not in (1, batch_size) or f.shape[2:] != present[0].shape[2:]:
            grid, shapes = tuple(present[0].shape[2:]), [tuple(p.shape) for p in present]
            raise ValueError(
                f"fields of conditions must have {batch_size} samples (or 1) and one grid, that of the first, {grid}; "
                f"got {', '.join(map(str, shapes))}"
            )
    if not present:
        return None
    return torch.cat([f if f.shape[0] == batch_size else f.expand(batch_size, *f.shape[1:]) for f in present], dim=1)


class JoinedField(HubMixin, nn.Module):
    """Give a network that only knows one input a ``field`` of conditions, by joining the two.

    Args:
        network: Called as ``network(x, noise, ...)``; it must be built for the channels of both.

    Shape: ``x (B, C, *grid)``, ``field (B or 1, K, *grid)`` or None -> what the network gives for
    ``(B, C + K, *grid)``. Keys: ``network.*``.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, noise: Tensor, *conditions: Any, field: Tensor | None = None, **named: Any) -> Tensor:
        """Run the network on the joined fields."""
        joined = join_fields(x.shape[0], x, None if field is None else field.to(x.dtype))
        return self.network(joined, noise, *conditions, **named)
