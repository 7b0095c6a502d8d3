"""Train once for each fold of the embedded cars, each time without the cars it is then tested on; print the errors.

python examples/drivaer/k_fold.py [--folds 5] [--ranks 2] [key=value of train.py ...]
"""

import argparse
import json
from dataclasses import replace

from aero.configuration import compose
from aero.evaluation import CarResult, format_table, summarise, train_and_evaluate
from aero.settings import Settings

from dpzoo.train import launch


def run_folds(settings: Settings, folds: int) -> list[CarResult]:
    """Every car as it is predicted by the model that has not seen it."""
    held_out = []
    for fold in range(folds):
        out = settings.out / f"fold_{fold}"
        asked = replace(settings.evaluate, cars="validation", figures="none")
        one = replace(settings, out=out, data=replace(settings.data, fold=(fold, folds)), evaluate=asked)
        if status := launch(train_and_evaluate, settings.ranks, one):
            raise SystemExit(status)
        rows = json.loads((out / "evaluation.json").read_text())["cars"]
        held_out += [CarResult(**row) for row in rows]
    return held_out


def main() -> None:
    parser = argparse.ArgumentParser(description="k-fold cross-validation over the cars.")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="as for train.py, such as out=outputs/folds ranks=2")
    arguments = parser.parse_args()
    settings = compose(["out=outputs/drivaer/folds", "clouds=both", "train.epochs=40", *arguments.overrides])
    results = run_folds(settings, arguments.folds)
    print(f"\n{arguments.folds} folds, each car predicted by the model that has not seen it\n{format_table(results)}")
    summary = summarise(results)
    print("\n".join(f"{name}: {value:.4g}" for name, value in summary.items()))
    (settings.out / "folds.json").write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
