"""What each rank of `train.py` runs."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dpzoo import create_model
from dpzoo.datapipes.grid import GridDataset
from dpzoo.shard import DistributedManager
from dpzoo.train import Team, fit, load_model
from nowcast.data import make_loader, make_stores, split, statistics_of
from nowcast.settings import EvaluateSettings, Settings
from nowcast.task import Task, change_scale, make_task

FILE = "settings.json"


@dataclass(frozen=True)
class Setup:
    """What training and forecasting need on each rank."""

    mesh: DeviceMesh
    team: Team
    training: GridDataset
    validation: GridDataset
    task: Task
    model: nn.Module


def make_mesh(settings: Settings) -> DeviceMesh:
    """All ranks as (ddp, domain)."""
    shape = (1, -1) if settings.domain == -1 else (-1, settings.domain)
    return DistributedManager().initialize_mesh(shape, ("ddp", "domain"))


def build_model(settings: Settings, dataset: GridDataset) -> nn.Module:
    """The model of a configuration for the grid and channels of the data; its weights depend on the seed alone."""
    torch.manual_seed(settings.train.seed)
    data, index, given = settings.data, dataset.index, dict(settings.model)
    channels = len(index.timelines["past"].channels)
    sizes = {
        "img_size": index.grid,
        "in_chans": channels,
        "state_chans": channels * data.past,
        "background_chans": len(data.sun),
        "invariant_chans": len(data.invariants),
        "sigma_data": 1.0,
    }
    return create_model(given.pop("name"), **{**sizes, **given})


def set_up(settings: Settings, mesh: DeviceMesh) -> Setup:
    """Data, statistics and model; all ranks together."""
    team = Team(mesh)
    make_stores(settings.data, mesh, team)
    training, validation = split(settings)
    statistics = statistics_of(settings, training, mesh, team)
    training, validation = (replace(d, statistics=statistics) for d in (training, validation))
    with make_loader(settings, training, mesh, training=False) as loader:
        scale = change_scale(settings, training, loader, team)
    device = DistributedManager().device
    task = make_task(settings, statistics, device, scale)
    return Setup(mesh, team, training, validation, task, build_model(settings, training).to(device))


def train(settings: Settings) -> int:
    """Train as configured; the exit status, which is 0 also when the run was asked to stop."""
    mesh = make_mesh(settings)
    made = set_up(settings, mesh)

    def optimizer(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, **asdict(settings.optimizer))

    if made.team.is_first:
        (settings.out / FILE).write_text(json.dumps(settings.to_dict(), indent=1))
        print(_introduction(settings, made), flush=True)
    with (
        make_loader(settings, made.training, mesh, training=True) as training,
        make_loader(settings, made.validation, mesh, training=False) as validation,
    ):
        fit(
            made.model,
            optimizer,
            training,
            made.task.objective,
            settings.train,
            settings.out,
            mesh=mesh,
            validation=validation,
            measure=made.task.measure,
        )
    return 0


def load_run(out: Path, asked: EvaluateSettings) -> tuple[Setup, Path]:
    """The run in a folder, its model in evaluation mode with the newest (averaged) weights; all ranks share a sample.

    Raises:
        FileNotFoundError: there is no run.
    """
    file = out / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{out} holds no run ({FILE} is not there): train first, with out={out}")
    settings = Settings.from_dict(json.loads(file.read_text()) | {"out": str(out), "domain": -1})
    made = set_up(replace(settings, evaluate=asked), make_mesh(settings))
    checkpoint = load_model(made.model, out, average=settings.train.ema is not None)
    made.model.eval()
    return made, checkpoint


def _introduction(settings: Settings, made: Setup) -> str:
    weights = sum(p.numel() for p in made.model.parameters())
    rows, columns = made.training.index.grid
    channels = ", ".join(made.training.index.timelines["past"].channels)
    return (
        f"{channels} on {rows} x {columns} points; {len(made.training)} samples to train on, {len(made.validation)} "
        f"held out; {weights:,} weights; {made.mesh.size(0)} x {made.mesh.size(1)} ranks (data x domain); "
        f"{settings.out}"
    )
