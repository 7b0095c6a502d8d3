"""The run: epochs of steps, with validation, checkpoints and reports between them. One step is in `step.py`."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from dpzoo.train import checkpoint
from dpzoo.train.average import WeightAverage
from dpzoo.train.checkpoint import Position, RunState
from dpzoo.train.checkpoint_writer import CheckpointWriter
from dpzoo.train.config import TrainConfig
from dpzoo.train.data_parallel import MakeOptimizer, prepare_model, prepare_optimizer
from dpzoo.train.export import record_model
from dpzoo.train.journal import Journal
from dpzoo.train.schedule import Rates
from dpzoo.train.step import DivergedError, Objective, loss_scaler, train_step
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
    optimizer: Optimizer | MakeOptimizer,
    loader: Loader,
    objective: Objective,
    config: TrainConfig,
    folder: Path,
    *,
    mesh: DeviceMesh | None = None,
    domain_axis: str = "domain",
    validation: Loader | None = None,
    measure: Measure | None = None,
    others: Mapping[str, Stateful] | None = None,
) -> Outcome:
    """Train until the epochs are done, or until a rank is sent SIGTERM: then all finish the step and save together.

    Args:
        model: the same on every rank; the first rank's weights are copied to the others.
        optimizer: or a function that makes one of parameters, which `parallel="fsdp"` needs: it replaces them.
        loader: training samples, already sharded over the domain axis.
        objective: (model, sample) -> "loss" and other 0-d tensors to report.
        folder: of this run, seen by all ranks: checkpoints and `metrics.jsonl`.
        mesh: of all ranks; None for one process.
        validation: samples for `measure`, which is the objective by default. With `config.ema` the model then has its
            averaged weights.
        others: name -> what else has a state that checkpoints are to hold (`state_dict`, `load_state_dict`).

    Raises:
        DivergedError: the gradient is not finite. CheckpointError: see `checkpoint.resume`, or one cannot be written.
            Both on all ranks.
        ValueError: an optimiser of other parameters, or samples that cannot be divided among the replicas.
        ImportError: TensorBoard, wandb or mlflow is asked for and not installed.
    """
    team = Team(mesh, domain_axis)
    require_trackers(config)
    accumulate = config.accumulated(team.replicas)
    steps = config.epochs * -(-len(loader) // accumulate)
    wrapped = prepare_model(model, config, team)
    made, scaler = prepare_optimizer(wrapped, optimizer), loss_scaler(config, team)
    rates = Rates(made, steps, config)
    average = None if config.ema is None else WeightAverage(model, config.ema)
    own = {} if scaler is None else {"loss_scaler": scaler}
    state = RunState(model, made, team, average, {**(others or {}), **own})
    at = checkpoint.resume(folder, state, config)
    _adopt(at, accumulate * team.replicas)
    outcome = Outcome(at.step, at.epoch >= config.epochs)
    record_model(model, folder, team)
    model.train()
    with (
        StopSignal() as stop,
        Journal(folder, steps, at.step, config, team.is_first) as journal,
        CheckpointWriter(folder, team, config.keep, config.async_checkpoint) as writer,
    ):
        if at.step:
            journal.say(f"resumed at step {at.step}, epoch {at.epoch}, from {folder}")
        run = _Run(
            wrapped, state, rates, scaler, loader, objective, config, accumulate, at, journal, stop, steps, writer
        )
        outcome.validation = run.epochs(validation, measure or objective)
        outcome.finished = at.epoch >= config.epochs
        if at.step > outcome.step:
            run.save()
        writer.finish()
        if not outcome.finished:
            journal.say(f"stopped after step {at.step} of {steps}; {writer.newest} is where it goes on")
    outcome.step, outcome.checkpoint = at.step, writer.newest
    return outcome


@dataclass
class _Run:
    """What the steps of a run share; `wrapped` is the model that the mesh trains with, which has its weights."""

    wrapped: nn.Module
    state: RunState
    rates: Rates
    scaler: torch.amp.GradScaler | None
    loader: Loader
    objective: Objective
    config: TrainConfig
    accumulate: int
    at: Position
    journal: Journal
    stop: StopSignal
    steps: int
    writer: CheckpointWriter
    _saved_at: int = -1
    _recent: "_Recent" = field(default_factory=lambda: _Recent())

    @property
    def is_at_its_limit(self) -> bool:
        """`max_steps` are done, and they are not all steps anyway."""
        limit = self.config.max_steps
        return limit is not None and limit <= self.at.step < self.steps

    def epochs(self, validation: Loader | None, measure: Measure) -> dict[str, float]:
        """All that are not done yet, or until the run is to stop; returns what the last validation found."""
        at, state, found = self.at, self.state, dict[str, float]()
        try:
            for number in range(at.epoch, self.config.epochs):
                if self.is_at_its_limit or self.epoch(number):
                    break
                if validation is not None and _is_due(at.epoch, self.config):
                    with nullcontext() if state.average is None else state.average.in_use():
                        found = validate(state.model, validation, measure, self.config, state.team)
                    self.journal.report("validation", at.step, number, found)
                self.save_if_due()  # a checkpoint at the end of an epoch has its validation behind it
        except DivergedError:  # all ranks come here, so the checkpoint that is being written can be finished
            self.writer.finish()
            raise
        return found

    def epoch(self, number: int) -> bool:
        """The steps of an epoch that are not done yet; True if the run is to stop before the next."""
        at, team = self.at, self.state.team
        place, stopped = _place(at, team), False
        samples = self.loader.epoch(number, place)
        for count in _group_sizes(len(self.loader) - place, self.accumulate):
            self._step(samples, count, number)
            at.samples += count * team.replicas
            if at.samples >= len(self.loader) * team.replicas:
                at.epoch, at.samples = number + 1, 0
            self.writer.settle()
            stopped = team.any(self.stop.requested or self.is_at_its_limit)
            if stopped:
                break
            if at.samples:
                self.save_if_due()
        return stopped

    def _step(self, samples: Iterator[Any], count: int, epoch: int) -> None:
        at, config, state = self.at, self.config, self.state
        rate = self.rates.set(at.step)
        group, begin = islice(samples, count), time.perf_counter()
        found = train_step(
            self.wrapped, state.optimizer, self.objective, group, count, at.step, config, state.team, self.scaler
        )
        at.step += 1
        if state.average is not None:
            state.average.update(at.step)
        self._recent.add({**found, "seconds": time.perf_counter() - begin})
        if at.step % config.log_every == 0:
            means = state.team.mean(self._recent.take(), 1)
            self.journal.report("train", at.step, epoch, {**means, "learning_rate": rate})
        self.journal.advance()

    def save_if_due(self) -> None:
        """Save after every `checkpoint_every` steps."""
        every = self.config.checkpoint_every
        if every and self.at.step % every == 0:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self._saved_at != self.at.step:
            self.writer.save(self.at.step, self.state.state(self.at))
            self._saved_at = self.at.step


def _adopt(at: Position, samples_per_step: int) -> None:
    """Go on with so many samples per step, which makes another curve if it was another number."""
    if at.samples_per_step not in (0, samples_per_step):
        warnings.warn(
            f"a step had {at.samples_per_step} samples so far and has {samples_per_step} from now on, so the curve is "
            "another one; samples_per_step keeps it the same for any number of replicas",
            stacklevel=3,
        )
    at.samples_per_step = samples_per_step


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
    """What has been found since the last report: a mean for each name, over the steps that found it."""

    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {}

    def add(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self._found.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._found.items()}
        self._found = {}
        return means
