"""Figures of a trained model: the surface, parity of fields and forces, and what is to be seen at shard borders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aero.clouds import KINDS
from aero.vtp import require_pyvista

if TYPE_CHECKING:
    from aero.evaluation import CarResult, Drawing

INK, MODEL, FAINT = "0.25", "#1f6f8b", "#1f6f8b33"
UNITS = {"U": "m/s", "nut": "m²/s"}
VIEWS = {"from the side": (0, 2, 1), "from behind": (1, 2, 0), "from above": (0, 1, 2)}
"""Title -> columns of the picture's axes, and of the direction towards the viewer."""


def require_pyplot() -> Any:
    """matplotlib.pyplot without a screen; raises ImportError with the command that installs it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f'figures need matplotlib ({error}): pip install matplotlib, or "dpzoo[viz]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _title(drawing: Drawing) -> str:
    role = "held out" if drawing.held_out else "trained on"
    return f"{drawing.name} ({role}), predicted on {drawing.ranks} rank{'s' * (drawing.ranks > 1)}"


def draw_surface(file: Path, drawing: Drawing, renderer: str = "matplotlib") -> None:
    """Surface pressure: truth, prediction and error, from three sides; or in perspective with pyvista."""
    truth, predicted = (source["surface"][:, 0] for source in (drawing.truth, drawing.predicted))
    error = predicted - truth
    low, high = np.quantile(truth, (0.01, 0.99))
    wrong = float(np.quantile(np.abs(error), 0.99))
    columns = [
        ("true pressure", truth, "viridis", low, high),
        ("predicted pressure", predicted, "viridis", low, high),
        ("prediction - truth", error, "RdBu_r", -wrong, wrong),
    ]
    if renderer == "pyvista":
        _surface_in_perspective(file, drawing.centers["surface"], columns)
        return
    pyplot = require_pyplot()
    points = drawing.centers["surface"]
    spans = [max(np.ptp(points[:, up]) / np.ptp(points[:, across]), 0.3) for across, up, _ in VIEWS.values()]
    figure, grid = pyplot.subplots(
        3, 3, figsize=(13, 4.3 * sum(spans) + 1.2), layout="constrained", gridspec_kw={"height_ratios": spans}
    )
    figure.suptitle(f"{_title(drawing)}: kinematic pressure on the surface (m²/s²)", fontsize=11)
    for number, (name, values, colours, least, most) in enumerate(columns):
        grid[0, number].set_title(name, fontsize=10)
        for axes, (view, (across, up, depth)) in zip(grid[:, number], VIEWS.items(), strict=True):
            seen = np.flatnonzero(drawing.outward[:, depth] > 0.05)
            seen = seen[np.argsort(points[seen, depth])]
            inch = 4.0 / np.ptp(points[:, across])  # a metre in the picture
            image = axes.scatter(
                points[seen, across], points[seen, up], s=2.2 * drawing.areas[seen] * (72 * inch) ** 2, c=values[seen],
                marker="s", cmap=colours, vmin=least, vmax=most, linewidths=0, rasterized=True,
            )  # fmt: skip
            axes.set_aspect("equal")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if number == 0:
                axes.set_ylabel(view, fontsize=9, color=INK)
        figure.colorbar(image, ax=grid[:, number].tolist(), location="bottom", shrink=0.8, pad=0.02, aspect=30)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _surface_in_perspective(file: Path, points: np.ndarray, columns: list[tuple[Any, ...]]) -> None:
    pyvista = require_pyvista()
    plotter = pyvista.Plotter(off_screen=True, shape=(1, 3), window_size=(2100, 600))
    for number, (name, values, colours, least, most) in enumerate(columns):
        plotter.subplot(0, number)
        cloud = pyvista.PolyData(points)
        cloud[name] = values
        plotter.add_mesh(
            cloud, scalars=name, cmap=colours, clim=(least, most), point_size=6, render_points_as_spheres=True
        )
        plotter.view_vector((-1.0, -1.2, 0.7))
    plotter.screenshot(file)
    plotter.close()


def draw_parity(file: Path, drawing: Drawing) -> None:
    """Predicted against true values of every field; a vector's components are drawn together."""
    pyplot = require_pyplot()
    panels = [(name, field, columns) for name in drawing.truth for field, columns in KINDS[name].fields.items()]
    figure, grid = pyplot.subplots(
        -(-len(panels) // 4), min(4, len(panels)), figsize=(13, 3.3 * -(-len(panels) // 4) + 0.4),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    figure.suptitle(_title(drawing), fontsize=11)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, field, columns) in zip(grid.flat, panels, strict=False):
        truth, predicted = (source[name][:, columns].ravel() for source in (drawing.truth, drawing.predicted))
        low, high = np.quantile(truth, (0.001, 0.999))
        axes.plot([low, high], [low, high], color=INK, linewidth=0.8)
        axes.scatter(truth, predicted, s=2, color=MODEL, alpha=0.25, linewidths=0, rasterized=True)
        error = np.linalg.norm(predicted - truth) / np.linalg.norm(truth)
        axes.set_title(f"{name} {field}: relative L2 {error:.3f}", fontsize=9, color=INK)
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.set_xlabel(f"true ({UNITS.get(field, 'm²/s²')})", fontsize=8)
        axes.set_ylabel("predicted", fontsize=8)
        _quiet(axes)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def draw_seam(file: Path, drawing: Drawing, scale: Mapping[str, np.ndarray]) -> None:
    """Error against the distance to the nearest shard border, in standard deviations; and, below, the difference
    between the prediction on ranks and that of one process. A seam would show on the left."""
    pyplot = require_pyplot()
    rows = 2 if drawing.alone else 1
    figure, grid = pyplot.subplots(
        rows, len(drawing.truth), figsize=(6.5 * len(drawing.truth), 3.2 * rows + 0.5),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    figure.suptitle(f"{_title(drawing)}: error and distance to shard borders", fontsize=11)
    for column, name in enumerate(drawing.truth):
        far = drawing.border[name]
        if not np.isfinite(far).all():
            grid[0, column].text(0.5, 0.5, "one rank: there is no border", ha="center", va="center", color=INK)
            continue
        wrong = np.abs(drawing.predicted[name] - drawing.truth[name]) / scale[name]
        _against_distance(grid[0, column], far, wrong.mean(1), f"{name}: error of the model / std of the field")
        if drawing.alone:
            differs = np.abs(drawing.predicted[name] - drawing.alone[name]) / scale[name]
            axes = grid[1, column]
            _against_distance(axes, far, differs.max(1), f"{name}: difference to one process / std of the field")
            axes.set_ylim(0, max(3 * float(differs.max()), 1e-9))
        grid[-1, column].set_xlabel("distance to the nearest point of another rank (m)", fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _against_distance(axes: Any, distance: np.ndarray, values: np.ndarray, title: str) -> None:
    edges = np.unique(np.quantile(distance, np.linspace(0, 1, 13)))
    bins = np.clip(np.searchsorted(edges, distance, side="right") - 1, 0, len(edges) - 2)
    middle = np.array([np.median(distance[bins == b]) for b in range(len(edges) - 1)])
    low, median, high = (
        np.array([np.quantile(values[bins == b], q) for b in range(len(edges) - 1)]) for q in (0.1, 0.5, 0.9)
    )
    axes.scatter(distance, values, s=2, color=INK, alpha=0.12, linewidths=0, rasterized=True)
    axes.fill_between(middle, low, high, color=FAINT, linewidth=0, label="10 to 90 %")
    axes.plot(middle, median, color=MODEL, linewidth=1.8, label="median")
    axes.set_xscale("log")
    axes.set_ylim(0, float(np.quantile(values, 0.99)) * 1.1 or 1.0)
    axes.set_title(title, fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _quiet(axes)


def draw_forces(file: Path, results: list[CarResult]) -> None:
    """Drag and lift from the predicted fields against the force table, a point a car; nothing without a surface."""
    names = list(results[0].forces)
    if not names:
        return
    pyplot = require_pyplot()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure, grid = pyplot.subplots(1, len(names), figsize=(4.4 * len(names), 4.2), layout="constrained", squeeze=False)
    for axes, name in zip(grid[0], names, strict=True):
        for held_out, marker, label in ((False, "o", "trained on"), (True, "D", "held out")):
            cars = [car for car in results if car.held_out == held_out]
            if not cars:
                continue
            x, y = ([car.forces[name][key] for car in cars] for key in ("csv", "model"))
            axes.scatter(x, y, marker=marker, color=MODEL if held_out else INK, s=36, label=label, zorder=3)
            for car, across, up in zip(cars, x, y, strict=True):
                axes.annotate(car.name, (across, up), xytext=(5, 3), textcoords="offset points", fontsize=7, color=INK)
        ends = [value for car in results for value in (car.forces[name]["csv"], car.forces[name]["model"])]
        around = 0.1 * (max(ends) - min(ends)) or 0.1
        line = [min(ends) - around, max(ends) + around]
        axes.plot(line, line, color=INK, linewidth=0.8)
        axes.set(
            xlabel=f"{name}, force table", ylabel=f"{name}, predicted fields", xlim=line, ylim=line, aspect="equal"
        )
        axes.legend(frameon=False, fontsize=8)
        _quiet(axes)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _quiet(axes: Any) -> None:
    axes.tick_params(labelsize=8, length=2, color="0.6")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("0.6")
