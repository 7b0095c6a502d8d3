"""Packages that the demo needs and the library does not: asked for by name, with the line that installs them."""

from importlib import import_module
from typing import Any

EXTRAS = {"zarr": "data", "matplotlib": "viz", "tqdm": "track"}
"""Module -> the extra of dpzoo that brings it."""


def require(module: str) -> Any:
    """Import and return `module`, one of `EXTRAS`.

    Raises:
        ImportError: it is not installed; the message is the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        command = f'pip install {module}, or pip install "dpzoo[{EXTRAS[module]}]"'
        raise ImportError(f"the demo needs {module}, which cannot be imported ({error}): {command}") from error
