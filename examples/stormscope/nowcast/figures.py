"""Figures: maps with the borders of the ranks, scores by lead, spectra, rank histograms, seams, and a film."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nowcast.seam import distance_to_border
from nowcast.settings import Settings

if TYPE_CHECKING:
    from nowcast.evaluation import Drawing

INK, MODEL, FAINT, OTHER = "0.25", "#1f6f8b", "#1f6f8b33", "#c0562f"


def require_pyplot() -> Any:
    """matplotlib.pyplot without a screen; raises ImportError with the command that installs it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(f'figures need matplotlib ({error}): pip install matplotlib, or "dpzoo[viz]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_all(
    folder: Path, drawing: "Drawing", summary: list[dict[str, Any]], settings: Settings, journal: list[dict[str, Any]]
) -> None:
    """Write all of them to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_maps(folder / "maps.png", drawing)
    draw_leads(folder / "leads.png", summary, drawing)
    draw_spectra(folder / "spectra.png", summary, settings)
    draw_ranks(folder / "ranks.png", summary)
    draw_seam(folder / "seam.png", drawing)
    draw_film(folder / "rollout.gif", drawing)
    draw_curve(folder / "loss.png", journal)


def draw_maps(file: Path, drawing: "Drawing") -> None:
    """Truth, two members, the ensemble's mean and its error at the last lead; dashed: shard borders."""
    pyplot = require_pyplot()
    names = ("truth", "member 0", "member 1", "mean", "mean - truth")
    count = len(drawing.channels)
    figure, grid = pyplot.subplots(count, 5, figsize=(17, 1.9 * count + 0.8), layout="constrained", squeeze=False)
    known = "not trained on" if drawing.held_out[-1] else "trained on"
    figure.suptitle(f"{drawing.title} + {drawing.hours[-1]:g} h ({known}), on {drawing.ranks} ranks", fontsize=11)
    for row, channel in enumerate(drawing.channels):
        truth, members = drawing.truth[-1, row], drawing.fields[-1, :, row]
        low, high = np.nanquantile(truth, (0.005, 0.995))
        error = members.mean(0) - truth
        most = float(np.nanquantile(np.abs(error), 0.995)) or 1.0
        for column, field in enumerate((truth, members[0], members[1], members.mean(0), error)):
            axes = grid[row, column]
            limits = (-most, most) if column == 4 else (low, high)
            image = axes.imshow(field, cmap="RdBu_r" if column == 4 else "viridis", vmin=limits[0], vmax=limits[1])
            _borders(axes, drawing)
            if row == 0:
                axes.set_title(names[column], fontsize=9, color=INK)
            if column in (3, 4):
                figure.colorbar(image, ax=axes, shrink=0.85, pad=0.01).ax.tick_params(labelsize=7)
        grid[row, 0].set_ylabel(f"{channel} ({drawing.units.get(channel, '')})", fontsize=9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def draw_leads(file: Path, summary: list[dict[str, Any]], drawing: "Drawing") -> None:
    """Error of the mean, spread, CRPS and persistence by lead; hollow: states that were trained on."""
    pyplot = require_pyplot()
    channels = list(summary[0]["scores"])
    figure, grid = _row_of(len(channels), 3.6, 3.4)
    lines = (("rmse", "RMSE of the mean", MODEL), ("spread", "spread", OTHER), ("crps", "CRPS", "0.5"))
    for axes, channel in zip(grid[0], channels, strict=True):
        for name, label, colour in (*lines, ("persistence", "RMSE of persistence", INK)):
            for held_out in (True, False):
                rows = [row for row in summary if row["held_out"] == held_out]
                hours, values = [r["hours"] for r in rows], [r["scores"][channel][name] for r in rows]
                style = {"markerfacecolor": colour if held_out else "white", "label": label if held_out else None}
                axes.plot(hours, values, "o-" if held_out else "o:", color=colour, markersize=4, linewidth=1.2, **style)
        axes.set_title(channel, fontsize=9, color=INK)
        axes.set_xlabel("lead (h); hollow: trained on", fontsize=8)
        axes.set_ylabel(drawing.units.get(channel, ""), fontsize=8)
        axes.set_ylim(bottom=0)
        _quiet(axes)
    grid[0, 0].legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_spectra(file: Path, summary: list[dict[str, Any]], settings: Settings) -> None:
    """Power by wavenumber at the first and the last lead, members (mean) and truth."""
    pyplot = require_pyplot()
    channels = list(summary[0]["scores"])
    figure, grid = _row_of(len(channels), 3.6, 3.2)
    for axes, channel in zip(grid[0], channels, strict=True):
        for row, style in ((summary[0], ":"), (summary[-1], "-")):
            s = row["scores"][channel]
            for name, label, colour in (("true_spectrum", "truth", INK), ("spectrum", "members", MODEL)):
                told = f"{label}, {row['hours']:g} h"
                axes.loglog(s["wavenumbers"][1:], s[name][1:], style, color=colour, linewidth=1.3, label=told)
        axes.set_title(channel, fontsize=9, color=INK)
        axes.set_xlabel(f"waves per {settings.data.spacing_unit.removesuffix('s')}", fontsize=8)
        _quiet(axes)
    grid[0, 0].set_ylabel("power", fontsize=8)
    grid[0, 0].legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_ranks(file: Path, summary: list[dict[str, Any]]) -> None:
    """Rank histograms at the first lead whose truth was held out (else the first)."""
    pyplot = require_pyplot()
    row = next((row for row in summary if row["held_out"]), summary[0])
    channels = list(row["scores"])
    figure, grid = _row_of(len(channels), 3.2, 2.8)
    figure.suptitle(f"rank of the truth among the members, {row['hours']:g} h", fontsize=10)
    for axes, channel in zip(grid[0], channels, strict=True):
        shares = row["scores"][channel]["ranks"]
        axes.bar(range(len(shares)), shares, color=MODEL, width=0.85)
        axes.axhline(1 / len(shares), color=INK, linewidth=0.8)
        axes.set_title(channel, fontsize=9, color=INK)
        _quiet(axes)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_seam(file: Path, drawing: "Drawing") -> None:
    """By rows from the nearest border between ranks, at the first lead: the ensemble's error, and the difference to
    the forecast of one process. A seam would show on the left."""
    pyplot = require_pyplot()
    rows = 2 if drawing.alone is not None else 1
    figure, grid = pyplot.subplots(rows, 1, figsize=(6.5, 2.9 * rows + 0.4), layout="constrained", squeeze=False)
    figure.suptitle(f"{drawing.title}: error and distance to shard borders, {drawing.ranks} ranks", fontsize=10)
    far = distance_to_border(drawing.truth.shape[-2], drawing.borders)
    unit = drawing.scale[:, None, None]
    wrong = np.abs(drawing.fields[0].mean(0) - drawing.truth[0]) / unit
    panels = [(of_rows(wrong, np.nanmean), "|mean - truth| / std of the field")]
    if drawing.alone is not None:
        differs = np.abs(drawing.fields[0] - drawing.alone[0]) / unit
        panels.append((of_rows(differs, np.nanmax), "largest difference to one process / std of the field"))
    for axes, (values, title) in zip(grid[:, 0], panels, strict=True):
        axes.set_title(title, fontsize=9, color=INK)
        if not drawing.borders:
            axes.text(0.5, 0.5, "one rank: there is no border", ha="center", va="center", color=INK)
            continue
        axes.scatter(far, values, s=14, color=MODEL, linewidths=0)
        axes.set_ylim(0, max(1.3 * float(np.nanmax(values)), 1e-9))
        axes.set_xlabel("rows to the nearest border", fontsize=8)
        _quiet(axes)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_film(file: Path, drawing: "Drawing") -> None:
    """The first channel, lead by lead: truth, a member, the spread; a GIF."""
    pyplot = require_pyplot()
    from matplotlib.animation import FuncAnimation, PillowWriter

    truth = np.concatenate([drawing.now[None, :1], drawing.truth[:, :1]])[:, 0]
    start = np.broadcast_to(drawing.now[:1], drawing.fields[0, :, 0].shape)
    members = np.concatenate([start[None], drawing.fields[:, :, 0]])
    hours = np.concatenate([[0.0], drawing.hours])
    low, high = np.nanquantile(truth, (0.005, 0.995))
    spread = members.std(1)
    figure, grid = pyplot.subplots(1, 3, figsize=(11, 2.6), layout="constrained")
    shown = []
    panels = (
        ("truth", truth, low, high),
        ("member 0", members[:, 0], low, high),
        ("spread", spread, 0, np.nanmax(spread) or 1),
    )
    for axes, (name, values, least, most) in zip(grid, panels, strict=True):
        shown.append(
            (axes.imshow(values[0], vmin=least, vmax=most, cmap="magma" if name == "spread" else "viridis"), values)
        )
        axes.set_title(name, fontsize=9, color=INK)
        _borders(axes, drawing)

    def show(frame: int) -> list[Any]:
        figure.suptitle(f"{drawing.channels[0]}, {drawing.title} + {hours[frame]:.3g} h", fontsize=10)
        for image, values in shown:
            image.set_data(values[frame])
        return [image for image, _ in shown]

    FuncAnimation(figure, show, frames=len(hours)).save(file, writer=PillowWriter(fps=2), dpi=80)
    pyplot.close(figure)


def draw_curve(file: Path, journal: list[dict[str, Any]]) -> None:
    """The loss by step, and its running mean."""
    pyplot = require_pyplot()
    figure, axes = pyplot.subplots(figsize=(5.5, 3), layout="constrained")
    steps, losses = np.array([(row["step"], row["loss"]) for row in journal]).T
    axes.semilogy(steps, losses, color=FAINT, linewidth=0.8)
    width = max(1, len(losses) // 15)
    axes.semilogy(steps[width - 1 :], np.convolve(losses, np.ones(width) / width, "valid"), color=MODEL, linewidth=1.6)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("loss", fontsize=8)
    _quiet(axes)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def of_rows(fields: np.ndarray, reduce: Callable[..., np.ndarray]) -> np.ndarray:
    """`(..., y, x)` reduced to a number for each row; NaN for a row without a value."""
    rows = fields.swapaxes(-2, 0).reshape(fields.shape[-2], -1)
    found = np.full(len(rows), np.nan)
    known = np.isfinite(rows).any(1)
    found[known] = reduce(rows[known], axis=1)
    return found


def _row_of(panels: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure with panels side by side, inches each, and its `(1, panels)` axes."""
    size = (width * panels, height)
    found: tuple[Any, Any] = require_pyplot().subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    return found


def _borders(axes: Any, drawing: "Drawing") -> None:
    for row in drawing.borders:
        axes.axhline(row - 0.5, color="white", linewidth=0.9, linestyle="--")
    axes.set(xticks=[], yticks=[])


def _quiet(axes: Any) -> None:
    axes.tick_params(labelsize=8, length=2, color="0.6")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("0.6")
