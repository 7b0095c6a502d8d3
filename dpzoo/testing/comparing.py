"""Compare what the ranks of a sharded run hold with what one device computed; the first difference is an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpzoo.testing.assembling import ParityError, Piece, assemble, same_bits
from dpzoo.testing.cutting import Cut, owner_of
from dpzoo.testing.gathering import Coordinate

TOLERANCES = {
    torch.float64: (1e-10, 1e-11),
    torch.float32: (1.3e-6, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
}
"""Default (rtol, atol) by the dtype of the comparison; whole numbers and booleans must be equal."""


@dataclass(frozen=True)
class Limits:
    """Tolerances of a comparison: given ones, or the defaults of the dtype of what is compared."""

    dtype: torch.dtype | None = None
    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(rtol, atol) for values of `dtype`."""
        dtype = {torch.complex128: torch.float64, torch.complex64: torch.float32}.get(dtype, dtype)
        rtol, atol = TOLERANCES.get(dtype, (0.0, 0.0))
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


@dataclass(frozen=True)
class Held:
    """A tensor as one rank holds it; `full` is what the library's own gathering made of it there."""

    piece: Piece
    needs_grad: bool
    full: Tensor | None

    def __repr__(self) -> str:
        return f"a tensor of shape {self.piece.shape}"


@dataclass(frozen=True)
class Entry:
    """One thing that is compared: its name, its value, and how the ranks of a sharded run must hold it.

    `must_be` is "any", "plain" (complete on every rank) or "cut" (as `cut` says).
    """

    name: str
    value: Any
    must_be: str = "any"
    cut: Cut | None = None
    needs_grad: bool = False
    full: Tensor | None = None

    @property
    def kind(self) -> Any:
        """What must agree before a backward pass makes sense."""
        if not isinstance(self.value, Tensor):
            return self.name, type(self.value)
        return self.name, tuple(self.value.shape), self.value.dtype, self.needs_grad

    def packed(self) -> Any:
        """What travels to the other ranks."""
        if not isinstance(self.value, Tensor):
            return self.value
        return Held(Piece.of(self.value), self.needs_grad, None if self.full is None else self.full.detach().cpu())


def compare_all(
    expected: list[Entry],
    found: list[Entry],
    gathered: dict[Coordinate, list[tuple[str, Any]]],
    mesh_shape: tuple[int, ...],
    limits: Limits,
) -> None:
    """Compare every entry in order; `gathered` has the (name, packed value) pairs of every rank.

    Raises:
        ParityError: the same on every rank, for the first entry that differs.
    """
    __tracebackhide__ = True
    names = {at: [name for name, _ in got] for at, got in gathered.items()}
    compared = min(map(len, names.values()))
    _check_names([entry.name for entry in expected[:compared]], names)
    for i, (reference, entry) in enumerate(zip(expected, found, strict=False)):
        values = {at: got[i][1] for at, got in gathered.items()}
        if isinstance(reference.value, Tensor):
            _compare_tensor(reference, entry, values, mesh_shape, limits)
        else:
            _compare_value(reference, values, limits)
    if compared != len(expected):
        raise ParityError(f"the sharded run ended after {names}; one device gives {[entry.name for entry in expected]}")


def _check_names(expected: list[str], found: dict[Coordinate, list[str]]) -> None:
    for at, names in found.items():
        if names != expected:
            raise ParityError(f"outputs: one device gives {expected}, the rank at mesh coordinate {at} gives {names}")


def _compare_value(reference: Entry, values: dict[Coordinate, Any], limits: Limits) -> None:
    """Values that are not tensors are equal; floats (an `.item()`) are close, and the same on every rank."""
    name, expected = reference.name, reference.value
    first = next(iter(values.values()))
    for at, found in values.items():
        if not _equal(found, first):
            raise ParityError(f"{name}: the ranks disagree: {first!r} on the first, {found!r} at mesh coordinate {at}")
    for at, found in values.items():
        same = _equal(found, expected)
        if isinstance(expected, float) and isinstance(found, float):
            pair = torch.tensor([found, expected], dtype=torch.float64)
            rtol, atol = limits.of(limits.dtype or torch.float32)
            same = bool(torch.isclose(pair[0], pair[1], rtol=rtol, atol=atol, equal_nan=True))
        if not same:
            raise ParityError(f"{name}: found {found!r} at mesh coordinate {at}, one device gives {expected!r}")


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Held) or isinstance(right, Held):
        return isinstance(left, Held) and isinstance(right, Held)
    return type(left) is type(right) and bool(left == right or (left != left and right != right))


def _compare_tensor(
    reference: Entry, entry: Entry, values: dict[Coordinate, Any], mesh_shape: tuple[int, ...], limits: Limits
) -> None:
    name, expected = reference.name, reference.value.detach().cpu()
    for at, held in values.items():
        _check_kind(name, at, held, reference)
        _check_layout(name, at, held.piece, entry)
    pieces: dict[Coordinate, Piece] = {at: held.piece for at, held in values.items()}
    found = assemble(name, pieces, mesh_shape)
    any_piece = next(iter(pieces.values()))
    tolerance = limits.of(expected.dtype)
    _check_close(name, found, expected, any_piece.cut, tolerance)
    for at, held in values.items():
        if held.full is None:
            continue
        # The sum of partial values depends on the order of the ranks; everything else moves bits.
        if not any_piece.is_partial and not same_bits(held.full, found):
            raise ParityError(f"{name}: full_tensor() at mesh coordinate {at} is not what the shards make together")
        _check_close(f"full_tensor() of {name}", held.full, expected, any_piece.cut, tolerance)


def _check_kind(name: str, at: Coordinate, held: Any, reference: Entry) -> None:
    expected = reference.value
    if not isinstance(held, Held):
        raise ParityError(f"{name}: one device gives a tensor of shape {tuple(expected.shape)}, found {held!r} at {at}")
    if (held.piece.shape, held.piece.dtype) != (tuple(expected.shape), expected.dtype):
        raise ParityError(
            f"{name}: found shape {held.piece.shape} {held.piece.dtype} at mesh coordinate {at}, "
            f"one device gives {tuple(expected.shape)} {expected.dtype}"
        )
    if held.needs_grad != reference.needs_grad:
        raise ParityError(f"{name}: requires_grad is {held.needs_grad} at {at}, {reference.needs_grad} on one device")


def _check_layout(name: str, at: Coordinate, piece: Piece, entry: Entry) -> None:
    """A gradient is held as what it belongs to: plain for weights, cut like the input for inputs."""
    if entry.must_be == "plain" and piece.placements is not None:
        raise ParityError(f"{name}: should be a plain tensor, complete on every rank; at {at} it is cut: {piece.cut}")
    if entry.must_be == "cut" and piece.cut != entry.cut:
        found = "a plain tensor" if piece.cut is None else str(piece.cut)
        raise ParityError(f"{name}: should be a ShardTensor cut like the input, {entry.cut}; at {at} it is {found}")


def _check_close(name: str, found: Tensor, expected: Tensor, cut: Cut | None, limits: tuple[float, float]) -> None:
    exact = not (expected.is_floating_point() or expected.is_complex())
    wide = torch.complex128 if expected.is_complex() else expected.dtype if exact else torch.float64
    found, expected = found.to(wide), expected.to(wide)
    if exact:
        wrong = found != expected
    else:
        wrong = ~torch.isclose(found, expected, rtol=limits[0], atol=limits[1], equal_nan=True)
    if not wrong.any():
        return
    real = torch.complex128 if expected.is_complex() else torch.float64
    error = torch.where(wrong, (found.to(real) - expected.to(real)).abs().nan_to_num(nan=torch.inf), 0.0)
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape)) if error.ndim else ()
    where = "" if cut is None else f", in the shard of mesh coordinate {owner_of(at, cut)}"
    raise ParityError(
        f"{name} differs from one device: largest error {error.max().item():.3g} at index {at}{where}: "
        f"found {found[at].item()!r}, one device gives {expected[at].item()!r}; {int(wrong.sum())} of {wrong.numel()} "
        f"elements differ (rtol {limits[0]:g}, atol {limits[1]:g})"
    )
