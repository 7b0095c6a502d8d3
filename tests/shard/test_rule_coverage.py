"""Every registered rule is tested by at least one row: a row names the rules it tests in `covers`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import dpzoo.shard  # noqa: F401  (registers the rules)
from dpzoo.shard.registry import RULES
from dpzoo.testing import OpCase

HERE = Path(__file__).parent / "rules"


def _rows() -> Iterator[OpCase]:
    for file in sorted(HERE.glob("test_*.py")):
        module = importlib.import_module(f"tests.shard.rules.{file.stem}")
        for value in vars(module).values():
            if isinstance(value, (list, tuple)):
                yield from (row for row in value if isinstance(row, OpCase))


def test_every_rule_is_covered_by_a_row():
    covered = {name for row in _rows() for name in row.covers}
    missing = sorted(set(RULES) - covered)
    assert not missing, f"{len(missing)} rules have no OpCase with covers=(name,): {', '.join(missing)}"


def test_rows_cover_rules_that_exist():
    unknown = sorted({f"{name} ({row.name})" for row in _rows() for name in row.covers if name not in RULES})
    assert not unknown, f"covers names no rule: {', '.join(unknown)}"
