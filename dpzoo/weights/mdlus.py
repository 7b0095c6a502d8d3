"""PhysicsNeMo's ``.mdlus`` files: ``model.pt``, ``args.json`` and ``metadata.json`` in a zip, formerly a tar, file.

``args.json`` names the class and its arguments. It is passed on as ``config``; nothing is imported because of it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpzoo.weights.archives import Member
from dpzoo.weights.regions import RegionSource
from dpzoo.weights.source import DamagedWeightsError
from dpzoo.weights.torch_file import open_torch_zip

WEIGHTS, ARGUMENTS, METADATA = "model.pt", "args.json", "metadata.json"


def is_mdlus(members: Mapping[str, Member]) -> bool:
    """Are these the members of a ``.mdlus`` file?"""
    return ARGUMENTS in members


def open_mdlus(path: Path, members: Mapping[str, Member]) -> RegionSource:
    """Open the weights of a ``.mdlus`` file.

    Returns:
        A source whose ``config`` is ``{"args": ..., "metadata": ...}``, the two JSON files parsed.

    Raises:
        DamagedWeightsError: one of the files is missing or cannot be read.
    """
    missing = [name for name in (WEIGHTS, ARGUMENTS) if name not in members]
    if missing:
        raise DamagedWeightsError(f"{path}: a .mdlus file without {', '.join(missing)}; it has {', '.join(members)}")
    config: dict[str, Any] = {"args": members[ARGUMENTS].json(), "metadata": {}}
    if METADATA in members:
        config["metadata"] = members[METADATA].json()
    return open_torch_zip(members[WEIGHTS], config)
