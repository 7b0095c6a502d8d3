"""Scores and figures of a trained model's forecasts."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpzoo.shard import DistributedManager
from dpzoo.train.journal import read_journal
from nowcast.forecasting import Forecast, forecasts
from nowcast.scores import as_array, finite, score, summarise
from nowcast.seam import borders_of, on_one_rank
from nowcast.settings import EvaluateSettings, Settings
from nowcast.task import scored
from nowcast.training import Setup, load_run, train


@dataclass(frozen=True)
class Drawing:
    """A forecast for the figures, whole, as arrays.

    Attributes:
        fields, truth, now: as in `Forecast`.
        scale: deviation of each channel, `(C,)`.
        alone: forecast of one process from the same noise, or None.
        borders: first rows of the shards after the first.
    """

    title: str
    channels: tuple[str, ...]
    units: Mapping[str, str]
    hours: np.ndarray
    held_out: tuple[bool, ...]
    fields: np.ndarray
    truth: np.ndarray
    now: np.ndarray
    scale: np.ndarray
    alone: np.ndarray | None
    borders: list[int]
    ranks: int


def evaluate(out: Path, asked: EvaluateSettings) -> int:
    """What each rank of `evaluate.py` runs: prints a table, writes `evaluation.json` and figures."""
    if asked.figures:
        from nowcast.figures import require_pyplot

        require_pyplot()  # on all ranks, before anything is computed that only the first will use
    made, checkpoint = load_run(out, asked)
    rows: list[dict[str, Any]] = []
    drawing: Drawing | None = None
    for forecast in forecasts(made):
        rows += score_forecast(made, forecast)
        if asked.figures and drawing is None:
            drawing = draw(made, forecast)
    if made.team.is_first:
        summary = by_lead(rows)
        table = {"checkpoint": checkpoint.name, "summary": summary, "forecasts": rows}
        (out / "evaluation.json").write_text(json.dumps(finite(table), indent=1))
        print(f"{checkpoint}\n{format_table(summary)}")
        if drawing is not None:
            from nowcast.figures import draw_all

            draw_all(out / "figures", drawing, summary, made.task.settings, read_journal(out))
            print(f"figures: {out / 'figures'}")
    return 0


def train_and_evaluate(settings: Settings) -> int:
    """What each rank runs to do both at once, as the configuration says."""
    return train(settings) or evaluate(settings.out, settings.evaluate)


def score_forecast(made: Setup, forecast: Forecast) -> list[dict[str, Any]]:
    """A row per lead: start, analysis member, lead in hours, whether its truth was held out, and scores by channel."""
    settings = made.task.settings
    asked, sample = settings.evaluate, forecast.sample
    area = made.task.area(sample)
    rows = []
    for lead, held_out in enumerate(forecast.held_out):
        scores = score(
            forecast.fields[lead],
            forecast.truth[lead],
            forecast.now,
            sample.channels["next"],
            weights=area,
            seen=scored(sample, lead),
            thresholds=asked.thresholds,
            window=asked.window,
            spacing=settings.data.spacing,
        )
        hours = (sample.times["next"][lead] - sample.time) / np.timedelta64(3600, "s")
        about = {"start": str(sample.time), "member": sample.member, "hours": float(hours), "held_out": held_out}
        rows.append({**about, "scores": scores})
    return rows


def by_lead(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same lead and kind (held out or not) in one."""
    kinds = sorted({(row["hours"], row["held_out"]) for row in rows})
    found = []
    for hours, held_out in kinds:
        alike = [row["scores"] for row in rows if (row["hours"], row["held_out"]) == (hours, held_out)]
        means = {channel: summarise([scores[channel] for scores in alike]) for channel in alike[0]}
        found.append({"hours": hours, "held_out": held_out, "forecasts": len(alike), "scores": means})
    return found


def draw(made: Setup, forecast: Forecast) -> Drawing:
    """The forecast as arrays, and that of one process from the same noise; all ranks take part."""
    task, sample = made.task, forecast.sample
    asked, data = task.settings.evaluate, task.settings.data
    alone = None
    if asked.compare and made.mesh.size() > 1:
        mesh = DistributedManager().initialize_mesh((-1, 1), ("copies", "alone"))["alone"]
        tensors, masks = ({n: on_one_rank(t, mesh) for n, t in ts.items()} for ts in (sample.tensors, sample.masks))
        plain = replace(sample, tensors=tensors, masks=masks)
        fields = task.forecast(made.model, plain, len(forecast.fields), asked.members, asked.seed, asked.batch)
        alone = as_array(fields)
    statistics = task.statistics.streams["next"]
    channels = sample.channels["next"]
    return Drawing(
        forecast.title,
        channels,
        data.units,
        (sample.times["next"] - sample.time) / np.timedelta64(3600, "s"),
        forecast.held_out,
        as_array(forecast.fields),
        as_array(forecast.truth),
        as_array(forecast.now),
        np.array([float(statistics[c].std[0]) for c in channels]),
        alone,
        borders_of(forecast.truth),
        made.mesh.size(),
    )


def format_table(summary: list[dict[str, Any]]) -> str:
    """A line per lead and channel."""
    head = ("lead", "channel", "CRPS", "RMSE", "persistence", "spread", "spread/error", "CSI", "FSS")
    lines = [head]
    for row in summary:
        for channel, s in row["scores"].items():
            events = s.get("events", {"csi": [], "fss": []})
            numbers = [f"{s[name]:.4g}" for name in ("crps", "rmse", "persistence", "spread", "ratio")]
            lists = [" ".join(f"{value:.2f}" for value in events[name]) for name in ("csi", "fss")]
            lines.append((f"{row['hours']:g} h" + " *" * row["held_out"], channel, *numbers, *lists))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([*text, "(* states that were not trained on; CSI and FSS at the thresholds, in their order)"])
