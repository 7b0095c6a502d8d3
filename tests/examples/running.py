"""Modules of the examples, and functions that run with the manager which an example's `launch` would have made."""

import sys
from importlib import import_module
from pathlib import Path

from dpzoo.shard import DistributedManager

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_from(example, module):
    """A module of an example, by the name it has there."""
    folder = str(EXAMPLES / example)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(module)


def with_manager(function, *arguments):
    """Call a function between the beginning and the end of the manager."""
    DistributedManager.initialize()
    try:
        return function(*arguments)
    finally:
        DistributedManager.cleanup()
