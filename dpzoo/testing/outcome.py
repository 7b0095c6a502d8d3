"""How a task ended: a report per rank, and the errors that put all reports into one message."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Report:
    """How a task ended on one rank. `kind` is "returned", "raised" or "skipped"; `moment` orders failures over ranks.

    A rank that returned sends a second report when it has met the others: "at rest", or "raised".
    """

    kind: str
    value: bytes = b""
    text: str = ""
    error_type: str = ""
    moment: float = field(default_factory=time.monotonic)


class RankError(AssertionError):
    """A task raised on at least one rank.

    `tracebacks` maps every rank to its traceback, to the stack at which it was waiting, or to "returned normally";
    `error_types` maps the ranks that raised to the name of their exception's class. The message shows the earliest
    failure first.
    """

    def __init__(
        self, task: str, tracebacks: Mapping[int, str], error_types: Mapping[int, str], output: str = ""
    ) -> None:
        self.tracebacks, self.error_types = dict(tracebacks), dict(error_types)
        raised = ", ".join(f"rank {rank} {name}" for rank, name in error_types.items())
        headline = f"{task} raised on {len(error_types)} of {len(tracebacks)} ranks: {raised}"
        super().__init__(_compose(headline, tracebacks, output))


class RankTimeout(RankError):
    """A task did not return on every rank in time, and none raised.

    `waiting` lists the late ranks; `tracebacks` holds the Python stack of each of them.
    """

    def __init__(
        self, task: str, tracebacks: Mapping[int, str], waiting: Sequence[int], timeout: float, output: str = ""
    ) -> None:
        self.tracebacks, self.error_types = dict(tracebacks), {}
        self.waiting = tuple(waiting)
        headline = f"{task} did not return within {timeout:g} s on ranks {list(waiting)} of {len(tracebacks)}"
        AssertionError.__init__(self, _compose(headline, tracebacks, output))


def failure_of(
    name: str, reports: Mapping[int, Report], stacks: Mapping[int, str], timeout: float, output: str = ""
) -> BaseException:
    """The error for a task that did not return on all ranks; `stacks` has the last word of ranks without a report."""
    unsuccessful = [rank for rank in reports if reports[rank].kind in ("raised", "skipped")]
    failed = sorted(unsuccessful, key=lambda rank: reports[rank].moment)
    if failed and not stacks and all(reports[rank].kind == "skipped" for rank in failed):
        import pytest

        return pytest.skip.Exception(reports[failed[0]].text)
    texts = {rank: reports[rank].text for rank in failed} | dict(stacks)
    texts |= {rank: "returned normally" for rank in sorted(reports) if rank not in failed}
    if failed:
        return RankError(name, texts, {rank: reports[rank].error_type for rank in failed}, output)
    return RankTimeout(name, texts, sorted(stacks), timeout, output)


def _compose(headline: str, tracebacks: Mapping[int, str], output: str) -> str:
    """One section per distinct text, in the order of `tracebacks`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in tracebacks.items():
        ranks_of.setdefault(text.strip(), []).append(rank)
    sections = [
        f"--- {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} ---\n{text}"
        for text, ranks in ranks_of.items()
    ]
    return "\n".join([headline, *sections, *([output.rstrip()] if output.strip() else [])])
