"""Where things are in `run_i/`; no VTK here."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpzoo.datapipes.csv_row import read_one_row
from dpzoo.datapipes.drivaerml.complete import check_complete, check_parts
from dpzoo.datapipes.errors import DataError

TABLES = ("force_mom", "force_mom_constref", "geo_parameters", "geo_ref")


class CarFolder:
    """The files of one car; the number i comes from the name of the folder, or else from `boundary_i.vtp`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = [*path.glob("boundary_*.vtp"), *path.glob("volume_*.vtu*"), *path.glob("drivaer_*.stl")]
        numbers = sorted({m.group(1) for file in found if (m := re.match(r"[a-z]+_(\d+)\.", file.name))})
        if len(numbers) != 1:
            raise DataError(f"{path} holds files of cars {numbers or 'without number'}: expected those of one car")
        self.number = numbers[0]

    def boundary(self) -> Path:
        """The surface file; raises `DataError` if it is absent or incomplete."""
        return self._complete(self.path / f"boundary_{self.number}.vtp")

    def geometry(self) -> Path | None:
        """The STL file, or None."""
        for name in (f"drivaer_{self.number}_single_solid.stl", f"drivaer_{self.number}.stl"):
            if (self.path / name).is_file():
                return self.path / name
        return None

    def has_volume(self) -> bool:
        """Is there a volume file, in one piece or in parts?"""
        return (self.path / f"volume_{self.number}.vtu").is_file() or bool(self._parts())

    @contextmanager
    def volume(self, scratch: Path) -> Iterator[Path]:
        """The volume file; parts are joined in a temporary folder under `scratch` (as large as the file itself).

        Raises:
            DataError: it is absent, a part is missing, or it is incomplete.
        """
        whole = self.path / f"volume_{self.number}.vtu"
        if whole.is_file():
            yield self._complete(whole)
            return
        parts = self._parts()
        if not parts:
            raise DataError(f"{whole} is not there, nor are its parts {whole.name}.00.part, ...")
        check_parts(parts)
        with TemporaryDirectory(dir=scratch, prefix=".join-") as folder:
            joined = Path(folder) / whole.name
            with joined.open("wb") as out:
                for part in parts:
                    with part.open("rb") as stream:
                        shutil.copyfileobj(stream, out, 1 << 24)
            try:
                check_complete(joined)
                yield joined
            except DataError as error:
                sizes = ", ".join(f"{part.name}: {part.stat().st_size} bytes" for part in parts)
                found = str(error).replace(str(joined), f"{self.path}: the joined parts of {whole.name}")
                raise DataError(f"{found} (compare with the source which part is short: {sizes})") from error

    def attributes(self) -> dict[str, Any]:
        """Force coefficients, reference values and shape parameters from the CSV files that are there.

        The columns of `force_mom_i.csv` and `geo_ref_i.csv` keep their names (Cd, Cl, lRef, aRef); those of the others
        get the name of the file in front.
        """
        found: dict[str, Any] = {}
        for table in TABLES:
            file = self.path / f"{table}_{self.number}.csv"
            if file.is_file():
                prefix = "" if table in ("force_mom", "geo_ref") else f"{table}."
                found |= {prefix + key: value for key, value in read_one_row(file).items() if key.lower() != "run"}
        return found

    def _parts(self) -> list[Path]:
        return sorted(self.path.glob(f"volume_{self.number}.vtu.*.part"))

    def _complete(self, file: Path) -> Path:
        if not file.is_file():
            raise DataError(f"{file} is not there")
        check_complete(file)
        return file
