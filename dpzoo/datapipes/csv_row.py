"""CSV files of one row, as DrivAerML has them beside each car (force coefficients, shape parameters)."""

import csv
from pathlib import Path

from dpzoo.datapipes.errors import DataError


def read_one_row(file: Path) -> dict[str, float]:
    """Column name -> value of a CSV file with a header and one row of numbers.

    Raises:
        DataError: it is anything else.
    """
    with file.open(newline="") as stream:
        lines = [[cell.strip() for cell in line] for line in csv.reader(stream) if any(cell.strip() for cell in line)]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        raise DataError(f"{file}: expected a header and one row of the same length, found {len(lines)} lines")
    try:
        return {key: float(value) for key, value in zip(*lines, strict=True)}
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
