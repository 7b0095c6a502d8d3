"""Folders of weights: which file counts, sharded ones as one source, and dpzoo's own way to write them."""

import json
import re
from pathlib import Path
from typing import Any

from dpzoo.weights.containers import open_file
from dpzoo.weights.dcp import METADATA, open_dcp
from dpzoo.weights.joined import JoinedSource
from dpzoo.weights.source import DamagedWeightsError, UnsafeWeightsError, WeightsError, WeightSource

CONFIG = "config.json"
# What a run of dpzoo.train writes beside its checkpoints: how its model is built, and which checkpoint counts.
RUN_MODEL, RUN_LATEST = "model.json", "latest"
# The first that is there counts: safetensors before pickles, one file before several.
STEMS = ("model", "diffusion_pytorch_model", "open_clip_model", "pytorch_model", "open_clip_pytorch_model")
FILES = tuple(f"{stem}{end}" for end in (".safetensors", ".bin") for stem in STEMS)
INDEXES = tuple(f"{stem}{end}.index.json" for end in (".safetensors", ".bin") for stem in STEMS)
# Of a diffusers pipeline, the folder of the network.
NETWORKS = ("transformer", "unet")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".mdlus")
_PHYSICSNEMO = re.compile(r"(?P<name>\w+)\.(?P<rank>\d+)\.(?P<epoch>\d+)\.mdlus")
_RUN_STEP = re.compile(r"step_(\d+)")


def open_folder(folder: Path, *, key: str | None = None, ema: bool = True) -> WeightSource:
    """Open a folder of weights; see :func:`~dpzoo.weights.containers.open_weights`."""
    if (folder / METADATA).is_file():
        return open_dcp(folder, config=read_config(folder.parent, RUN_MODEL), key=key, ema=ema)
    if (found := cached_snapshot(folder)) is not None:
        return open_folder(found, key=key, ema=ema)
    config = read_config(folder)
    for name in FILES:
        if (folder / name).is_file():
            return open_file(folder / name, config, key, ema)
    for name in INDEXES:
        if (folder / name).is_file():
            return _open_index(folder / name, config, key, ema)
    for name in NETWORKS:
        if (folder / name / CONFIG).is_file():
            return open_folder(folder / name, key=key, ema=ema)
    return _open_other(folder, config, key, ema)


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any] | None:
    """``config.json`` of a folder, None without one.

    Raises:
        DamagedWeightsError: it is no JSON object.
    """
    path = folder / name
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedWeightsError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise DamagedWeightsError(f"{path} is a {type(config).__name__}, not a JSON object")
    return config


def cached_snapshot(folder: Path) -> Path | None:
    """The snapshot that a folder of a Hugging Face cache (``models--org--name``) points at; None for other folders.

    Raises:
        WeightsError: several snapshots, and none is the main one.
    """
    snapshots = folder / "snapshots"
    if not folder.name.startswith("models--") or not snapshots.is_dir():
        return None
    main = folder / "refs" / "main"
    if main.is_file():
        commit = main.read_text().strip()
        if re.fullmatch(r"[0-9a-fA-F]+", commit) and (snapshots / commit).is_dir():
            return snapshots / commit
    found = sorted(path for path in snapshots.iterdir() if path.is_dir())
    if len(found) != 1:
        raise WeightsError(f"{folder} has {len(found)} snapshots and no refs/main among them; give the path of one")
    return found[0]


def _open_index(index: Path, config: Any, key: str | None, ema: bool) -> WeightSource:
    """Several files with a table of which name lies where."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(table.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedWeightsError(f"{index} has no weight_map: {type(error).__name__}: {error}") from None
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or name in (".", ".."):
            raise UnsafeWeightsError(f"{index} names the file {name!r}, which is not one of its own folder")
        if not (index.parent / name).is_file():
            raise DamagedWeightsError(f"{index} names {name}, which is missing")
    parts = {name: open_file(index.parent / name, None, key, ema) for name in files}
    lost = [name for name, file in table.items() if name not in parts[file].names()]
    if lost:
        raise DamagedWeightsError(f"{index}: {table[lost[0]]} does not have {lost[0]} ({len(lost)} names in all)")
    return JoinedSource({name: parts[file] for name, file in table.items()}, str(index.parent), config)


def _open_other(folder: Path, config: Any, key: str | None, ema: bool) -> WeightSource:
    """PhysicsNeMo's training folders, dpzoo's runs, and a folder with a single file of weights."""
    if (step := _run_step(folder)) is not None:
        return open_dcp(step, config=read_config(folder, RUN_MODEL), key=key, ema=ema)
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)
    trained = [(int(m["epoch"]), m["rank"], m["name"], p) for p in files if (m := _PHYSICSNEMO.fullmatch(p.name))]
    if trained:
        if len({(rank, name) for _, rank, name, _ in trained}) > 1:
            raise WeightsError(f"{folder} holds several models or parts: {_listed(p for *_, p in trained)}; name one")
        return open_file(max(trained)[-1], config, key, ema)
    if len(files) != 1:
        found = f"several: {_listed(files)}; give the path of one" if files else f"none of {', '.join(FILES[:4])}, ..."
        raise WeightsError(f"{folder} is not known as a folder of weights; of files of weights it has {found}")
    return open_file(files[0], config, key, ema)


def _run_step(folder: Path) -> Path | None:
    """The checkpoint of one of dpzoo's runs that its file `latest` names, else the newest whole one."""
    steps = sorted((int(m[1]), path.name) for path in folder.iterdir() if (m := _RUN_STEP.fullmatch(path.name)))
    names = [name for _, name in steps if (folder / name / METADATA).is_file()]
    latest = folder / RUN_LATEST
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    return folder / (named if named in names else names[-1]) if names else None


def _listed(paths: Any) -> str:
    return ", ".join(path.name for path in paths)
