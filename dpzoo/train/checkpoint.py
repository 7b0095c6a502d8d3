"""Checkpoints that any number of ranks can load: `torch.distributed.checkpoint` folders `step_00000200`.

They hold the weights (and their average, if there is one), the state of the optimiser, and the position in the data.
Random numbers and learning rates follow from the position (see `seeds.py`, `schedule.py`). The ranks share the writing,
so the folder must be one that they all see. A folder counts once its `.metadata` is there, which is written last.
"""

import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from dpzoo.train.average import WeightAverage
from dpzoo.train.config import TrainConfig
from dpzoo.train.team import Team

PREFIX = "step_"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; raised on all ranks."""


@dataclass
class Position:
    """How far a run has come: optimiser steps; the current epoch and the samples of it that all replicas have used."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    seed: int = 0


def find_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a run's folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}[0-9]*") if (path / ".metadata").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(PREFIX)))


def save(
    folder: Path,
    position: Position,
    model: nn.Module,
    optimizer: Optimizer,
    team: Team,
    keep: int,
    average: WeightAverage | None = None,
) -> Path:
    """Write a checkpoint, all ranks together, and delete all but the newest `keep`."""
    target = folder / f"{PREFIX}{position.step:08d}"
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "position": asdict(position)}
    if average is not None:
        state["average"] = average.weights
    if team.is_first and target.exists():  # unfinished, or of a run that was taken back to an earlier step
        shutil.rmtree(target)
    team.from_first(None)
    with _no_news():
        dcp.save(state, checkpoint_id=target, no_dist=not dist.is_initialized())
    if team.is_first:
        for old in find_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    return target


def resume(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizer,
    config: TrainConfig,
    team: Team,
    average: WeightAverage | None = None,
) -> Position:
    """Load the newest good checkpoint as `config.resume` says; without one, the position of the beginning.

    A checkpoint whose files are damaged is passed over with a warning, one of another model is an error. Without
    an average in it, the average begins with the weights.

    Raises:
        CheckpointError: on all ranks: of another model or seed; none that can be read though some are there; or the
            folder does not hold what `config.resume` asks for.
    """
    found = team.from_first(find_checkpoints(folder))
    if config.resume == "never" and found:
        raise CheckpointError(f"{folder} holds {found[-1].name} and resume='never': choose another folder or delete it")
    if config.resume == "must" and not found:
        raise CheckpointError(f"{folder} holds no finished checkpoint ({PREFIX}*/.metadata) and resume='must'")
    for path in reversed(found):
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "position": asdict(Position())}
        if average is not None:
            state["average"] = average.weights
        if not _load(state, path):
            continue
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        position = Position(**state["position"])
        if position.seed != config.seed:
            raise CheckpointError(
                f"{path} was made with seed={position.seed}, this run has seed={config.seed}: its data and random "
                "numbers would not go on where they stopped"
            )
        if average is not None and "average" not in state:
            average.restart()
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
    for path in reversed(find_checkpoints(folder)):
        state: dict[str, Any] = {"model": model.state_dict()}
        if average:
            state["average"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        if not _load(state, path):
            continue
        if average and "average" not in state:
            raise CheckpointError(f"{path} has no averaged weights: it was trained without ema")
        model.load_state_dict(state["model"] | state.get("average", {}))
        return path
    raise CheckpointError(f"{folder} holds no checkpoint ({PREFIX}*/.metadata) that can be read")


def _load(state: dict[str, Any], path: Path) -> bool:
    """Read into `state`; False, with a warning, if files are damaged. All ranks come to the same end.

    An "average" that the checkpoint does not have is taken out of `state`.
    """
    try:
        with _no_news():
            metadata = dcp.FileSystemReader(path).read_metadata()
    except Exception as error:
        warnings.warn(f"{path}: its metadata cannot be read ({error}); trying the one before", stacklevel=3)
        return False
    _check_model(state["model"], metadata.state_dict_metadata, path)
    if not any(name.startswith("average.") for name in metadata.state_dict_metadata):
        state.pop("average", None)
    try:
        with _no_news():
            dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    except (CheckpointException, OSError) as error:
        warnings.warn(f"{path} is damaged ({error}); trying the one before", stacklevel=3)
        return False
    return True


def _check_model(weights: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
    ours = {f"model.{name}": tuple(value.shape) for name, value in weights.items() if hasattr(value, "shape")}
    theirs = {
        name: tuple(entry.size)
        for name, entry in stored.items()
        if name.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    if ours == theirs:
        return
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    listed = ", ".join(
        f"{name.removeprefix('model.')} {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here"
        for name in differing[:5]
    )
    raise CheckpointError(f"{path} is of another model; {len(differing)} weights differ: {listed}")


def _no_news() -> warnings.catch_warnings:
    """Torch's checkpoint code warns of its own deprecated parts; they are not the user's to change."""
    return warnings.catch_warnings(action="ignore")
