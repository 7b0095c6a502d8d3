"""Is a VTK XML file, or a set of parts of one, all there? Told from its ends and the sizes it states, without VTK."""

import re
from base64 import b64decode
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dpzoo.datapipes.errors import DataError

_TAIL = 4096


def check_parts(parts: list[Path]) -> None:
    """Raise `DataError` unless the parts are numbered 00, 01, ... without a gap and only the last ends the document."""
    numbers = [part.name.split(".")[-2] for part in parts]
    if numbers != [f"{i:02d}" for i in range(len(parts))]:
        raise DataError(
            f"{parts[0].parent}: parts {numbers} of {parts[0].name.rpartition('.vtu')[0]}.vtu; one is missing"
        )
    empty = [str(part) for part in parts if part.stat().st_size == 0]
    if empty:
        raise DataError(f"{', '.join(empty)}: empty; copy it again")
    if not _ends_document(parts[-1]):
        raise DataError(
            f"{parts[-1]}: truncated (it does not end with </VTKFile>), or a later part is missing; copy it again"
        )


def check_complete(file: Path) -> None:
    """Raise `DataError` unless an XML VTK file begins, ends and (appended raw data) is as long as it says."""
    with file.open("rb") as stream:
        head = stream.read(_TAIL)
    if b"<VTKFile" not in head:
        raise DataError(f"{file} is not a VTK XML file: no <VTKFile in its first {_TAIL} bytes")
    if not _ends_document(file):
        raise DataError(f"{file}: truncated (it does not end with </VTKFile>); copy it again")
    _check_appended(file)


def _ends_document(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _TAIL))
        return stream.read().rstrip().endswith(b"</VTKFile>")


def _check_appended(file: Path) -> None:
    """Appended data: where the last array ends by its own header, the end of the section must follow."""
    mark = re.compile(rb'<AppendedData[^>]*encoding="(raw|base64)"[^>]*>\s*_')
    head, match = b"", None
    with file.open("rb") as stream:
        while match is None and (block := stream.read(1 << 20)):
            head += block
            match = mark.search(head)
            if b"</VTKFile>" in block or len(head) > 1 << 28:
                break
        offsets = [int(text) for text in re.findall(rb'offset="(\d+)"', head[: match.start()])] if match else []
        if match is None or not offsets:
            return  # data in line: VTK itself finds what is missing
        word = 8 if b'header_type="UInt64"' in head else 4
        size = file.stat().st_size
        stored = _Stored(stream, size, word, b"compressor=" in head, match.group(1) == b"base64")
        end = stored.end(match.end() + max(offsets))
        stream.seek(min(end, size))
        if not stream.read(64).lstrip().startswith(b"</AppendedData>"):
            raise DataError(
                f"{file}: by the sizes it states, its arrays do not end where its {size} bytes do: bytes are missing; "
                "copy it again"
            )


@dataclass
class _Stored:
    """Arrays as the VTK XML format stores them: a header of unsigned integers (`word` bytes each), then the data."""

    stream: BinaryIO
    size: int
    word: int
    compressed: bool
    base64: bool

    def end(self, at: int) -> int:
        """First byte after the array at byte `at`; beyond the file if what stands there is no header."""
        first = self._integers(at, 1)[0]
        if not self.compressed:
            return at + self._length(self.word + first)
        if first * self.word > self.size:
            return self.size + 1
        sizes = self._integers(at, 3 + first)[3:]
        return at + self._length(self.word * (3 + first)) + self._length(sum(sizes))

    def _length(self, size: int) -> int:
        return -(-size // 3) * 4 if self.base64 else size

    def _integers(self, at: int, count: int) -> list[int]:
        self.stream.seek(at)
        raw = self.stream.read(self._length(self.word * count))
        if self.base64:
            raw = _decoded(raw)
        raw = raw[: self.word * count].ljust(self.word * count, b"\0")
        return [int.from_bytes(raw[i : i + self.word], "little") for i in range(0, len(raw), self.word)]


def _decoded(text: bytes) -> bytes:
    try:
        return b64decode(text)
    except ValueError:
        return b""
