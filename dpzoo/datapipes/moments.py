"""Mean and spread that merge exactly, so that each rank reads a part.

A block of rows becomes (count, mean, M2) in float64 with M2 the sum of squared distances from the mean, and two of
those merge exactly (Chan, Golub and LeVeque 1983): no difference of large sums, whatever the mean.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Moments:
    """Count, mean, summed squared distance from the mean, smallest and largest value, per column in float64."""

    count: int
    mean: np.ndarray
    m2: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @staticmethod
    def of(rows: np.ndarray) -> "Moments":
        """Of `(rows, columns)` or `(rows,)`, which counts as one column; no rows are allowed."""
        columns = int(np.prod(rows.shape[1:], dtype=np.int64))
        table = rows.reshape(len(rows), columns).astype(np.float64)
        if not len(table):
            nothing = np.zeros(columns)
            return Moments(0, nothing, nothing, nothing + np.inf, nothing - np.inf)
        mean = table.mean(0)
        return Moments(len(table), mean, np.square(table - mean).sum(0), table.min(0), table.max(0))

    def merge(self, other: "Moments") -> "Moments":
        """Of the rows of both."""
        count = self.count + other.count
        if count == 0:
            return self
        away = other.mean - self.mean
        return Moments(
            count,
            self.mean + away * (other.count / count),
            self.m2 + other.m2 + np.square(away) * (self.count * (other.count / count)),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the rows as a whole population; zero for no rows."""
        return np.sqrt(self.m2 / max(self.count, 1))


def merged(old: Moments | None, new: Moments | None) -> Moments | None:
    """Of the rows of both, where None stands for none."""
    return new if old is None else old if new is None else old.merge(new)
