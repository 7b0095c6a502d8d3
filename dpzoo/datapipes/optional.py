"""File formats need packages that the library does not: asked for by name, with the line that installs them."""

from importlib import import_module
from typing import Any


def require(module: str, purpose: str, extra: str = "points") -> Any:
    """Import and return `module`.

    Raises:
        ImportError: it is not installed; the message is the command that installs it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{purpose} needs {package}, which cannot be imported ({error}): pip install {package}, or "
            f'pip install "dpzoo[{extra}]"'
        ) from error
