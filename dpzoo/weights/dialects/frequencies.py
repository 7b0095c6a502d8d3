"""Tables of frequencies that others keep in a file and our models compute: from 1 down to 1 / 10000, geometrically."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dpzoo.weights.dialects.lazy import Computed, Lazy
from dpzoo.weights.dialects.rule import Rule
from dpzoo.weights.source import WeightsMismatchError


def frequencies(count: int, endpoint: bool = False) -> torch.Tensor:
    """The table ``(count,)``; without ``endpoint`` the last one is a step above 1 / 10000."""
    return (1 / 10000) ** (torch.arange(count, dtype=torch.float32) / max(count - endpoint, 1))


def with_frequencies(theirs: str, ours: str, table: str, endpoint: bool = False, both_ways: bool = True) -> Rule:
    """A layer that reads sines and cosines of them: there with a table beside it, here alone.

    Args:
        theirs, ours: The layer's weight, ``(channels, 2 * count)``.
        table: Their name of the table.
    """

    def check(_: Lazy, found: Lazy) -> None:
        wanted = frequencies(found.shape[0], endpoint)
        if not torch.allclose(found.read().float(), wanted, rtol=1e-3, atol=0):
            raise WeightsMismatchError(
                f"{table}: other frequencies than the model computes, {found.shape[0]} from 1 to 1 / 10000 "
                f"({'with' if endpoint else 'without'} the last)"
            )

    def add_table(weight: Lazy) -> Sequence[Lazy]:
        count = weight.shape[1] // 2
        return weight, Computed((count,), (weight,), _table(count, endpoint))

    return Rule(
        (theirs, table),
        (ours,),
        lambda weight, _: (weight,),
        add_table,
        kind="merged",
        detail="the table of frequencies is computed",
        check=check,
        both_ways=both_ways,
    )


def _table(count: int, endpoint: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: frequencies(count, endpoint)
