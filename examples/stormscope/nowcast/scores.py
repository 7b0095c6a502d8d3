"""Scores of one ensemble at one lead, and their means over several; fields stay cut, only sums travel."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpzoo.metrics import (
    contingency,
    crps,
    ensemble_rmse,
    ensemble_spread,
    fractions_skill_score,
    radial_power_spectrum,
    rank_histogram,
)
from dpzoo.shard import ShardTensor
from nowcast.task import counting

GRID = (-2, -1)


def whole(t: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return t.full_tensor() if isinstance(t, ShardTensor) else t


def score(
    ensemble: Tensor,
    truth: Tensor,
    now: Tensor,
    channels: Sequence[str],
    *,
    weights: Tensor | None = None,
    seen: Tensor | None = None,
    thresholds: Mapping[str, Sequence[float]] | None = None,
    window: int = 5,
    spacing: float = 1.0,
) -> dict[str, dict[str, Any]]:
    """Channel -> scores of `ensemble (M, C, y, x)` against `truth (C, y, x)`.

    `now` is the state at the start: "persistence" is the RMSE of the forecast that it stays. `weights` is `(1, y, x)`.
    Where `seen` (bool, `(C, y, x)`) is False nothing counts, whatever the fields hold there; NaN if no point counts.
    Scores are numbers; "ranks" `(M + 1,)`; "spectrum" and "true_spectrum" `(K,)` at "wavenumbers"; and per threshold
    "hits", "misses", "false_alarms" (over all members) and "fss".
    """
    weights = counting(weights, seen)
    plain = {
        "crps": crps(ensemble, truth, weights=weights, dims=GRID),
        "mse": ensemble_rmse(ensemble, truth, weights=weights, dims=GRID).square(),
        "variance": ensemble_spread(ensemble, weights=weights, dims=GRID).square(),
        "persistence_mse": ensemble_rmse(now.unsqueeze(0), truth, weights=weights, dims=GRID).square(),
    }
    numbers, power = radial_power_spectrum(ensemble, spacing, taper=True, mask=seen)
    _, true_power = radial_power_spectrum(truth, spacing, taper=True, mask=seen)
    values = {name: whole(value).tolist() for name, value in plain.items()}
    spectra = whole(power.mean(0)), whole(true_power)
    found: dict[str, dict[str, Any]] = {}
    every = None if weights is None else weights.expand(truth.shape)
    for place, channel in enumerate(channels):
        here = None if every is None else every[place]
        ranks = rank_histogram(ensemble[:, place], truth[place], weights=here)
        found[channel] = {name: value[place] for name, value in values.items()} | {
            "ranks": whole(ranks).tolist(),
            "wavenumbers": whole(numbers).tolist(),
            "spectrum": spectra[0][place].tolist(),
            "true_spectrum": spectra[1][place].tolist(),
        }
        asked = (thresholds or {}).get(channel)
        if asked:
            here = None if seen is None else seen[place]
            found[channel]["events"] = _events(ensemble[:, place], truth[place], asked, window, here)
    return found


def _events(
    ensemble: Tensor, truth: Tensor, thresholds: Sequence[float], window: int, seen: Tensor | None
) -> dict[str, list[float]]:
    table = contingency(ensemble, truth.expand(ensemble.shape), thresholds, weights=seen)
    fss = fractions_skill_score(ensemble, truth, thresholds, window, member_dim=0, mask=seen)
    return {
        "thresholds": list(thresholds),
        "hits": whole(table.hits).tolist(),
        "misses": whole(table.misses).tolist(),
        "false_alarms": whole(table.false_alarms).tolist(),
        "fss": whole(fss).tolist(),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over several scores of one channel: RMSE and spread are roots of means, CSI is of added counts.

    Adds "rmse", "spread", "persistence", "ratio" (spread over error, 1 for a reliable ensemble), and "csi".
    """
    means = {name: _mean([r[name] for r in rows]).item() for name in ("crps", "mse", "variance", "persistence_mse")}
    members = len(rows[0]["ranks"]) - 1
    rmse, spread = means["mse"] ** 0.5, means["variance"] ** 0.5
    found: dict[str, Any] = {
        "crps": means["crps"],
        "rmse": rmse,
        "spread": spread,
        "persistence": means["persistence_mse"] ** 0.5,
        "ratio": ((members + 1) / members) ** 0.5 * spread / rmse if rmse else float("nan"),
    }
    for name in ("ranks", "wavenumbers", "spectrum", "true_spectrum"):
        found[name] = _mean([r[name] for r in rows]).tolist()
    if "events" in rows[0]:
        events = [r["events"] for r in rows]
        hits, misses, alarms = (np.sum([e[n] for e in events], axis=0) for n in ("hits", "misses", "false_alarms"))
        with np.errstate(invalid="ignore", divide="ignore"):
            csi = hits / (hits + misses + alarms)
        fss = _mean([e["fss"] for e in events])
        found["events"] = {"thresholds": events[0]["thresholds"], "csi": csi.tolist(), "fss": fss.tolist()}
    return found


def _mean(rows: Sequence[Any]) -> np.ndarray:
    """Mean over the rows that have a number; NaN where none has."""
    table = np.array(rows, float)
    known = np.isfinite(table)
    return np.asarray(np.where(known.any(0), np.where(known, table, 0).sum(0) / np.maximum(known.sum(0), 1), np.nan))


def finite(values: Any) -> Any:
    """Nested lists and mappings with None for what is not finite, which JSON has no number for."""
    if isinstance(values, Mapping):
        return {key: finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [finite(value) for value in values]
    return None if isinstance(values, float) and not np.isfinite(values) else values


def as_array(t: Tensor) -> np.ndarray:
    """The whole tensor as an array."""
    return whole(t).detach().to(torch.float32).cpu().numpy()
