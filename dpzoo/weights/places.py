"""Where weights are: a path, or the id of a repository on the Hugging Face hub; and whether they are the right ones."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpzoo.weights.source import DamagedWeightsError, WeightsError

HUB_PREFIXES = ("hf-hub:", "hf_hub:", "hf:")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# One kind of weights is enough; the first that a repository has is fetched.
_KINDS = (("*.safetensors", "*.safetensors.index.json"), ("*.bin", "*.bin.index.json"), ("*.mdlus",), ("*.pt", "*.pth"))


def locate(place: str | Path, *, revision: str | None = None, download: bool = False) -> Path:
    """The file or folder that ``place`` means.

    Args:
        place: A path, or a hub id ``org/name`` (also with ``hf-hub:`` before it); an existing path goes first.
        revision: Branch, tag or commit of a hub repository.
        download: Fetch a repository that is not in the local cache. Otherwise nothing goes over the network.

    Raises:
        WeightsError: nothing there; or not in the cache while offline.
    """
    text = str(place)
    prefix = next((p for p in HUB_PREFIXES if text.startswith(p)), "")
    name = text.removeprefix(prefix)
    if not prefix and Path(place).exists():
        return Path(place)
    if isinstance(place, Path) or not _HUB_ID.fullmatch(name) or (not prefix and Path(name).suffix):
        raise WeightsError(f"{text}: no such file or folder" + (", and no hub id (org/name)" if prefix else ""))
    return _snapshot(name, revision, download)


def _snapshot(name: str, revision: str | None, download: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise WeightsError(f"{name} looks like a hub id, which needs the package huggingface_hub") from None
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    network = download and not offline
    try:
        patterns = _patterns(name, revision) if network else None
        return Path(snapshot_download(name, revision=revision, local_files_only=not network, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if offline else "nothing is downloaded unless download=True is passed"
        why = why if not network else "the hub cannot be reached"
        raise WeightsError(
            f"{name} is neither a path nor in the local cache of the hub, and {why}; a folder copied from elsewhere "
            "(huggingface-cli download) can be given by its path"
        ) from None
    except WeightsError:
        raise
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise WeightsError(f"{name} cannot be had from the hub: {type(error).__name__}: {reason}") from None
    except Exception as error:  # the transport's own classes, which are no part of huggingface_hub's interface
        raise WeightsError(f"the hub cannot be reached for {name}: {type(error).__name__}: {error}") from None


def _patterns(name: str, revision: str | None) -> list[str]:
    """What to fetch: the configuration and one kind of weights."""
    import fnmatch

    from huggingface_hub import list_repo_files

    files = list_repo_files(name, revision=revision)
    kind = next((k for k in _KINDS if any(fnmatch.fnmatch(file, p) for file in files for p in k)), None)
    if kind is None:
        raise WeightsError(f"{name} has no weights that can be read; it has {', '.join(files[:8])}")
    return ["*.json", *kind]


def check_sha256(path: Path, expected: str | Mapping[str, str]) -> None:
    """Compare a file's hash with the one it should have; of a folder, those of the files that ``expected`` names.

    Raises:
        DamagedWeightsError: another hash, or a file that is missing.
        WeightsError: one hash for a folder of several files.
    """
    if isinstance(expected, str):
        if path.is_dir():
            raise WeightsError(f"{path} is a folder: pass sha256={{'model.safetensors': '...'}}, a hash for each file")
        table: Mapping[Path, str] = {path: expected}
    else:
        table = {path / name if path.is_dir() else path: value for name, value in expected.items()}
    for file, wanted in table.items():
        if not file.is_file():
            raise DamagedWeightsError(f"{file}, whose sha256 is given, is missing")
        with open(file, "rb") as handle:
            digest: Any = hashlib.file_digest(handle, "sha256")
        if digest.hexdigest() != wanted.lower().removeprefix("sha256:"):
            raise DamagedWeightsError(
                f"{file} has sha256 {digest.hexdigest()}, not {wanted}; it is another file or was damaged on the way"
            )
