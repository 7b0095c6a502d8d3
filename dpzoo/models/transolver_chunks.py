"""Transolver on more points than fit in memory, with the numbers of one shot.

Points meet only in the slice sums of each block, and sums of chunks add up. So each block is two passes over the
chunks: add up the sums, then, with the tokens that follow from them, compute the features of each chunk. What is held
at once is a chunk's slice weights (points x heads x slices, most of the memory of one shot) instead of those of all
points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpzoo.models.transolver import Transolver, TransolverBlock


@torch.no_grad()
def predict_in_chunks(
    model: Transolver,
    x: Tensor,
    fx: Tensor | None = None,
    time: Tensor | None = None,
    condition: Tensor | None = None,
    *,
    chunk_size: int,
    store_features: bool = True,
    interleave: bool = False,
) -> Tensor:
    """``model(x, fx, time, condition)`` without gradients, ``chunk_size`` points at a time.

    Chunks run on the model's device; inputs, features between blocks and the result stay on the device of ``x``, so
    that a sample in main memory can be larger than the accelerator.

    Args:
        store_features: Keep the features of all points between blocks (``embed_dim`` numbers a point). Without it only
            inputs, outputs and the slices' tokens are held, and features are computed again from the inputs for each
            block: about ``(depth + 1) / 2`` times the work.
        interleave: Take every n-th point into a chunk instead of neighbours in memory. For points that are cut over
            ranks: every rank then has its share of each chunk.

    Shape: as in :class:`~dpzoo.models.transolver.Transolver`, points without order.

    Raises:
        ValueError: a structured model (its convolutions need neighbours), a model that is training or draws noise, or a
            chunk size below 1.
    """
    _check(model, chunk_size)
    if x.shape[1] == 0:
        return model(x, fx, time, condition)
    n, device = x.shape[1], next(model.parameters()).device
    per_point = fx is not None and fx.ndim == x.ndim
    shared = [None if t is None else t.to(device) for t in (fx if not per_point else None, time, condition)]
    places = _places(n, chunk_size, interleave)

    def embedded(at: slice) -> Tensor:
        chunk_fx = fx[:, at].to(device) if per_point and fx is not None else shared[0]
        return model.embed(x[:, at].to(device), chunk_fx, *shared[1:])

    if store_features:
        last = _keeping_features(model, [embedded(at).to(x.device) for at in places], device)
    else:
        last = _from_the_inputs(model, places, embedded)
    out: Tensor | None = None
    for at, part in zip(places, last, strict=True):
        if out is None:
            out = torch.zeros_like(x[..., :1], dtype=part.dtype).repeat(1, 1, model.out_dim)
        out[:, at] = part.to(x.device)
    assert out is not None
    return out


def _check(model: Transolver, chunk_size: int) -> None:
    if model.grid is not None:
        raise ValueError("predict_in_chunks: a structured model needs the neighbours of each point; run it in one shot")
    if model.training or any(block.Attn.is_noisy for block in _blocks(model)):
        raise ValueError(
            "predict_in_chunks: the model draws random numbers; call model.eval() (slice_noise must not be 'always')"
        )
    if chunk_size < 1:
        raise ValueError(f"predict_in_chunks: chunk_size must be at least 1, got {chunk_size}")


def _places(n: int, chunk_size: int, interleave: bool) -> list[slice]:
    count = -(-n // chunk_size)
    if interleave:
        return [slice(i, None, count) for i in range(count)]
    return [slice(i, min(i + chunk_size, n)) for i in range(0, n, chunk_size)]


def _keeping_features(model: Transolver, features: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    for block in _blocks(model):
        tokens = _tokens(block, (block.slice_sums(h.to(device)) for h in features))
        if block.is_last:
            yield from (block.with_tokens(h.to(device), tokens) for h in features)
        else:
            for i, h in enumerate(features):
                features[i] = block.with_tokens(h.to(device), tokens).to(h.device)


def _from_the_inputs(
    model: Transolver, places: Sequence[slice], embedded: Callable[[slice], Tensor]
) -> Iterator[Tensor]:
    tokens: list[Tensor] = []

    def features(at: slice) -> Tensor:
        h = embedded(at)
        for block, known in zip(_blocks(model), tokens, strict=False):
            h = block.with_tokens(h, known)
        return h

    for block in _blocks(model):
        tokens.append(_tokens(block, (block.slice_sums(features(at)) for at in places)))
    yield from (features(at) for at in places)


def _blocks(model: Transolver) -> list[TransolverBlock]:
    return cast("list[TransolverBlock]", list(model.blocks))


def _tokens(block: TransolverBlock, sums: Iterator[Tensor]) -> Tensor:
    total: Tensor | None = None
    for part in sums:
        total = part if total is None else total + part
    assert total is not None
    return block.Attn.attend(total)
