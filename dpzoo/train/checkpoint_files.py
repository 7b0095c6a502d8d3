"""The files of checkpoints: which folders are whole, which is the latest, what was in them when they were written.

A checkpoint is written into `step_00000200.partial` and renamed when all of it is on the disk; then `latest`, a file
with its name, is replaced in the same way. So a machine that stops at any moment leaves whole checkpoints and at most
one that says by its name that it is none. `manifest.json` holds size and SHA-256 of every file: what is cut short or
changed later is found before anything is loaded, and named. Nothing here communicates.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX, PARTIAL = "step_", ".partial"
LATEST, MANIFEST, METADATA = "latest", "manifest.json", ".metadata"
_NAME = re.compile(rf"{PREFIX}(\d+)")


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> "FileRecord":
        """Of a file that is on the disk."""
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return cls(file.name, file.stat().st_size, digest)


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint; -1 if the name is not that of one."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def find_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints in a run's folder, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if step_of(path) >= 0 and (path / METADATA).is_file()]
    return sorted(found, key=step_of)


def latest_checkpoint(folder: Path) -> Path | None:
    """The one that `latest` names, if it is there and whole by its names."""
    file = folder / LATEST
    path = folder / file.read_text().strip() if file.is_file() else None
    return path if path is not None and step_of(path) >= 0 and (path / METADATA).is_file() else None


def in_order_of_trial(folder: Path) -> list[Path]:
    """The checkpoints to load from: the latest, then the others from the newest on.

    One of a later step than the latest was passed over, as damaged, by the run that has made the latest since.
    """
    newest_first, latest = find_checkpoints(folder)[::-1], latest_checkpoint(folder)
    return newest_first if latest is None else [latest, *(path for path in newest_first if path != latest)]


def open_partial(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into; what an interrupted run left is deleted."""
    for left in folder.glob(f"{PREFIX}*{PARTIAL}"):
        shutil.rmtree(left)
    partial = folder / f"{folder_name(step)}{PARTIAL}"
    partial.mkdir(parents=True)
    return partial


def publish(partial: Path, files: Iterable[FileRecord], about: dict[str, Any]) -> Path:
    """Make a written checkpoint count: manifest, its own name, then `latest`; one of the same step is replaced."""
    folder, target = partial.parent, partial.with_name(partial.name.removesuffix(PARTIAL))
    records = [*files, FileRecord.of(partial / METADATA)]
    table = {record.name: {"bytes": record.bytes, "sha256": record.sha256} for record in records}
    _write(partial / MANIFEST, json.dumps({**about, "files": table}, indent=1))
    _sync_folder(partial)
    if target.exists():  # of a run that was taken back to an earlier step
        replaced = target.with_name(f"{target.name}.replaced{PARTIAL}")
        target.rename(replaced)
        partial.rename(target)
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    _write(folder / LATEST, f"{target.name}\n")
    _sync_folder(folder)
    return target


def keep_newest(folder: Path, step: int, keep: int) -> None:
    """Of the checkpoints up to `step` leave the newest `keep`."""
    for old in [path for path in find_checkpoints(folder) if step_of(path) <= step][:-keep]:
        shutil.rmtree(old)


def find_damage(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What of a checkpoint is not as it was written, in words; None if all is well.

    Presence and sizes of all files are looked at, and the content of every `shares`-th file from `share` on: ranks
    divide the reading. A checkpoint without manifest has nothing to compare with.
    """
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, OSError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, record in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != record["bytes"]:
            return f"{name} has {size} bytes, {record['bytes']} were written"
    for name in sorted(files)[share::shares]:
        if FileRecord.of(path / name).sha256 != files[name]["sha256"]:
            return f"{name} has other contents than were written (SHA-256)"
    return None


def _write(file: Path, text: str) -> None:
    """Replace a file at once: it holds the old text or the new one, whatever happens."""
    fresh = file.with_name(f"{file.name}.new")
    with fresh.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)


def _sync_folder(folder: Path) -> None:
    """Let renames in a folder survive a loss of power, where the system can (POSIX)."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
