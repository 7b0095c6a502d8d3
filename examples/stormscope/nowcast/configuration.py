"""The configuration in `conf/` without a command line."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose as compose_config
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from nowcast.settings import Settings

EXAMPLE = Path(__file__).resolve().parent.parent


def compose(name: str = "config", overrides: Sequence[str] = ()) -> Settings:
    """What `train.py --config-name NAME` would run with these words on its command line."""
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base=None):
        config = compose_config(name, overrides=list(overrides))
    return Settings.from_dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
