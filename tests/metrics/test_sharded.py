"""Scores of fields that are cut are those of the whole field, and nothing is gathered for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpzoo.metrics import (
    contingency,
    crps,
    crps_field,
    ensemble_rmse,
    ensemble_spread,
    fractions_skill_score,
    radial_power_spectrum,
    rank_histogram,
    spread_skill_ratio,
)
from dpzoo.testing import assert_parity, distributed, grid_mesh, row_mesh

ROWS, COLUMNS = 13, 10
EVENTS = (-0.5, 0.5)


def counts(f: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    found = contingency(f[0], y, EVENTS, weights=w)
    return [found.hits, found.misses, found.false_alarms, found.correct_negatives, found.csi]


SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "crps": lambda f, y, w: crps(f, y, weights=w),
    "crps by channel": lambda f, y, w: crps(f, y, fair=False, dims=(1, 2)),
    "crps field": lambda f, y, w: crps_field(f, y),
    "rmse": lambda f, y, w: ensemble_rmse(f, y, weights=w),
    "spread": lambda f, y, w: ensemble_spread(f, weights=w),
    "ratio": lambda f, y, w: spread_skill_ratio(f, y),
    "ranks": lambda f, y, w: rank_histogram(f.round(), y.round(), weights=w),
    "counts": counts,
    "fss": lambda f, y, w: fractions_skill_score(f[0], y, EVENTS, 5, mask=w > 0),
    "fss, window of the grid": lambda f, y, w: fractions_skill_score(f[0], y, EVENTS, (13, 9)),
    "fss of members": lambda f, y, w: fractions_skill_score(f, y, EVENTS, 3, member_dim=0, dims=(1, 2)),
    "spectrum": lambda f, y, w: radial_power_spectrum(f, (3.0, 2.0))[1],
    "spectrum around missing data": lambda f, y, w: radial_power_spectrum(f, taper=True, mask=w > 0)[1],
    "tapered spectrum": lambda f, y, w: radial_power_spectrum(y, taper=True)[1],
}


def inputs() -> list[Tensor]:
    """Forecast (members, channels, rows, columns), truth, and weights of the points."""
    g = torch.Generator().manual_seed(0)
    shape = (2, ROWS, COLUMNS)
    weights = torch.rand(ROWS, COLUMNS, generator=g).sub(0.3).clamp(min=0)
    return [torch.randn(4, *shape, generator=g), torch.randn(shape, generator=g), weights]


def compare(name: str, dims: Any, sizes: Any, **options: Any) -> None:
    """`dims`: counted from the end, for one mesh axis or a tuple for several."""

    def of(ndim: int) -> Any:
        return tuple(d + ndim for d in dims) if isinstance(dims, tuple) else dims + ndim

    fields = inputs()
    assert_parity(SCORES[name], fields, [of(f.ndim) for f in fields], [sizes] * 3, strict=True, **options)


@distributed(ranks=3)
@pytest.mark.parametrize("name", SCORES)
def test_rows_cut_and_an_empty_rank(name: str):
    compare(name, -2, (8, 0, 5))


@distributed(ranks=2)
@pytest.mark.parametrize("name", SCORES)
def test_columns_cut(name: str):
    compare(name, -1, (7, 3))


@distributed(ranks=4)
@pytest.mark.parametrize("name", SCORES)
def test_both_cut(name: str):
    compare(name, (-2, -1), ((9, 4), (3, 7)), mesh=grid_mesh())


@distributed(ranks=4)
def test_second_row_of_ranks():
    compare("crps", -2, (4, 9), mesh=row_mesh())
    compare("fss", -2, (4, 9), mesh=row_mesh())


@distributed(ranks=3)
@pytest.mark.parametrize("name", ["crps", "rmse", "spread", "ranks", "fss of members"])
def test_the_members_are_cut(name: str):
    """A rank with its own members, the truth whole."""
    assert_parity(SCORES[name], inputs(), [0, None, None], [(1, 0, 3), None, None])


@distributed(ranks=2)
@pytest.mark.parametrize("name", ["crps", "counts", "fss", "ranks"])
def test_operands_that_are_cut_in_other_places_or_whole(name: str):
    fields = inputs()
    assert_parity(SCORES[name], fields, [2, 1, None], [(4, 9), (4, 9), None], strict=True)
    assert_parity(SCORES[name], fields, [2, 1, 0], [(4, 9), (6, 7), (10, 3)])
    assert_parity(SCORES[name], fields, [2, None, None], [(4, 9), None, None])
