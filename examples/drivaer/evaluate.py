"""Evaluate a run: `python examples/drivaer/evaluate.py out=outputs/drivaer/surface evaluate.vtp=true`."""

import sys
from pathlib import Path

import hydra
from aero.evaluation import evaluate
from aero.settings import EvaluateSettings
from omegaconf import DictConfig, OmegaConf

from dpzoo.train import launch


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    # Of the configuration only `out`, `ranks` and `evaluate` matter here; the rest is that of the run.
    asked = EvaluateSettings(**OmegaConf.to_container(config.evaluate, resolve=True))
    sys.exit(launch(evaluate, config.ranks, Path(config.out), asked))


if __name__ == "__main__":
    main()
