"""The demo's picture: true and forecast 12-hour change, their difference, and the border between the shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.demo.optional import require

GRAVITY = 9.80665
"""Standard gravity (m s-2): geopotential divided by it is geopotential height."""


@dataclass(frozen=True)
class Panel:
    """One row of the figure, all arrays `(row, column)`: a field 12 hours later, its true and its forecast change."""

    title: str
    unit: str
    field: np.ndarray
    truth: np.ndarray
    forecast: np.ndarray
    contour_step: float


def _pyplot() -> Any:
    require("matplotlib").use("Agg")
    from matplotlib import pyplot

    return pyplot


def _rms(values: np.ndarray, latitude: np.ndarray) -> float:
    """Root mean square over the sphere: rows weigh by the cosine of their latitude."""
    weight = np.cos(np.deg2rad(latitude))[:, None]
    return float(np.sqrt((weight * values**2).sum() / (weight.sum() * values.shape[1])))


def _draw_borders(axes: Any, latitude: np.ndarray, rows: Sequence[int], label: bool) -> None:
    """Lines where one rank's rows end and the next rank's begin, with the ranks' names beside them."""
    edges = np.cumsum([0, *rows])
    spacing = latitude[0] - latitude[1]
    for rank, (first, last) in enumerate(pairwise(edges)):
        if first:
            axes.axhline(latitude[first] + spacing / 2, color="black", linewidth=1.6, linestyle=(0, (5, 2)))
        if label:
            at_border = latitude[first] if first else latitude[last - 1]
            style = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
            place = {"ha": "left", "va": "top" if first else "bottom", "fontsize": 8}
            axes.text(4, at_border, f"rank {rank}: {last - first} rows", bbox=style, **place)


def _decorate(axes: Any, bottom: bool, left: bool) -> None:
    axes.set_xticks(range(0, 360, 60), [f"{degrees}°E" for degrees in range(0, 360, 60)] if bottom else [])
    names = {60: "60°N", 30: "30°N", 0: "0°", -30: "30°S", -60: "60°S"}
    axes.set_yticks(list(names), list(names.values()) if left else [])
    axes.tick_params(labelsize=8, length=2, color="0.5")
    for spine in axes.spines.values():
        spine.set_color("0.5")


def draw(
    path: Path, panels: Sequence[Panel], latitude: np.ndarray, longitude: np.ndarray, rows: Sequence[int], title: str
) -> None:
    """Write a PNG with a row per panel: truth, forecast and error of the 12-hour change, in colour on one scale.

    Contours show the field itself, a dashed line each border between ranks; `rows` is the number of rows per rank.
    """
    pyplot = _pyplot()
    figure, grid = pyplot.subplots(
        len(panels), 3, figsize=(14, 2.9 * len(panels) + 0.6), layout="constrained", squeeze=False
    )
    figure.suptitle(f"{title}\ncontours: the field itself; dashed: border between ranks", fontsize=11)
    for number, (panel, line) in enumerate(zip(panels, grid, strict=True)):
        limit = float(np.quantile(np.abs(panel.truth), 0.995))
        error = panel.forecast - panel.truth
        start = panel.field - panel.truth
        score = f"rms {_rms(error, latitude):.3g} {panel.unit}, of no change {_rms(panel.truth, latitude):.3g}"
        columns = (
            (f"{panel.title}: true 12 h change", panel.truth, panel.field),
            ("forecast change", panel.forecast, start + panel.forecast),
            (f"error ({score})", error, None),
        )
        for column, (axes, (name, change, contours)) in enumerate(zip(line, columns, strict=True)):
            image = axes.pcolormesh(
                longitude, latitude, change, cmap="RdBu_r", vmin=-limit, vmax=limit, rasterized=True
            )
            if contours is not None:
                lowest, highest = (
                    round(float(value) / panel.contour_step) for value in (contours.min(), contours.max())
                )
                levels = np.arange(lowest, highest) * panel.contour_step
                axes.contour(longitude, latitude, contours, levels, colors="0.15", linewidths=0.6, linestyles="solid")
            axes.set_title(name, fontsize=10)
            _draw_borders(axes, latitude, rows, label=column == 1)
            _decorate(axes, bottom=number == len(panels) - 1, left=column == 0)
        figure.colorbar(image, ax=line, label=panel.unit, pad=0.01, aspect=16, extend="both")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
