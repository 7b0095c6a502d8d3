"""The demo: train on two ranks, forecast, score, draw; and show that one and four ranks follow the same loss curve."""

import argparse
import shutil
import sys
import time
from dataclasses import replace

from nowcast.configuration import compose
from nowcast.evaluation import train_and_evaluate
from nowcast.settings import Settings
from nowcast.training import train

from dpzoo.train import launch
from dpzoo.train.journal import read_journal

LIMIT = 1e-4
"""Largest relative difference between the losses of a step that counts as rounding, in float32."""


def compare_curves(settings: Settings, steps: int, counts: tuple[int, ...] = (1, 4)) -> float:
    """Train the first steps again on other numbers of ranks; print the losses, return the largest difference."""
    curves = {settings.ranks: _losses(settings)[:steps]}
    for ranks in counts:
        few = replace(settings, out=settings.out / f"on_{ranks}", ranks=ranks)
        few = replace(few, train=replace(few.train, max_steps=steps, validate_every=0, checkpoint_every=0))
        launch(train, ranks, few)
        curves[ranks] = _losses(few)
    one, largest = curves[1], 0.0
    titles = "".join(f"{f'{n} rank' + 's' * (n > 1):>14}" for n in sorted(curves))
    print(f"\nloss      {titles}{'difference':>14}")
    for step in range(steps):
        row = [curves[n][step] for n in sorted(curves)]
        difference = max(abs(value / one[step] - 1) for value in row)
        largest = max(largest, difference)
        print(f"step {step + 1:<5}" + "".join(f"{value:>14.8f}" for value in row) + f"{difference:>14.1e}")
    return largest


def _losses(settings: Settings) -> list[float]:
    return [row["loss"] for row in read_journal(settings.out)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-name", default="config", help="as for train.py")
    parser.add_argument("--steps", type=int, default=8, help="steps that are compared")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    arguments = parser.parse_args()
    settings = compose(arguments.config_name, ["out=outputs/stormscope/demo", *arguments.overrides])
    shutil.rmtree(settings.out, ignore_errors=True)
    begin = time.perf_counter()
    launch(train_and_evaluate, settings.ranks, settings)
    largest = compare_curves(settings, arguments.steps)
    equal = largest <= LIMIT
    print(f"1, 2 and 4 ranks: {'the same' if equal else 'NOT THE SAME'} loss curve; largest difference {largest:.1e}")
    print(f"{time.perf_counter() - begin:.0f} s")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
