"""Errors, forces, figures and files of a trained model, car by car."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aero.cars import Split, make_loader, split_cars, statistics_of
from aero.clouds import KINDS
from aero.model import build_model
from aero.seam import compact, distance_to_border, owners
from aero.settings import EvaluateSettings, Settings
from aero.task import Task
from aero.training import load_settings, train
from dpzoo.datapipes import DataError
from dpzoo.datapipes.points import PointSample
from dpzoo.shard import DistributedManager, ShardTensor
from dpzoo.train import Team, load_model


@dataclass
class CarResult:
    """One car: relative L2 error by field; force coefficients by name, from the table ("csv"), integrated from the true
    fields ("truth") and from the predicted ones ("model")."""

    name: str
    held_out: bool
    errors: dict[str, float]
    forces: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """A car for the figures, whole, as arrays; clouds are cut into compact shards along a Hilbert curve.

    Attributes:
        centers, truth, predicted: cloud -> `(n, 3)`, `(n, columns)`.
        border: cloud -> distance of each point to the nearest point of another rank, `(n,)`; infinite on one rank.
        alone: cloud -> prediction of one process, or nothing.
        outward, areas: of the surface, `(n, 3)` unit vectors and `(n,)`; empty without one.
    """

    name: str
    held_out: bool
    ranks: int
    centers: dict[str, np.ndarray]
    truth: dict[str, np.ndarray]
    predicted: dict[str, np.ndarray]
    border: dict[str, np.ndarray]
    alone: dict[str, np.ndarray]
    outward: np.ndarray
    areas: np.ndarray


def evaluate(out: Path, asked: EvaluateSettings) -> int:
    """What each rank of `evaluate.py` runs: prints the table, writes `evaluation.json`, figures and VTP files."""
    _check_packages(asked)
    settings = replace(load_settings(out), evaluate=asked)
    mesh = DistributedManager().initialize_mesh((1, -1), ("ddp", "domain"))
    team = Team(mesh)
    split = split_cars(settings)
    task = Task(settings, statistics_of(settings, split.training, mesh, team))
    model = build_model(settings).to(DistributedManager().device).eval()
    checkpoint = load_model(model, out)
    cars = split.cars(asked.cars)
    drawn = _drawn(asked.figures, cars, split)
    results = []
    with make_loader(settings, cars, mesh, training=False) as loader:
        for sample in loader.epoch(0):
            results.append(_evaluate_car(model, task, sample, split, team))
            if (
                sample.name == drawn
                and (drawing := draw_car(model, task, sample, split, asked.compare))
                and team.is_first
            ):
                _write_figures(out / "figures", drawing, results, task, asked)
    if team.is_first:
        summary = summarise(results)
        rows = [vars(result) for result in results]
        (out / "evaluation.json").write_text(json.dumps({"cars": rows, "summary": summary}, indent=1))
        print(f"{checkpoint}\n{format_table(results)}\n" + "\n".join(f"{k}: {v:.4g}" for k, v in summary.items()))
        if drawn:
            from aero.figures import draw_forces

            draw_forces(out / "figures" / "forces.png", results)
            print(f"figures: {out / 'figures'}")
    return 0


def _check_packages(asked: EvaluateSettings) -> None:
    """Raise ImportError on all ranks, before anything is read, for what only the first rank will use."""
    if asked.vtp or (asked.renderer == "pyvista" and asked.figures != "none"):
        from aero.vtp import require_pyvista

        require_pyvista()
    if asked.figures != "none":
        from aero.figures import require_pyplot

        require_pyplot()


def train_and_evaluate(settings: Settings) -> int:
    """What each rank runs to do both at once, as the configuration says."""
    return train(settings) or evaluate(settings.out, settings.evaluate)


def _drawn(asked: str, cars: Mapping[str, Path], split: Split) -> str | None:
    if asked == "none":
        return None
    held_out = [name for name in cars if name in split.validation]
    name = next(iter([*held_out, *cars])) if asked == "first" else asked
    if name not in cars:
        raise DataError(f"evaluate.figures={asked!r} is not one of the cars that are evaluated: {', '.join(cars)}")
    return name


@torch.no_grad()
def _evaluate_car(model: nn.Module, task: Task, sample: PointSample, split: Split, team: Team) -> CarResult:
    asked = task.settings.evaluate
    predicted = task.predict(model, sample, asked.chunk)
    errors = {name: value.item() for name, value in task.relative_errors(predicted, sample).items()}
    result = CarResult(sample.name, sample.name in split.validation, errors)
    if "surface" in predicted:
        model_forces = task.forces(predicted["surface"], sample)
        true_forces = task.forces(sample["surface_fields"], sample)
        for name, kind in (("Cd", "drag"), ("Cl", "lift")):
            result.forces[name] = {
                "csv": sample.globals.get(name, float("nan")),
                "truth": getattr(true_forces, kind).item(),
                "model": getattr(model_forces, kind).item(),
            }
    if asked.vtp:
        from aero.vtp import write_vtp

        for name, value in predicted.items():
            arrays = [whole(t).cpu().numpy() for t in (sample[KINDS[name].centers], sample[KINDS[name].targets], value)]
            if team.is_first:
                file = task.settings.out / "predictions" / f"{sample.name}_{name}.vtp"
                write_vtp(file, *arrays, KINDS[name].fields)
    return result


@torch.no_grad()
def draw_car(model: nn.Module, task: Task, sample: PointSample, split: Split, compare: bool) -> Drawing:
    """Predict the car on compact shards, and on one process if `compare`; all ranks take part and get the arrays."""
    kinds = {name: KINDS[name] for name in task.settings.clouds}
    for kind in kinds.values():
        sample = compact(sample, kind)
    cut = task.predict(model, sample, task.settings.evaluate.chunk)
    alone: dict[str, Tensor] = {}
    if compare:
        plain = replace(sample, tensors={name: whole(t) for name, t in sample.tensors.items()})
        alone = task.predict(model, plain, task.settings.evaluate.chunk)
    centers = {name: _array(sample[kind.centers]) for name, kind in kinds.items()}
    held_by = {name: owners(sample[kind.centers]) for name, kind in kinds.items()}
    return Drawing(
        sample.name,
        sample.name in split.validation,
        max(int(rank.max()) + 1 for rank in held_by.values()),
        centers,
        {name: _array(sample[kind.targets]) for name, kind in kinds.items()},
        {name: _array(value) for name, value in cut.items()},
        {name: distance_to_border(centers[name], held_by[name]) for name in kinds},
        {name: _array(value) for name, value in alone.items()},
        *_faces(sample, centers),
    )


def _faces(sample: PointSample, centers: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Outward normals and areas, whichever way the normals of the file look."""
    if "surface" not in centers:
        return np.empty((0, 3)), np.empty(0)
    normals, areas, at = _array(sample["surface_normals"]), _array(sample["surface_areas"]), centers["surface"]
    volume = ((at - at.mean(0)) * normals).sum(1) @ areas  # three times that of the body, negative if they look inwards
    return normals * np.sign(volume), areas


def _write_figures(
    folder: Path, drawing: Drawing, results: list[CarResult], task: Task, asked: EvaluateSettings
) -> None:
    from aero.figures import draw_parity, draw_seam, draw_surface

    folder.mkdir(parents=True, exist_ok=True)
    if "surface" in drawing.centers:
        draw_surface(folder / "surface.png", drawing, asked.renderer)
    draw_parity(folder / "parity.png", drawing)
    draw_seam(
        folder / "seam.png", drawing, {name: task.statistics.fields[KINDS[name].targets].std for name in drawing.truth}
    )


def whole(t: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return t.full_tensor() if isinstance(t, ShardTensor) else t


def _array(t: Tensor) -> np.ndarray:
    return whole(t).cpu().numpy()


# ---------------------------------------------------------------------- numbers
def r_squared(truth: np.ndarray, predicted: np.ndarray) -> float:
    """1 - residual / total sum of squares; NaN for fewer than two values or values that are all equal."""
    total = float(((truth - truth.mean()) ** 2).sum()) if len(truth) > 1 else 0.0
    return 1 - float(((truth - predicted) ** 2).sum()) / total if total > 0 else float("nan")


def summarise(results: list[CarResult]) -> dict[str, float]:
    """Means over the cars, held-out ones and those trained on apart, and R2 of drag and lift against the tables."""
    found: dict[str, float] = {}
    for label, chosen in (("training", False), ("held out", True)):
        cars = [result for result in results if result.held_out == chosen]
        for name in cars[0].errors if cars else ():
            found[f"relative L2 {name}, {label}"] = float(np.mean([car.errors[name] for car in cars]))
        for name, label_and_r2 in _force_summary(cars, label):
            found[name] = label_and_r2
    return found


def _force_summary(cars: list[CarResult], label: str) -> Iterator[tuple[str, float]]:
    for name in cars[0].forces if cars else ():
        table, model = (np.array([car.forces[name][key] for car in cars]) for key in ("csv", "model"))
        yield f"mean |{name} - table|, {label}", float(np.abs(table - model).mean())
        if len(cars) > 1:
            yield f"R2 of {name}, {label}", r_squared(table, model)


def format_table(results: list[CarResult]) -> str:
    """A line per car."""
    fields, forces = list(results[0].errors), list(results[0].forces)
    head = ["car", *fields, *(f"{name} {key}" for name in forces for key in ("table", "integrated", "model"))]
    rows: list[list[Any]] = [head]
    for car in results:
        values = [f"{car.errors[name]:.3f}" for name in fields]
        values += [f"{value:.4f}" for name in forces for value in car.forces[name].values()]
        rows.append([car.name + (" *" if car.held_out else ""), *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, "(relative L2 errors; * held out)"])
