"""Run the conformance cases: ``python -m tests.conformance --help``."""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.conformance.cases import LAYOUTS
from tests.conformance.catalog import AUTOCAST, Entry, entries
from tests.conformance.judge import FAILURES, Outcome
from tests.conformance.pool import Pool
from tests.conformance.records import Records, kinds_text
from tests.conformance.table import render
from tests.conformance.worker import Selection

ROOT = Path(__file__).resolve().parents[2]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--target", default="dpzoo", choices=("dpzoo", "dtensor"), help="the library under test")
    parser.add_argument("--autocast", choices=tuple(AUTOCAST), help="float32 inputs under torch.autocast")
    parser.add_argument("--narrow", action="store_true", help="with --autocast: the first tensor has that type already")
    parser.add_argument("--op", action="append", default=[], help="regular expression on the whole name; repeatable")
    parser.add_argument("--variant", action="append", default=[], help="op, inplace, train, eval, ...; repeatable")
    parser.add_argument("--family", action="append", default=[], help="a family of the table; repeatable")
    parser.add_argument("--layout", action="append", default=[], choices=LAYOUTS, help="repeatable; default all")
    parser.add_argument("--ranks", default="2,3", help="comma-separated rank counts")
    parser.add_argument("--limit", type=int, default=12, help="samples per entry")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="one case in N, always the same ones")
    parser.add_argument("--budget", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for one case")
    redo = ("none", "failed", "refused", "gathered", "all")
    parser.add_argument("--redo", default="none", choices=redo, help="finished cases to run again")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "conformance", help="where outcomes are kept")
    parser.add_argument("--table", type=Path, help="where the page goes; default docs/op_table.md after a full run")
    parser.add_argument("--kinds", type=int, default=15, help="kinds of failure that the summary names")
    outcomes = [str(outcome) for outcome in Outcome]
    parser.add_argument("--explain", action="append", choices=outcomes, help="outcomes to group; default failures")
    parser.add_argument("--report", action="store_true", help="run nothing: summary and table of what is recorded")
    parser.add_argument("--verbose", action="store_true", help="a line per case")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run, record, summarise.  Exit status 1 when a case of this selection failed."""
    options = parse(arguments)
    chosen = choose(entries(AUTOCAST.get(options.autocast), options.narrow), options)
    if not chosen:
        sys.exit("no entry of the database matches --op, --variant and --family")
    modes = [options.autocast or "", "narrow" if options.narrow else ""]
    records = Records(options.build, "-".join([options.target, *filter(None, modes)]))
    if not options.report:
        run(chosen, options, records)
    names = {(entry.name, entry.variant) for entry in chosen}
    ranks = tuple(f"|{count}" for count in options.ranks.split(","))
    mine = [
        record
        for key, record in records.by_key.items()
        if (record["op"], record["variant"]) in names and key.endswith((*ranks, "|-"))
    ]
    print(kinds_text(mine, options.kinds, options.explain or FAILURES))
    counts = Counter(record["outcome"] for record in mine)
    print(", ".join(f"{name} {count}" for name, count in counts.most_common()) or "no case ran")
    table = options.table or (ROOT / "docs" / "op_table.md" if _whole(options) else None)
    if table is not None:
        done = {(record["op"], record["variant"]) for record in records.by_key.values()}
        missing = [(entry.name, entry.variant) for entry in chosen if (entry.name, entry.variant) not in done]
        table.write_text(render(mine, missing))
    return int(any(counts[name] for name in FAILURES))


def choose(found: list[Entry], options: argparse.Namespace) -> list[Entry]:
    """The entries that the filters leave."""
    return [
        entry
        for entry in found
        if (not options.family or entry.family in options.family)
        and (not options.variant or entry.variant in options.variant)
        and (not options.op or any(re.fullmatch(pattern, entry.name) for pattern in options.op))
    ]


def run(chosen: list[Entry], options: argparse.Namespace, records: Records) -> None:
    """Every selected case that is not finished yet, until the budget is spent."""
    importlib.import_module("dpzoo.shard" if options.target == "dpzoo" else "torch.distributed.tensor")
    gc.collect()
    gc.freeze()
    started, count = time.monotonic(), 0
    finished = records.finished(options.redo)
    layouts = tuple(options.layout) or LAYOUTS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the ranks go as well
    for ranks in (int(text) for text in options.ranks.split(",")):
        pool = Pool(options.target, ranks, {entry.key: entry for entry in chosen}, options.timeout)
        try:
            for index, entry in enumerate(chosen):
                spent = time.monotonic() - started
                if spent > options.budget:
                    print(f"budget spent at {entry.name} on {ranks} ranks; run again to go on")
                    break
                skip = frozenset(finished.get(entry.key, ()))
                before, entry_started = count, time.monotonic()
                for record in pool.run(entry, Selection(options.limit, options.sample, layouts, skip)):
                    records.add(record)
                    count += 1
                    if options.verbose:
                        print(record["outcome"], record["key"], record["detail"], flush=True)
                if count > before:
                    rate = (count - before) / (time.monotonic() - entry_started)
                    place = f"[{ranks} ranks {index + 1}/{len(chosen)} {spent:.0f}s]"
                    print(f"{place} {entry.key}: {count - before} cases, {rate:.0f}/s", flush=True)
        finally:
            pool.stop()
    print(f"{count} cases in {time.monotonic() - started:.0f} s")


def _whole(options: argparse.Namespace) -> bool:
    some = options.op or options.variant or options.family or options.sample > 1 or options.autocast
    return options.target == "dpzoo" and not some


if __name__ == "__main__":
    sys.exit(main())
