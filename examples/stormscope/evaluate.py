"""Score the forecasts of a run and draw them: `python examples/stormscope/evaluate.py out=outputs/stormscope/era5`."""

import sys
from pathlib import Path

import hydra
from nowcast.evaluation import evaluate
from nowcast.settings import evaluate_settings
from omegaconf import DictConfig, OmegaConf

from dpzoo.train import launch


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    # Of the configuration only `out`, `ranks` and `evaluate` matter here; the rest is that of the run.
    asked = evaluate_settings(OmegaConf.to_container(config.evaluate, resolve=True))
    sys.exit(launch(evaluate, config.ranks, Path(config.out), asked))


if __name__ == "__main__":
    main()
