"""From what the ranks hold to one word: assemble the shards, compare with the truth, name the outcome."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import torch

from tests.conformance.targets import Piece, readable


class Outcome(StrEnum):
    """What became of a case; the last six are failures."""

    EQUAL = "equal"
    GATHERED = "gathered"
    REFUSED = "refused"
    SKIPPED = "skipped"
    WRONG = "wrong"
    WRONG_GRAD = "wrong-grad"
    HANG = "hang"
    ONE_RANK = "one-rank"
    ERROR = "error"
    CRASH = "crash"


FAILURES = (Outcome.WRONG, Outcome.WRONG_GRAD, Outcome.HANG, Outcome.ONE_RANK, Outcome.ERROR, Outcome.CRASH)

_TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
}


def assemble(pieces: list[Piece]) -> tuple[list[torch.Tensor], str]:
    """The global tensor as each rank sees it, and what contradicts itself in the layout ("" if nothing)."""
    first = pieces[0]
    for rank, piece in enumerate(pieces):
        if (piece.kind, piece.dim, piece.shape) != (first.kind, first.dim, first.shape):
            return [], f"ranks disagree on the layout: {layout_text(first)} on 0, {layout_text(piece)} on {rank}"
        if piece.local_shapes is not None and piece.local_shapes[rank] != tuple(piece.local.shape):
            return [], f"rank {rank} holds {tuple(piece.local.shape)}, its spec says {piece.local_shapes[rank]}"
        if piece.local_dtype != piece.dtype:
            return [], f"rank {rank} holds {piece.local_dtype}, the tensor says {piece.dtype}"
    locals_ = [piece.local for piece in pieces]
    if first.kind == "shard":
        try:
            return [torch.cat(locals_, dim=first.dim)], ""
        except RuntimeError as error:
            return [], f"shards do not fit together: {error}"
    if first.kind.startswith("partial"):
        return [_reduce(locals_, first.kind.removeprefix("partial:"))], ""
    return locals_, ""


def layout_text(piece: Piece) -> str:
    """The layout in a few letters: ``S(2) of (4, 5)``."""
    kind = f"S({piece.dim})" if piece.kind == "shard" else piece.kind
    return f"{kind} of {piece.shape}"


def _reduce(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    reductions = {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.sum(0) / len(tensors),
        "max": lambda: stacked.amax(0),
        "min": lambda: stacked.amin(0),
        "product": lambda: stacked.prod(0),
    }
    return reductions[op]().to(tensors[0].dtype)


def difference(pieces: list[Any], truth: Any, how: str, slack: float | None = None) -> str:
    """What differs between the ranks' results and the truth, or "".

    ``how``: "value", "finite" (random results: shape, dtype, no new infinities, equal replicas) or "shape".
    ``slack``: the largest error allowed in a floating value; by default tolerances of the dtype.
    """
    if not isinstance(truth, torch.Tensor):
        return _number_difference(pieces, truth, how)
    if not all(isinstance(piece, Piece) for piece in pieces):
        return f"expected a tensor, got {[type(piece).__name__ for piece in pieces]}"
    views, fault = assemble(pieces)
    if fault:
        return fault
    layout = layout_text(pieces[0])
    for view in views:
        if tuple(pieces[0].shape) != tuple(truth.shape) or view.shape != truth.shape:
            return f"shape {tuple(view.shape)} labelled {layout}, truth {tuple(truth.shape)}"
        if pieces[0].dtype != truth.dtype:
            return f"dtype {pieces[0].dtype}, truth {truth.dtype} ({layout})"
        if view.layout != truth.layout:
            return f"memory layout {view.layout}, truth {truth.layout}"
        if how == "value" and (text := _value_difference(view, truth, slack)):
            return f"{text} ({layout})"
        if how == "finite" and view.is_floating_point() and view.isnan().any() and not truth.isnan().any():
            return f"NaN in a random result ({layout})"
    if how == "finite" and any(not torch.equal(view, views[0]) for view in views[1:]):
        return "replicas differ between ranks"
    return ""


def _value_difference(view: torch.Tensor, truth: torch.Tensor, slack: float | None) -> str:
    if truth.layout != torch.strided:
        view, truth = view.to_dense(), truth.to_dense()
    if truth.is_quantized:
        view, truth = view.dequantize(), truth.dequantize()
    truth = readable(truth)
    rtol, atol = _TOLERANCE.get(truth.dtype, (0.0, 0.0)) if slack is None else (0.0, slack)
    if torch.allclose(view, truth, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    if truth.dtype == torch.bool or not (truth.is_floating_point() or truth.is_complex()):
        return f"{int((view != truth).sum())} of {truth.numel()} values differ"
    error = (view - truth).abs()
    worst = float(error.nan_to_num(math.inf).max()) if error.numel() else 0.0
    return f"largest error {worst:.3g} where values reach {float(truth.abs().nan_to_num(0).max()):.3g}"


def _number_difference(pieces: list[Any], truth: Any, how: str) -> str:
    for rank, found in enumerate(pieces):
        if isinstance(found, Piece):
            return f"expected {type(truth).__name__}, rank {rank} has a tensor"
        if type(found) is not type(truth):
            return f"expected {type(truth).__name__}, rank {rank} has {type(found).__name__}"
        if how != "value":
            continue
        if isinstance(truth, (float, complex)):
            same = (
                found == truth or abs(found - truth) <= 1e-7 + 1e-7 * abs(truth) or (found != found and truth != truth)
            )
        else:
            same = found == truth
        if not same:
            return f"{truth!r} expected, rank {rank} has {found!r}"
    return ""
