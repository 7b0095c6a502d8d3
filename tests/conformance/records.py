"""Outcomes on disk: one JSON line per case, appended as it comes; the last line of a key counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.conformance.judge import FAILURES

Record = dict[str, Any]


class Records:
    """The outcomes of one target, in ``folder/<target>.jsonl``."""

    def __init__(self, folder: Path, target: str) -> None:
        self.path = folder / f"{target}.jsonl"
        self.by_key: dict[str, Record] = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                if line.endswith("}"):
                    record = json.loads(line)
                    self.by_key[record["key"]] = record

    def add(self, record: Record) -> None:
        """Remember and append."""
        self.by_key[record["key"]] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def finished(self, redo: str) -> dict[str, set[str]]:
        """Keys per ``name|variant`` that need not run again; ``redo``: each word after "none" takes in more."""
        again = {
            "gathered": (*FAILURES, "refused", "gathered"),
            "none": (),
            "failed": FAILURES,
            "refused": (*FAILURES, "refused"),
            "all": None,
        }[redo]
        keys: dict[str, set[str]] = {}
        if again is None:
            return keys
        for key, record in self.by_key.items():
            if record["outcome"] not in again:
                keys.setdefault(f"{record['op']}|{record['variant']}", set()).add(key)
        return keys


def kinds_text(records: Iterable[Record], limit: int = 40, outcomes: Sequence[str] = FAILURES) -> str:
    """Cases with these outcomes grouped by what was seen, the most frequent first, each with one key that shows it."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record["outcome"] in outcomes:
            groups.setdefault((record["outcome"], _shape_of(record["detail"])), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    lines = []
    for (outcome, _), members in ordered[:limit]:
        ops = Counter(record["op"] for record in members)
        names = ", ".join(f"{op} {n}" for op, n in ops.most_common(6)) + (", ..." if len(ops) > 6 else "")
        example = min(members, key=lambda record: len(record["key"]))
        lines.append(f"{len(members):5d} {outcome}: {example['detail']}\n      {names}\n      e.g. {example['key']}")
    if len(ordered) > limit:
        lines.append(f"... and {len(ordered) - limit} other kinds")
    return "\n".join(lines)


def _shape_of(detail: str) -> str:
    """The detail without its numbers, and of a gather only the op."""
    return re.sub(r"-?\d[\d.]*(e[+-]?\d+)?", "#", re.split(" in | has no rule", detail)[0])[:90]
