"""Attention of this rank's queries to keys that come block by block, by global index.

Queries and keys are known by the global intervals they cover, so that a causal mask, the columns of an explicit mask
and the numbers of dropout follow from where a block lies. What a causal mask hides is not computed: a pair of intervals
falls into rectangles that are seen whole and one square on the diagonal.

Outputs of blocks are joined by their log-sum-exp in float32 or wider (Milakov and Gimelshein 2018, arXiv:1805.02867):
with `w = exp(l2 - logaddexp(l1, l2))` the output is `lerp(o1, o2, w)`, which is safe where a block saw nothing.

Shapes: as in `attention_block.py`; rows of q lie in the order of `rows`, those of a block in the order of `columns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from dpzoo.shard.kernels.attention_block import NEVER, Scoring, block_backward, block_forward, wide
from dpzoo.shard.kernels.attention_dropout import Dropout
from dpzoo.shard.partition import Interval

Intervals = Sequence[Interval]


@dataclass(frozen=True)
class Rules:
    """What holds for all queries and keys of a call.

    Attributes:
        scale: factor of the products.
        causal: query i sees keys j <= i, by global index.
        dropout: which weights are dropped.
    """

    scale: float
    causal: bool = False
    dropout: Dropout | None = None

    @cached_property
    def plain(self) -> Scoring:
        """The scoring of what is seen whole, without mask and dropout."""
        return Scoring(self.scale)

    @cached_property
    def on_diagonal(self) -> Scoring:
        """That of a square on the diagonal."""
        return Scoring(self.scale, causal=True)


class _Part(NamedTuple):
    """A rectangle of scores: local rows, local columns, and where it begins in the global matrix."""

    rows: slice
    columns: slice
    row_at: int
    column_at: int
    diagonal: bool


def parts(rows: Intervals, columns: Intervals, causal: bool) -> Iterator[_Part]:
    """What has to be computed; empty intervals and hidden pairs give nothing."""
    at_row = 0
    for a, b in rows:
        at_column = 0
        for c, d in columns:
            for lo, hi, left, right, diagonal in _rectangles(a, b, c, d, causal):
                yield _Part(
                    slice(at_row + lo - a, at_row + hi - a),
                    slice(at_column + left - c, at_column + right - c),
                    lo,
                    left,
                    diagonal,
                )
            at_column += d - c
        at_row += b - a


def _rectangles(a: int, b: int, c: int, d: int, causal: bool) -> Iterator[tuple[int, int, int, int, bool]]:
    if a >= b or c >= d:
        return
    if not causal:
        yield a, b, c, d, False
        return
    top, bottom = max(a, c), min(b, d)  # rows on the diagonal
    if top < bottom:
        if c < top:
            yield top, bottom, c, top, False
        yield top, bottom, top, bottom, True
    if max(a, d) < b:  # rows below the diagonal see the whole block
        yield max(a, d), b, c, d, False


class Forward:
    """Collects the output and log-sum-exp of this rank's queries."""

    def __init__(
        self, q: Tensor, rows: Intervals, rules: Rules, mask: Tensor | None = None, mask_from: int = 0
    ) -> None:
        """`mask` has this rank's rows (or one) and the columns from the global index `mask_from` on (or one)."""
        self._q, self._rows, self._rules, self._mask, self._mask_from = q, rows, rules, mask, mask_from
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, k: Tensor, v: Tensor, columns: Intervals) -> None:
        """Attend to a block of keys that covers the global intervals `columns`."""
        if not self._q.shape[0] * self._q.shape[1]:
            return
        for part in parts(self._rows, columns, self._rules.causal):
            q = _taken(self._q, part.rows)
            scoring = _scoring(part, self._rules, self._mask, self._mask_from, q)
            out, lse = block_forward(q, _taken(k, part.columns), _taken(v, part.columns), scoring)
            self._join(part.rows, out, lse)

    def _join(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self._out is None or self._lse is None:
            if out.shape[-2] == self._q.shape[-2]:
                self._out, self._lse = out, lse
                return
            self._out = wide(out).new_zeros((*self._q.shape[:-1], out.shape[-1]))
            self._lse = lse.new_full(self._q.shape[:-1], NEVER)
        self._out = wide(self._out)
        so_far, known = self._out[..., rows, :], self._lse[..., rows]
        total = torch.logaddexp(known, lse)
        weight = (lse - total.masked_fill(total == NEVER, 0.0)).exp()
        so_far.lerp_(wide(out), weight.unsqueeze(-1).to(so_far.dtype))
        known.copy_(total)

    def result(self, width: int) -> tuple[Tensor, Tensor]:
        """Output (b, h, n, width) in float32 or wider if blocks were joined, and log-sum-exp (b, h, n)."""
        if self._out is None or self._lse is None:
            empty = wide(self._q)
            return empty.new_zeros((*self._q.shape[:-1], width)), empty.new_full(self._q.shape[:-1], NEVER)
        return self._out, self._lse


class Backward:
    """Collects the gradients of this rank's queries, and gives those of each block of keys."""

    def __init__(
        self,
        g: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        rows: Intervals,
        rules: Rules,
        mask: Tensor | None = None,
        mask_grad: bool = False,
        mask_from: int = 0,
    ) -> None:
        self._g, self._q, self._out, self._lse = g, q, out, lse
        self._rows, self._rules, self._mask, self._mask_from = rows, rules, mask, mask_from
        self._dq: Tensor | None = None
        self.dmask = torch.zeros_like(wide(mask)) if mask_grad and mask is not None else None

    @property
    def dq(self) -> Tensor:
        """The gradient of q; in float32 or wider if blocks were joined."""
        return torch.zeros_like(wide(self._q)) if self._dq is None else self._dq

    def block(self, k: Tensor, v: Tensor, columns: Intervals) -> tuple[Tensor, Tensor]:
        """Gradients of a block, from this rank's queries; in float32 or wider if parts were joined."""
        dk: Tensor | None = None
        dv: Tensor | None = None
        if self._q.shape[0] * self._q.shape[1]:
            for part in parts(self._rows, columns, self._rules.causal):
                dq_part, dk_part, dv_part = self._part(part, k, v)
                self._dq = _added(self._dq, self._q, part.rows, dq_part)
                dk, dv = _added(dk, k, part.columns, dk_part), _added(dv, v, part.columns, dv_part)
        return torch.zeros_like(wide(k)) if dk is None else dk, torch.zeros_like(wide(v)) if dv is None else dv

    def _part(self, part: _Part, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        g, q, out = (_taken(t, part.rows) for t in (self._g, self._q, self._out))
        scoring = _scoring(part, self._rules, self._mask, self._mask_from, q)
        dq, dk, dv, dmask = block_backward(
            g, q, _taken(k, part.columns), _taken(v, part.columns), out, self._lse[..., part.rows], scoring,
            self.dmask is not None,
        )  # fmt: skip
        if dmask is not None:
            assert self.dmask is not None
            _mask_part(self.dmask, part, self._mask_from).add_(dmask)
        return dq, dk, dv


def _taken(t: Tensor, rows: slice) -> Tensor:
    """Some rows; all of them without a view."""
    return t if rows.stop - rows.start == t.shape[-2] else t[..., rows, :]


def attend(
    q: Tensor, k: Tensor, v: Tensor, rows: Intervals, columns: Intervals, rules: Rules, mask: Tensor | None, at: int = 0
) -> tuple[Tensor, Tensor]:
    """Output (in the dtype of q) and log-sum-exp of one block alone; `at`: the first column of the mask."""
    if _is_one_part(q, k, rules) and mask is None:
        return block_forward(q, k, v, rules.plain)
    found = Forward(q, rows, rules, mask, at)
    found.add(k, v, columns)
    out, lse = found.result(v.shape[-1])
    return out.to(q.dtype), lse


def attend_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Intervals,
    columns: Intervals,
    rules: Rules,
    mask: Tensor | None,
    mask_grad: bool,
    at: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attend`, given the output and log-sum-exp over all keys; in float32 or wider if joined."""
    if _is_one_part(q, k, rules) and mask is None:
        return block_backward(g, q, k, v, out, lse, rules.plain)
    work = Backward(g, q, out, lse, rows, rules, mask, mask_grad, at)
    dk, dv = work.block(k, v, columns)
    return work.dq, dk, dv, work.dmask


def _is_one_part(q: Tensor, k: Tensor, rules: Rules) -> bool:
    return not rules.causal and rules.dropout is None and q.dtype in _NOT_HALF and 0 not in q.shape and 0 not in k.shape


_NOT_HALF = (torch.float32, torch.float64)  # what is written out would come back wider


def _added(total: Tensor | None, like: Tensor, at: slice, share: Tensor) -> Tensor:
    """`total` with a share of some rows; a first share of all rows is the total."""
    if total is None:
        if share.shape[-2] == like.shape[-2]:
            return share
        total = torch.zeros_like(like, dtype=wide(share).dtype)
    total = wide(total)
    total[..., at, :].add_(share)
    return total


def _scoring(part: _Part, rules: Rules, mask: Tensor | None, mask_from: int, like: Tensor) -> Scoring:
    if mask is None and rules.dropout is None:
        return rules.on_diagonal if part.diagonal else rules.plain
    factors = None
    if rules.dropout is not None:
        like = wide(like[..., :0, :0])
        drop, width = rules.dropout, part.columns.stop - part.columns.start

        def factors(lo: int, hi: int) -> Tensor:
            columns = (part.column_at, part.column_at + width)
            return drop.factors((part.row_at + lo, part.row_at + hi), columns, like)

    own = None if mask is None else _mask_part(mask, part, mask_from)
    return Scoring(rules.scale, own, part.diagonal, factors)


def _mask_part(mask: Tensor, part: _Part, mask_from: int) -> Tensor:
    if mask.shape[-2] > 1:
        mask = mask[..., part.rows, :]
    if mask.shape[-1] > 1:
        lo = part.column_at - mask_from
        mask = mask[..., lo : lo + part.columns.stop - part.columns.start]
    return mask
