"""What a checkpoint of a run holds, and how a run goes on from one, on any number of ranks and any mesh.

Weights, the optimiser's state, the average of the weights, the position in the data, random numbers, and what else has
a state (a loss scale, a scheduler of the user's) lie in `torch.distributed.checkpoint` folders `step_00000200`.
Learning rates follow from the position (see `schedule.py`). How folders are written is in `checkpoint_writer.py`, how
they lie on the disk in `checkpoint_files.py`. The ranks share the work, so the folder must be one that they all see.
"""

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from dpzoo.train.average import WeightAverage
from dpzoo.train.checkpoint_files import PREFIX, in_order_of_trial
from dpzoo.train.checkpoint_reader import Stored, check_model, on_every_rank, read_into, whole_metadata
from dpzoo.train.checkpoint_writer import CheckpointError
from dpzoo.train.config import TrainConfig
from dpzoo.train.optimizer_state import load_optimizer_state, named_parameters, optimizer_state, plain_name, state_like
from dpzoo.train.random_state import generators_of, random_state, set_random_state
from dpzoo.train.team import Team


@dataclass
class Position:
    """How far a run has come: optimiser steps; the current epoch and the samples of it that all replicas have used."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    seed: int = 0
    samples_per_step: int = 0


@dataclass
class RunState:
    """All that a run needs to go on; `state` is what `CheckpointWriter.save` takes.

    Args:
        others: name -> anything with `state_dict()` and `load_state_dict()`.
    """

    model: nn.Module
    optimizer: Optimizer
    team: Team
    average: WeightAverage | None = None
    others: Mapping[str, Stateful] = field(default_factory=dict)

    def state(self, position: Position) -> dict[str, Any]:
        """By section: model, optimizer, position, random, average, others. Tensors are not copied."""
        found = {
            "model": get_model_state_dict(self.model),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "position": asdict(position),
            "random": random_state(self.team),
            "others": {name: other.state_dict() for name, other in self.others.items()},
        }
        if self.average is not None:
            found["average"] = _average_of(self.average)
        return found

    def load(self, path: Path) -> Position | None:
        """Take up the checkpoint at `path`; None, with a warning, if its files are damaged.

        Raises:
            CheckpointError: on all ranks: it is of another model or another optimiser.
        """
        metadata = whole_metadata(path)
        if metadata is None:
            return None
        weights, stored = get_model_state_dict(self.model), Stored(metadata)
        check_model(weights, metadata, path)
        parameters = dict(named_parameters(self.model))
        state: dict[str, Any] = {
            "model": weights,
            "optimizer": stored.section("optimizer", lambda at, *kind: state_like(_of(parameters, at), *kind)),
            "position": stored.section("position"),
            "random": stored.section("random", only=("stream", generators_of(self.team))),
            "others": stored.section("others", only=tuple(self.others)),
        }
        if self.average is not None and stored.has("average"):
            state["average"] = _average_of(self.average)
        if not read_into(state, path):
            return None
        set_model_state_dict(self.model, weights)
        try:
            load_optimizer_state(self.model, self.optimizer, state["optimizer"])
        except ValueError as error:
            raise CheckpointError(f"{path} is of another optimiser: {error}") from error
        if self.average is not None and "average" not in state:
            self.average.restart()
        self._load_others(state["others"], path)
        set_random_state(state["random"], self.team)
        known = {entry.name for entry in fields(Position)}
        return Position(**{name: value for name, value in state["position"].items() if name in known})

    def _load_others(self, found: Mapping[str, Any], path: Path) -> None:
        for name, other in self.others.items():
            if name in found:
                other.load_state_dict(found[name])
            elif other.state_dict():
                warnings.warn(f"{path} has no state of {name!r}: it begins anew", stacklevel=4)


def resume(folder: Path, run: RunState, config: TrainConfig) -> Position:
    """Load the newest good checkpoint as `config.resume` says; without one, the position of the beginning.

    A checkpoint whose files are damaged is passed over with a warning, one of another model is an error. Without
    an average in it, the average begins with the weights.

    Raises:
        CheckpointError: on all ranks: of another model, optimiser or seed; none that can be read though some are there;
            or the folder does not hold what `config.resume` asks for.
    """
    found = run.team.from_first(in_order_of_trial(folder))
    if config.resume == "never" and found:
        raise CheckpointError(f"{folder} holds {found[0].name} and resume='never': choose another folder or delete it")
    if config.resume == "must" and not found:
        raise CheckpointError(f"{folder} holds no finished checkpoint ({PREFIX}*/.metadata) and resume='must'")
    for path in found:
        position = run.load(path)
        if position is None:
            continue
        if position.seed != config.seed:
            raise CheckpointError(
                f"{path} was made with seed={position.seed}, this run has seed={config.seed}: its data and random "
                "numbers would not go on where they stopped"
            )
        return position
    if found:
        raise CheckpointError(f"none of the {len(found)} checkpoints in {folder} can be read")
    return Position(seed=config.seed)


def load_model(model: nn.Module, folder: Path, average: bool = False) -> Path:
    """Load the weights of the newest good checkpoint of a run, on any number of ranks; returns which it was.

    Args:
        average: take the averaged weights (`TrainConfig.ema`).

    Raises:
        CheckpointError: there is none, it belongs to another model, or it has no average.
    """
    for path in on_every_rank(in_order_of_trial(folder))[0]:
        metadata = whole_metadata(path)
        if metadata is None:
            continue
        weights, averaged = get_model_state_dict(model), dict[str, Tensor]()
        check_model(weights, metadata, path)
        if average:
            if not Stored(metadata).has("average"):
                raise CheckpointError(f"{path} has no averaged weights: it was trained without ema")
            averaged = {name: p.detach().clone() for name, p in named_parameters(model)}
        if not read_into({"model": weights, "average": averaged}, path):
            continue
        set_model_state_dict(model, {**weights, **averaged})
        return path
    raise CheckpointError(f"{folder} holds no checkpoint ({PREFIX}*/.metadata) that can be read")


def _of(parameters: Mapping[str, Tensor], path: tuple[Any, ...]) -> Tensor | None:
    """The parameter that a part of an optimiser's state belongs to: path ("state", name, ...)."""
    return parameters.get(path[1]) if path[0] == "state" else None


def _average_of(average: WeightAverage) -> dict[str, Tensor]:
    return {plain_name(name): weight for name, weight in average.weights.items()}
