"""The runner itself: it must see every kind of fault, and cut samples in every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conformance.cases import sizes_for
from tests.conformance.catalog import SEED, Entry, Sample
from tests.conformance.judge import FAILURES, difference
from tests.conformance.records import Records, kinds_text
from tests.conformance.table import render
from tests.conformance.targets import Piece
from tests.conformance.truth import compute_truth

ROOT = Path(__file__).resolve().parents[2]


def piece(local: torch.Tensor, kind: str = "shard", dim: int = 0, shape: tuple[int, ...] = (5, 2)) -> Piece:
    shapes = ((3, 2), (2, 2)) if kind == "shard" else None
    return Piece(local, kind, dim if kind == "shard" else -1, shape, shapes, local.dtype, local.dtype)


def halves(full: torch.Tensor) -> list[Piece]:
    return [piece(full[:3]), piece(full[3:])]


FULL = torch.arange(10, dtype=torch.float64).reshape(5, 2)


@pytest.mark.timeout(180)
def test_every_fault_is_seen() -> None:
    command = [sys.executable, "-m", "tests.conformance.faulty"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    seen = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert seen == {
        "none": "equal",
        "value": "wrong",
        "gradient": "wrong-grad",
        "one-rank": "one-rank",
        "one-rank-waits": "one-rank",
        "hang": "hang",
        "everywhere": "error",
        "refuses": "refused",
        "dies": "crash",
    }, done.stderr[-3000:]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 10])
def test_layouts_cover_the_dim(size: int, ranks: int) -> None:
    found = {name: sizes_for(name, size, ranks, parity) for name in ("even", "uneven", "empty") for parity in (0, 1)}
    assert found["empty"] is not None
    assert 0 in found["empty"]
    for sizes in found.values():
        assert sizes is None or (sum(sizes) == size and len(sizes) == ranks)
    if size >= 5:
        assert found["uneven"] is not None
        assert max(found["uneven"]) - min(found["uneven"]) > 1


def test_right_shards_differ_in_nothing() -> None:
    assert difference(halves(FULL), FULL, "value") == ""


@pytest.mark.parametrize(
    ("pieces", "truth", "words"),
    [
        (halves(FULL + torch.eye(5, 2)), FULL, "largest error 1"),
        ([piece(FULL[:3]), piece(FULL[3:], dim=1)], FULL, "disagree"),
        ([piece(FULL[:3]), piece(FULL[2:])], FULL, "its spec says"),
        (halves(FULL), FULL.float(), "dtype"),
        (halves(FULL), FULL[:, :1], "shape"),
        ([piece(FULL, "replicate"), piece(FULL + 1, "replicate")], FULL, "largest error 1"),
        ([piece(FULL, "plain"), piece(FULL * float("nan"), "plain")], FULL, "largest error inf"),
        ([2.0, 3.0], 2.0, "rank 1 has 3.0"),
        ([True, 1], True, "expected bool"),
        ([float("nan"), 2.0], 2.0, "rank 0 has nan"),
    ],
)
def test_differences_are_named(pieces: list[object], truth: object, words: str) -> None:
    assert words in difference(pieces, truth, "value")


@pytest.mark.parametrize(
    ("call", "how"),
    [
        (lambda x: x + 1, "value"),
        (lambda x: x + torch.rand(2), "finite"),
        (lambda x: torch.dropout(x, 0.0, True), "value"),
        # The next two seeds happen to give what the first gave.
        (lambda x: x + (torch.initial_seed() > SEED + 2) * (torch.rand(()) >= 0), "finite"),
    ],
)
def test_random_results_are_told_apart(call: Callable[..., torch.Tensor], how: str) -> None:
    entry = Entry("made up", "errors", "pointwise", None)
    assert compute_truth(entry, Sample(call, (torch.ones(3, 2),), {})).how == how


def test_random_replicas_must_be_equal() -> None:
    same = [piece(FULL, "replicate"), piece(FULL.clone(), "replicate")]
    assert difference(same, FULL * 7, "finite") == ""
    other = [piece(FULL, "replicate"), piece(FULL + 1, "replicate")]
    assert "replicas differ" in difference(other, FULL * 7, "finite")


def test_records_resume_and_render(tmp_path: Path) -> None:
    base = {"op": "exp", "variant": "op", "family": "pointwise"}
    records = Records(tmp_path, "dpzoo")
    records.add({**base, "key": "exp|op|0|0|even|2", "outcome": "equal", "detail": ""})
    records.add({**base, "key": "exp|op|0|0|empty|2", "outcome": "wrong", "detail": "largest error 3"})
    again = Records(tmp_path, "dpzoo")
    assert again.finished("none") == {"exp|op": {"exp|op|0|0|even|2", "exp|op|0|0|empty|2"}}
    assert again.finished("failed") == {"exp|op": {"exp|op|0|0|even|2"}}
    assert again.finished("all") == {}
    assert "largest error 3" in kinds_text(again.by_key.values())
    page = render(list(again.by_key.values()), [("arange", "op")])
    assert "| `exp` | 2 | 1 | 0 | 0 | 1 | **wrong 1** |" in page
    assert "arange" in page
    assert "wrong" in FAILURES
