"""What a run tells: a line of JSON per report, lines on the console, a progress bar, and what the trackers take.

Only the first rank writes. A run that is resumed first drops the lines that come after its checkpoint, so the file
always tells one curve.
"""

import json
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from dpzoo.train.config import TrainConfig
from dpzoo.train.trackers import Tracker, open_trackers

FILE = "metrics.jsonl"


class Journal:
    """Reports of one run.

    Args:
        folder: where `metrics.jsonl` lies.
        steps: of the whole run, for the bar.
        start: step at which this run begins; later lines of an earlier run are dropped.
        active: False on all ranks but the first.
    """

    def __init__(self, folder: Path, steps: int, start: int, config: TrainConfig, active: bool = True) -> None:
        self._active = active
        self._bar: Any = None
        self._trackers: list[Tracker] = []
        self._file: TextIO | None = None
        self._told = time.monotonic()
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        keep_until(folder / FILE, start)
        self._file = (folder / FILE).open("a")
        self._bar = _progress_bar(steps, start) if config.progress_bar else None
        self._trackers = open_trackers(config, folder, start)

    def report(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Write `values` of step `step`; `kind` is "train" or "validation"."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **values}) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.report(kind, step, values)
        if self._bar is not None and kind == "train":
            self._bar.set_postfix_str(f"epoch {epoch} loss {values['loss']:.4g}", refresh=False)
        seconds = time.monotonic() - self._told
        if kind != "train" or (self._bar is None and seconds > 10):
            self.say(f"{kind}, step {step}, epoch {epoch}: " + ", ".join(f"{n} {v:.4g}" for n, v in values.items()))

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        """A line on the console."""
        if self._active:
            self._told = time.monotonic()
            (self._bar.write if self._bar is not None else print)(text)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for closable in (self._bar, *self._trackers, self._file):
            if closable is not None:
                closable.close()


def read_journal(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The reports of one kind, in order."""
    rows = map(json.loads, (folder / FILE).read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def keep_until(file: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a last line that was not written to its end."""
    if not file.exists():
        return
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if kept != lines:
        file.write_text("".join(kept))


def _progress_bar(steps: int, start: int) -> Any:
    try:
        bar = import_module("tqdm").tqdm(total=steps, initial=start, unit="step", disable=None, dynamic_ncols=True)
    except ImportError:
        return None
    return None if bar.disable else bar
