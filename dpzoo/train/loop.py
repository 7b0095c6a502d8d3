"""The run: epochs of steps, with validation, checkpoints and reports between them. One step is in `step.py`."""

import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dpzoo.train import checkpoint
from dpzoo.train.average import WeightAverage
from dpzoo.train.checkpoint import Position
from dpzoo.train.config import TrainConfig
from dpzoo.train.data_parallel import start_equal
from dpzoo.train.journal import Journal
from dpzoo.train.schedule import Rates
from dpzoo.train.step import Objective, train_step
from dpzoo.train.stopping import StopSignal
from dpzoo.train.team import Team
from dpzoo.train.trackers import require_trackers
from dpzoo.train.validate import Measure, validate


class Loader(Protocol):
    """Where samples come from, for example `dpzoo.datapipes.points.PointLoader`."""

    def __len__(self) -> int:
        """Samples per epoch of one replica, the same on all."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The samples of an epoch from place `start` on, which depend on the arguments alone."""


@dataclass
class Outcome:
    """How a run ended: steps done, whether all epochs are, the last validation, and the newest checkpoint."""

    step: int
    finished: bool
    validation: dict[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Loader,
    objective: Objective,
    config: TrainConfig,
    folder: Path,
    *,
    mesh: DeviceMesh | None = None,
    domain_axis: str = "domain",
    validation: Loader | None = None,
    measure: Measure | None = None,
) -> Outcome:
    """Train until the epochs are done, or until a rank is sent SIGTERM: then all finish the step and save together.

    Args:
        model: the same on every rank; the first rank's weights are copied to the others.
        loader: training samples, already sharded over the domain axis.
        objective: (model, sample) -> "loss" and other 0-d tensors to report.
        folder: of this run, seen by all ranks: checkpoints and `metrics.jsonl`.
        mesh: of all ranks; None for one process.
        validation: samples for `measure`, which is the objective by default. With `config.ema` the model then has its
            averaged weights.

    Raises:
        DivergedError: the gradient is not finite. CheckpointError: see `checkpoint.resume`. Both on all ranks.
        ImportError: TensorBoard, wandb or mlflow is asked for and not installed.
    """
    team = Team(mesh, domain_axis)
    require_trackers(config)
    steps = config.epochs * -(-len(loader) // config.accumulate)
    wrapped = start_equal(model, team)
    rates = Rates(optimizer, steps, config)
    average = None if config.ema is None else WeightAverage(model, config.ema)
    at = checkpoint.resume(folder, model, optimizer, config, team, average)
    outcome = Outcome(at.step, at.epoch >= config.epochs)
    model.train()
    with StopSignal() as stop, Journal(folder, steps, at.step, config, team.is_first) as journal:
        if at.step:
            journal.say(f"resumed at step {at.step}, epoch {at.epoch}, from {folder}")
        run = _Run(
            model, wrapped, optimizer, rates, loader, objective, config, folder, team, at, journal, stop, steps, average
        )
        for epoch in range(at.epoch, config.epochs):
            if run.is_at_its_limit or run.epoch(epoch):
                break
            if validation is not None and _is_due(at.epoch, config):
                with nullcontext() if average is None else average.in_use():
                    outcome.validation = validate(model, validation, measure or objective, config, team)
                journal.report("validation", at.step, epoch, outcome.validation)
            run.save_if_due()  # a checkpoint at the end of an epoch has its validation behind it
        outcome.finished = at.epoch >= config.epochs
        if at.step > outcome.step:
            run.save()
        if not outcome.finished:
            journal.say(f"stopped after step {at.step} of {steps}; {run.newest} is where it goes on")
    outcome.step, outcome.checkpoint = at.step, run.newest
    return outcome


@dataclass
class _Run:
    """What the steps of a run share; `wrapped` is the model, with DDP around it if there are replicas."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: Optimizer
    rates: Rates
    loader: Loader
    objective: Objective
    config: TrainConfig
    folder: Path
    team: Team
    at: Position
    journal: Journal
    stop: StopSignal
    steps: int
    average: WeightAverage | None
    newest: Path | None = None
    _saved_at: int = -1
    _recent: "_Recent" = field(default_factory=lambda: _Recent())

    @property
    def is_at_its_limit(self) -> bool:
        """`max_steps` are done, and they are not all steps anyway."""
        limit = self.config.max_steps
        return limit is not None and limit <= self.at.step < self.steps

    def epoch(self, number: int) -> bool:
        """The steps of an epoch that are not done yet; True if the run is to stop before the next."""
        at, config, team = self.at, self.config, self.team
        place, stopped = _place(at, team), False
        samples = self.loader.epoch(number, place)
        for count in _group_sizes(len(self.loader) - place, config.accumulate):
            rate = self.rates.set(at.step)
            group, begin = islice(samples, count), time.perf_counter()
            found = train_step(self.wrapped, self.optimizer, self.objective, group, count, at.step, config, team)
            at.step += 1
            if self.average is not None:
                self.average.update(at.step)
            at.samples += count * team.replicas
            self._recent.add({**found, "seconds": time.perf_counter() - begin})
            if at.step % config.log_every == 0:
                means = team.mean(*self._recent.take())
                self.journal.report("train", at.step, number, {**means, "learning_rate": rate})
            self.journal.advance()
            if at.samples >= len(self.loader) * team.replicas:
                at.epoch, at.samples = number + 1, 0
            stopped = team.any(self.stop.requested or self.is_at_its_limit)
            if stopped:
                break
            if at.samples:
                self.save_if_due()
        return stopped

    def save_if_due(self) -> None:
        """Save after every `checkpoint_every` steps."""
        every = self.config.checkpoint_every
        if every and self.at.step % every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self._saved_at != self.at.step:
            team, keep = self.team, self.config.keep
            self.newest = checkpoint.save(self.folder, self.at, self.model, self.optimizer, team, keep, self.average)
            self._saved_at = self.at.step


def _place(at: Position, team: Team) -> int:
    """The place in the epoch of one replica; samples beyond it are taken again if the number of replicas changed."""
    place, rest = divmod(at.samples, team.replicas)
    if rest:
        warnings.warn(
            f"{at.samples} samples of epoch {at.epoch} are used, which is no multiple of {team.replicas} replicas: the "
            f"last {rest} are taken again",
            stacklevel=3,
        )
    return place


def _group_sizes(samples: int, accumulate: int) -> Iterator[int]:
    """Samples per step: `accumulate`, and what is left in the last."""
    for start in range(0, samples, accumulate):
        yield min(accumulate, samples - start)


def _is_due(epochs_done: int, config: TrainConfig) -> bool:
    every = config.validate_every
    return every > 0 and (epochs_done % every == 0 or epochs_done == config.epochs)


class _Recent:
    """What has been found since the last report."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0

    def add(self, found: dict[str, float]) -> None:
        self._steps += 1
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def take(self) -> tuple[dict[str, float], int]:
        sums, steps, self._sums, self._steps = self._sums, self._steps, {}, 0
        return sums, steps
