"""Train. `python examples/stormscope/train.py ranks=2`, `--config-name storms`, or under torchrun or srun."""

import sys

import hydra
from nowcast.settings import Settings
from nowcast.training import train
from omegaconf import DictConfig, OmegaConf

from dpzoo.train import launch


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    settings = Settings.from_dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    sys.exit(launch(train, settings.ranks, settings))


if __name__ == "__main__":
    main()
