"""Zip and tar files are looked into, never unpacked; and what could harm an unpacker, or be a lie, is refused first.

Members are read where they lie: a tar file and a zip file of stored members hold them as they are.
"""

import io
import json
import posixpath
import stat
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpzoo.weights.source import DamagedWeightsError, UnsafeWeightsError

MAX_JSON_BYTES = 16 << 20
MAX_MEMBERS = 1_000_000


@dataclass(frozen=True)
class Member:
    """A file in an archive: its bytes are ``start : start + size`` of the archive."""

    archive: Path
    name: str
    start: int
    size: int

    def open(self) -> "Window":
        return Window(self.archive, self.start, self.size)

    def json(self) -> Any:
        """The member parsed as JSON.

        Raises:
            DamagedWeightsError: absurdly long, or no JSON.
        """
        if self.size > MAX_JSON_BYTES:
            raise DamagedWeightsError(f"{self.archive}: {self.name} has {self.size} bytes, more than JSON should")
        with self.open() as file:
            try:
                return json.loads(file.read())
            except (ValueError, RecursionError) as error:
                raise DamagedWeightsError(f"{self.archive}: {self.name} is no JSON: {error}") from None


class Window(io.RawIOBase):
    """A part of a file as a file of its own, read-only."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed in close()
        self._start, self._size, self._at = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}, before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._at))
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view[:wanted]) or 0
        self._at += got
        return got

    def close(self) -> None:
        self._file.close()
        super().close()


def zip_members(path: Path, start: int = 0, size: int | None = None) -> dict[str, Member]:
    """The members of a zip file (or of the part of a file that is one), checked.

    Raises:
        DamagedWeightsError: truncated, or members that claim more bytes than there are.
        UnsafeWeightsError: compressed or encrypted members, links, names that leave the folder or come twice.
    """
    size = path.stat().st_size - start if size is None else size
    try:
        with Window(path, start, size) as window, zipfile.ZipFile(io.BufferedReader(window)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise DamagedWeightsError(f"{path}: the zip file cannot be read ({error}); was it cut off?") from None
    _check_names(path, [info.filename for info in infos])
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise UnsafeWeightsError(
                f"{path}: {info.filename} is compressed or encrypted ({info.file_size} bytes claimed); archives of "
                "weights store their members as they are; repack it with `zip -0` if you trust it"
            )
        if stat.S_ISLNK(info.external_attr >> 16):
            raise UnsafeWeightsError(f"{path}: {info.filename} is a link")
    _check_sizes(path, [(info.filename, info.file_size) for info in infos], size)
    return {i.filename: Member(path, i.filename, start + _data_start(path, start, i), i.file_size) for i in infos}


def tar_members(path: Path) -> dict[str, Member]:
    """The members of an uncompressed tar file, checked; the raises of :func:`zip_members`."""
    size = path.stat().st_size
    found = {}
    try:
        with tarfile.open(path, "r:") as archive:
            infos = archive.getmembers()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DamagedWeightsError(f"{path}: the tar file cannot be read ({error}); was it cut off?") from None
    _check_names(path, [info.name for info in infos])
    for info in infos:
        if not (info.isreg() or info.isdir()) or info.issparse():
            raise UnsafeWeightsError(f"{path}: {info.name} is a link, a device or a sparse file, not a plain one")
        if info.offset_data + info.size > size:
            raise DamagedWeightsError(f"{path}: {info.name} claims {info.size} bytes, the file has only {size}")
        if info.isreg():
            name = posixpath.normpath(info.name)
            found[name] = Member(path, name, info.offset_data, info.size)
    return found


def _check_names(path: Path, names: list[str]) -> None:
    if len(names) > MAX_MEMBERS:
        raise UnsafeWeightsError(f"{path} has {len(names)} members, more than any file of weights")
    for name in names:
        parts = name.replace("\\", "/").split("/")
        if not name or name.startswith(("/", "\\")) or ".." in parts or "\0" in name or ":" in parts[0]:
            raise UnsafeWeightsError(f"{path}: the member {name!r} would be written outside the folder; not opened")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 10_000 else ["(many)"]
        raise UnsafeWeightsError(f"{path}: members with the same name: {', '.join(twice[:3])}")


def _check_sizes(path: Path, members: Iterable[tuple[str, int]], size: int) -> None:
    total = 0
    for name, claimed in members:
        total += claimed
        if claimed > size or total > size:
            raise DamagedWeightsError(f"{path}: its members claim {total} bytes up to {name}, the file has {size}")


def _data_start(path: Path, start: int, info: zipfile.ZipInfo) -> int:
    """Where a stored member's bytes begin: behind its local header, whose extra field has a length of its own."""
    with Window(path, start + info.header_offset, 30) as window:
        header = window.read(30) or b""
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise DamagedWeightsError(f"{path}: the member {info.filename} is not where the directory says")
    return info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
