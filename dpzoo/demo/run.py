"""Start the demo's two runs, compare their losses, and say what was found."""

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from dpzoo.demo import worker
from dpzoo.demo.data import GRID, ForecastPairs, patch_row_split
from dpzoo.demo.figure import GRAVITY, Panel, draw
from dpzoo.demo.optional import EXTRAS, require
from dpzoo.demo.train import DemoConfig
from dpzoo.demo.worker import RankResult

RELATIVE_LIMIT = {"float32": 1e-4, "float64": 1e-9}
"""Largest relative difference of an epoch's loss that counts as rounding. Measured on one process: weights disturbed in
the last bit move the loss by up to 1e-5 in float32 and 3e-14 in float64."""


def run_demo(
    ranks: int = 2, epochs: int | None = None, out: Path = Path("outputs/demo"), precision: str = "float32"
) -> int:
    """Train on one process, then on `ranks`; print the comparison and write `out/forecast.png`.

    Returns the exit status: 0, or 1 when an epoch's losses differ by more than `RELATIVE_LIMIT[precision]`.

    Raises:
        ValueError: a precision that is not in `RELATIVE_LIMIT`, fewer than one epoch, or more ranks than patch rows.
        ImportError: a package of `optional.EXTRAS` is missing; the message says how to install it.
    """
    if precision not in RELATIVE_LIMIT:
        raise ValueError(f"precision must be one of {', '.join(RELATIVE_LIMIT)}, not {precision!r}.")
    if epochs is not None and epochs < 1:
        raise ValueError(f"the demo needs at least 1 epoch, {epochs} were asked for.")
    for module in EXTRAS:
        require(module)
    config = DemoConfig() if epochs is None else replace(DemoConfig(), epochs=epochs)
    sizes = patch_row_split(ranks, config.patch)
    held_out = ForecastPairs(list(config.validation_members))
    dtype = getattr(torch, precision)
    _introduce(config, sizes, precision)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _spawn(worker.plain, (config, dtype, folder), 1)
        _spawn(worker.domain_parallel, (ranks, config, dtype, folder), ranks)
        one = RankResult.load(folder / "plain.pt")
        many = [RankResult.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
    largest = _print_losses(one, many)
    _print_forecast(one, many[0], config)
    _print_memory(one, many)
    print(f"figure: {_write_figure(out, held_out, many, sizes)}")
    limit = RELATIVE_LIMIT[precision]
    equal = largest <= limit
    verdict = "equal to rounding" if equal else "NOT EQUAL"
    print(f"\n1 process and {ranks} ranks: {verdict}; largest relative difference {largest:.1e}, limit {limit:.0e}")
    return 0 if equal else 1


def _spawn(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> None:
    torch.multiprocessing.spawn(function, arguments, nprocs=processes, join=True)


def _introduce(config: DemoConfig, sizes: Sequence[int], precision: str) -> None:
    print("ERA5 ensemble, geopotential and temperature at 850 and 500 hPa: forecast the next 12 hours.")
    print("Contains modified Copernicus Climate Change Service information 2017.")
    print(
        f"dense ViT, {config.depth} blocks of width {config.embed_dim}, patch {config.patch} x {config.patch}, "
        f"{precision}; grid {GRID[0]} x {GRID[1]}; rows per rank: {' + '.join(map(str, sizes))}\n"
    )


def _print_losses(one: RankResult, many: Sequence[RankResult]) -> float:
    """Print the losses side by side and return the largest relative difference, over all epochs and all ranks."""
    largest = 0.0
    print(f"{'epoch':>5} {'loss 1 process':>15} {f'loss {len(many)} ranks':>15} {'difference':>12}")
    for epoch, loss in enumerate(one.history):
        differences = [abs(result.history[epoch] - loss) for result in many]
        difference = max(d if math.isfinite(d) else math.inf for d in differences)
        largest = max(largest, difference / loss)
        print(f"{epoch + 1:>5} {loss:>15.8f} {many[0].history[epoch]:>15.8f} {difference:>12.1e}")
    return largest


def _print_forecast(one: RankResult, first: RankResult, config: DemoConfig) -> None:
    assert one.forecast is not None
    assert first.forecast is not None
    difference = (one.forecast - first.forecast).abs().max().item()
    members = ", ".join(map(str, config.validation_members))
    print(
        f"\nheld-out members {members}: loss {one.validation:.6f} on 1 process, {first.validation:.6f} on ranks "
        f"(no forecast at all: {one.persistence:.6f})"
    )
    print(f"one forecast, point by point: largest difference {difference:.1e} standard deviations")


def _print_memory(one: RankResult, many: Sequence[RankResult]) -> None:
    print(f"\n{'memory':<12} {'rows':>5} {'kept for backward':>18} {'peak above start-up':>20} {'training time':>14}")
    named = [("1 process", one)] + [(f"rank {rank} of {len(many)}", result) for rank, result in enumerate(many)]
    for name, result in named:
        kept, peak = result.kept_for_backward / 2**20, result.peak_memory / 2**20
        print(f"{name:<12} {result.rows:>5} {kept:>14.2f} MiB {peak:>16.1f} MiB {result.seconds:>12.1f} s")
    print(
        "Weights, gradients and Adam's moments are whole on every rank; the ranks share what autograd keeps for\n"
        "backward. With a model this small the peak is mostly weights, library buffers and allocator slack.\n"
    )


def panels_of(pairs: ForecastPairs, index: int, forecast: torch.Tensor) -> list[Panel]:
    """Panels of sample `index`: 500 hPa height (m) and 850 hPa temperature (K); `forecast` is `(4, row, column)`."""
    state, change = pairs[index]
    s = pairs.statistics
    now, truth = state[0] * s.std + s.mean, change[0] * s.change_std
    later, forecast = now + truth, forecast.float() * s.change_std
    panels = []
    for name, title, unit, scale, contour in (
        ("z500", "500 hPa height", "m", 1 / GRAVITY, 80.0),
        ("t850", "850 hPa temperature", "K", 1.0, 8.0),
    ):
        channel = pairs.channels.index(name)
        arrays = ((tensor[channel] * scale).numpy() for tensor in (later, truth, forecast))
        field, true_change, forecast_change = arrays
        panels.append(Panel(title, unit, field, true_change, forecast_change, contour))
    return panels


def _write_figure(out: Path, held_out: ForecastPairs, many: Sequence[RankResult], sizes: Sequence[int]) -> Path:
    assert many[0].forecast is not None
    index = len(held_out) - 1
    out.mkdir(parents=True, exist_ok=True)
    path = out / "forecast.png"
    title = f"ERA5 {held_out.label(index)} (held out): 12 h forecast by a dense ViT on {len(sizes)} ranks"
    draw(path, panels_of(held_out, index, many[0].forecast), *held_out.coordinates(), sizes, title)
    return path
