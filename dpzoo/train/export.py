"""Out of a run's checkpoints into files that load without dpzoo: plain safetensors and `config.json`.

`fit` notes in the run's folder how its model was built. Exporting needs neither the model nor ranks: it puts the
weights together from the checkpoint's pieces, in one process.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

from dpzoo.models.hub import config_of
from dpzoo.train.checkpoint_files import METADATA, find_damage, in_order_of_trial, step_of
from dpzoo.train.checkpoint_writer import CheckpointError
from dpzoo.train.team import Team
from dpzoo.weights import WeightsError, WeightSource, open_weights, write_folder
from dpzoo.weights.dialects.noted import grid_to_note

MODEL = "model.json"


def record_model(model: nn.Module, folder: Path, team: Team) -> None:
    """Note in a run's folder how its model can be built again; of a model that is not of the zoo, its class alone."""
    if not team.is_first:
        return
    try:
        config = config_of(model)
    except WeightsError:
        config = {"library_name": "dpzoo", "class": f"{type(model).__module__}.{type(model).__qualname__}"}
        if (grid := grid_to_note(model)) is not None:
            config["position_grid"] = grid
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL).write_text(json.dumps(config, indent=1))


def export_run(folder: Path, out: Path, average: bool | None = None) -> Path:
    """Write the weights of a run as `model.safetensors` (several files above 5 GB) and `config.json` into `out`.

    Args:
        folder: of the run, whose newest checkpoint is taken, or a checkpoint `step_*` itself.
        average: the averaged weights, or the trained ones; None: averaged if there are any.

    Returns:
        The checkpoint that was exported.

    Raises:
        CheckpointError: no checkpoint, one that is damaged, or without an average that is asked for.
    """
    chosen = _chosen(folder)
    if damage := find_damage(chosen):
        raise CheckpointError(f"{chosen} is damaged: {damage}; give the path of another one")
    trained = open_weights(chosen, key="model")
    averaged = None if average is False else _averaged(chosen)
    if average and averaged is None:
        raise CheckpointError(f"{chosen} has no averaged weights: it was trained without ema")
    names = set() if averaged is None else set(averaged.names())  # of parameters, not of buffers
    state = {
        name: averaged.read(name).to(trained.dtype(name)) if averaged and name in names else trained.read(name)
        for name in trained.names()
    }
    config = _config(chosen.parent / MODEL)
    config["extra"] = {**config.get("extra", {}), "step": step_of(chosen), "averaged": averaged is not None}
    write_folder(out, state, config)
    return chosen


def _chosen(folder: Path) -> Path:
    if step_of(folder) >= 0 and (folder / METADATA).is_file():
        return folder
    if not (found := in_order_of_trial(folder)):
        raise CheckpointError(f"{folder} holds no finished checkpoint, and is none")
    return found[0]


def _averaged(chosen: Path) -> WeightSource | None:
    try:
        return open_weights(chosen, key="average")
    except WeightsError:
        return None


def _config(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {"library_name": "dpzoo"}
