"""What each rank of `train.py` runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from aero.cars import make_loader, split_cars, statistics_of
from aero.model import build_model
from aero.settings import Settings
from aero.task import Task
from dpzoo.shard import DistributedManager
from dpzoo.train import Team, fit

FILE = "settings.json"


def make_mesh(settings: Settings) -> DeviceMesh:
    """All ranks as (ddp, domain)."""
    shape = (1, -1) if settings.domain == -1 else (-1, settings.domain)
    return DistributedManager().initialize_mesh(shape, ("ddp", "domain"))


def train(settings: Settings) -> int:
    """Train as configured; the exit status, which is 0 also when the run was asked to stop."""
    mesh = make_mesh(settings)
    team = Team(mesh)
    split = split_cars(settings)
    task = Task(settings, statistics_of(settings, split.training, mesh, team))
    model = build_model(settings).to(DistributedManager().device)

    def optimizer(weights: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, **asdict(settings.optimizer))

    if team.is_first:
        (settings.out / FILE).write_text(json.dumps(settings.to_dict(), indent=1))
        print(_introduction(settings, mesh, split.training, split.validation, model), flush=True)
    with (
        make_loader(settings, split.training, mesh, training=True) as training,
        make_loader(settings, split.validation, mesh, training=False) as validation,
    ):
        fit(
            model,
            optimizer,
            training,
            task.objective,
            settings.train,
            settings.out,
            mesh=mesh,
            validation=validation,
            measure=task.measure,
        )
    return 0


def load_settings(folder: Path) -> Settings:
    """The configuration of the run in `folder`.

    Raises:
        FileNotFoundError: there is no run.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no run ({FILE} is not there): train first, with out={folder}")
    return Settings.from_dict(json.loads(file.read_text()) | {"out": str(folder)})


def _introduction(
    settings: Settings, mesh: DeviceMesh, training: dict[str, Path], validation: dict[str, Path], model: torch.nn.Module
) -> str:
    weights = sum(p.numel() for p in model.parameters())
    points = ", ".join(f"{c.points or 'all'} points of the {n}" for n, c in settings.clouds.items())
    return (
        f"{len(training)} cars to train on, {len(validation)} held out ({', '.join(list(validation)[:5])}); {points}; "
        f"{weights:,} weights; {mesh.size(0)} x {mesh.size(1)} ranks (data x domain); {settings.out}"
    )
