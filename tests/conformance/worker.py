"""One rank: run the cases of an entry, in step with the other ranks, and judge them together.

After the forward, and again after the backward, the ranks exchange what they hold (or what they raised) over pipes,
not over the process group under test.  So every rank takes the same decision, and an error on one rank is seen before
the next case.
"""

from __future__ import annotations

import copy
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.conformance.cases import Case, cases_of, primary, shardable
from tests.conformance.catalog import SEED, Entry, Sample
from tests.conformance.judge import Outcome, difference
from tests.conformance.targets import Target
from tests.conformance.truth import Run, Truth, compute_truth, convert, make_run

Verdict = tuple[Outcome, str]


@dataclass
class Raised:
    """An exception of the target on one rank."""

    kind: str
    refused: bool
    text: str


@dataclass
class Held:
    """What one rank holds after the forward or the backward: pieces of tensors, other values as they are."""

    values: list[Any]
    spec: str = ""
    needs_grad: tuple[bool, ...] = ()
    gathered: str = ""


@dataclass(frozen=True)
class Selection:
    """Which cases of an entry to run."""

    limit: int
    every: int
    layouts: tuple[str, ...]
    skip: frozenset[str]


class Rank:
    """Runs cases on one rank of ``target``'s mesh; ``peers`` are pipes to the other ranks (None to itself)."""

    def __init__(self, target: Target, peers: list[Connection | None], mark: Callable[[str, str], None]) -> None:
        self.target = target
        self.peers = peers
        self.ranks = target.mesh.size()
        self.mark = mark

    def run_entry(self, entry: Entry, selection: Selection, report: Callable[[dict[str, Any]], None]) -> None:
        """Run the entry's cases that are selected and report one record each."""
        samples = entry.samples()
        layouts = tuple(name for name in selection.layouts if name in self.target.layouts)
        truths: dict[int, Truth] = {}
        for case in cases_of(entry, samples, selection.limit, self.ranks, layouts):
            if case.key in selection.skip or not case.chosen(selection.every):
                continue
            self.mark(case.key, "truth")
            if case.sample not in truths:
                truths = {case.sample: _quiet(lambda i=case.sample: compute_truth(entry, samples[i]))}
            outcome, detail = self.run_case(entry, samples[case.sample], truths[case.sample], case)
            report(_record(entry, samples[case.sample], case, outcome, detail))

    def run_case(self, entry: Entry, sample: Sample, truth: Truth, case: Case) -> Verdict:
        """Forward, exchange, backward, exchange."""
        run: list[Run] = []
        mine = self._attempt(case, lambda: self._forward(entry, sample, truth, case, run))
        everyone = self._exchange(mine)
        if entry.variant == "errors":
            return _judge_bad_input(everyone, truth)
        verdict = _judge_raised(everyone, truth) or _judge_forward(everyone, truth)
        if verdict is not None:
            return verdict
        gathered = next((held.gathered for held in everyone if held.gathered), "")
        if not truth.which:
            return _right(gathered)
        mine = self._attempt(case, lambda: self._backward(truth, run[0]))
        everyone = self._exchange(mine)
        verdict = _judge_raised(everyone, truth, "backward: ") or _judge_backward(everyone, truth)
        if verdict is not None:
            return verdict
        return _right(gathered or next((f"backward: {held.gathered}" for held in everyone if held.gathered), ""))

    def _attempt(self, case: Case, act: Callable[[], Held]) -> Held | Raised:
        self.mark(case.key, "run")
        self.target.before_case()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                held = act()
            held.gathered = self.target.gathered(caught)
        except Exception as error:
            raised = Raised(type(error).__name__, self.target.refuses(error), _text(error))
            self.mark(case.key, f"raised {raised.text}")
            return raised
        self.mark(case.key, "wait")
        return held

    def _exchange(self, mine: Held | Raised) -> list[Any]:
        try:
            data = pickle.dumps(mine)
        except Exception as error:
            mine = Raised("PicklingError", False, f"the runner cannot send the result: {error!r}")
            data = pickle.dumps(mine)
        everyone: list[Any] = [mine] * self.ranks
        for other, pipe in enumerate(self.peers):
            if pipe is None:
                continue
            if self.target.rank < other:  # of a pair, the lower rank speaks first: no order of pairs can block
                pipe.send_bytes(data)
            everyone[other] = pickle.loads(pipe.recv_bytes())
            if self.target.rank > other:
                pipe.send_bytes(data)
        return everyone

    def _forward(self, entry: Entry, sample: Sample, truth: Truth, case: Case, run: list[Run]) -> Held:
        first = primary(sample)
        assert first is not None

        def place(tensor: torch.Tensor) -> torch.Tensor:
            alike = case.alike and shardable(tensor) and tensor.shape == first.shape
            if tensor is first or alike:
                return self.target.shard(tensor, case.dim, case.sizes, tensor.requires_grad)
            return self.target.plain(tensor, tensor.requires_grad)

        module = None if sample.module is None else self.target.module(copy.deepcopy(sample.module))
        done = make_run(entry, sample, convert(sample, place), module, SEED)
        run.append(done)
        values = [*done.outputs, *(done.leaves[i] for i in truth.mutated), *done.state()]
        flags = tuple(isinstance(root, torch.Tensor) and root.requires_grad for root in done.roots)
        return Held([self._describe(value) for value in values], str(done.spec), flags)

    def _backward(self, truth: Truth, run: Run) -> Held:
        cotangents = [
            self.target.like(cotangent, run.roots[i])
            for i, cotangent in zip(truth.which, truth.cotangents, strict=True)
        ]
        run.backward(cotangents, truth.which)
        return Held([self._describe(gradient) for gradient in run.gradients()])

    def _describe(self, value: Any) -> Any:
        return self.target.describe(value) if isinstance(value, torch.Tensor) else value


def _right(gathered: str) -> Verdict:
    return (Outcome.GATHERED, gathered.split(": gathering")[0][:160]) if gathered else (Outcome.EQUAL, "")


def _judge_raised(everyone: Sequence[Any], truth: Truth, where: str = "") -> Verdict | None:
    raised = [held for held in everyone if isinstance(held, Raised)]
    if not raised:
        return (Outcome.SKIPPED, f"torch raises {truth.error!r:.120}") if truth.error is not None else None
    if len(raised) < len(everyone):
        ranks = [rank for rank, held in enumerate(everyone) if isinstance(held, Raised)]
        return Outcome.ONE_RANK, f"{where}only on ranks {ranks}: {raised[0].text}"
    kinds = {error.kind for error in raised}
    if truth.error is not None and kinds == {type(truth.error).__name__}:
        return Outcome.EQUAL, ""
    if all(error.refused for error in raised):
        return Outcome.REFUSED, where + raised[0].text
    if truth.error is not None:
        return Outcome.SKIPPED, f"torch raises {truth.error!r:.120}"
    return Outcome.ERROR, where + raised[0].text


def _judge_bad_input(everyone: Sequence[Any], truth: Truth) -> Verdict:
    """Where torch raises, every rank must raise, whatever the words."""
    if truth.error is None:
        return Outcome.SKIPPED, "torch takes it"
    raised = [held for held in everyone if isinstance(held, Raised)]
    if not raised:
        return Outcome.WRONG, f"no error, torch raises {truth.error!r:.160}"
    return (
        (Outcome.EQUAL, "") if len(raised) == len(everyone) else _judge_raised(everyone, truth) or (Outcome.ERROR, "")
    )


def _judge_forward(everyone: Sequence[Held], truth: Truth) -> Verdict | None:
    assert truth.run is not None
    spec, count = str(truth.run.spec), len(truth.outputs)
    for rank, held in enumerate(everyone):
        if held.spec != spec:
            return Outcome.WRONG, f"rank {rank} returned {held.spec:.80}, truth {spec:.80}"
    for i, value in enumerate(truth.expected()):
        how = truth.how if i < count else "value" if truth.how == "value" else "shape"
        slack = truth.slack[i] if truth.slack else None
        text = difference([held.values[i] for held in everyone], value, how, slack)
        if text:
            name = f"output {i}" if i < count else f"changed input {i - count}"
            return Outcome.WRONG, f"{name}: {text}"
    for i in truth.which:
        if not all(held.needs_grad[i] for held in everyone):
            return Outcome.WRONG_GRAD, f"output {i} does not require grad"
    return None


def _judge_backward(everyone: Sequence[Held], truth: Truth) -> Verdict | None:
    for i, gradient in enumerate(truth.gradients):
        found = [held.values[i] for held in everyone]
        if all(piece is None for piece in found):
            if gradient is None or not bool(gradient.any()):
                continue
            return Outcome.WRONG_GRAD, f"gradient {i} is None"
        if gradient is None:
            gradient = torch.zeros(found[0].shape, dtype=found[0].dtype)
        slack = truth.slack[i - len(truth.gradients)] if truth.slack else None
        text = difference(found, gradient, truth.how if truth.how == "value" else "shape", slack)
        if text:
            return Outcome.WRONG_GRAD, f"gradient {i}: {text}"
    return None


def _record(entry: Entry, sample: Sample, case: Case, outcome: Outcome, detail: str) -> dict[str, Any]:
    first = primary(sample)
    assert first is not None
    return {
        "key": case.key,
        "op": entry.name,
        "variant": entry.variant,
        "family": entry.family,
        "outcome": str(outcome),
        "detail": detail,
        "shape": list(first.shape),
        "sizes": list(case.sizes),
        "dtype": str(first.dtype).removeprefix("torch."),
    }


def _text(error: BaseException) -> str:
    """Kind, first line and the place nearest to the library: enough to group by."""
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if "dpzoo" in path.parts:
            place = f" [{'/'.join(path.parts[path.parts.index('dpzoo') :])}:{frame.lineno}]"
            break
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:220]}{place}"


def _quiet(act: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act()
