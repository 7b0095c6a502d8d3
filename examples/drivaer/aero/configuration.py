"""The configuration in `conf/` without a command line."""

from collections.abc import Sequence

from hydra import compose as compose_config
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from aero.cars import EXAMPLE
from aero.settings import Settings


def compose(overrides: Sequence[str] = ()) -> Settings:
    """What `train.py` would run with these words on its command line; `out` has to be among them."""
    with initialize_config_dir(str(EXAMPLE / "conf"), version_base=None):
        config = compose_config("config", overrides=list(overrides))
    return Settings.from_dict(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
