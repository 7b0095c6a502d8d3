"""Packages that the demo needs and the library does not: asked for by name, with the line that installs them."""

from typing import Any

from dpzoo.datapipes import optional as datapipes_optional

EXTRAS = {"zarr": "data", "matplotlib": "viz", "tqdm": "track"}
"""Module -> the extra of dpzoo that brings it."""


def require(module: str) -> Any:
    """Import and return `module`, one of `EXTRAS`.

    Raises:
        ImportError: it is not installed; the message is the command that installs it.
    """
    return datapipes_optional.require(module, "the demo", EXTRAS[module])
