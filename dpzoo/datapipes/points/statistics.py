"""Mean and standard deviation per column, for normalisation, each rank reading only its rows."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.agreement import gather
from dpzoo.datapipes.agreement import together
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.moments import Moments as Moments
from dpzoo.datapipes.moments import merged
from dpzoo.datapipes.points.dataset import BLOCK_ROWS, PointDataset, checked_rows
from dpzoo.datapipes.points.draw import shard_sizes
from dpzoo.datapipes.points.source import field_of, kind_of, open_source, reads_whole_file

Columns = list[Moments | None]


@dataclass(frozen=True)
class Statistics:
    """Moments by field; normalises plain tensors and ShardTensors alike."""

    fields: Mapping[str, Moments]

    def normalise(self, field: str, x: Tensor) -> Tensor:
        """`(x - mean) / std` per column; a column that is constant becomes zero."""
        mean, std = self._row(field, x)
        return (x - mean) / std

    def denormalise(self, field: str, x: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        mean, std = self._row(field, x)
        return x * std + mean

    def _row(self, field: str, x: Tensor) -> tuple[Tensor, Tensor]:
        if field not in self.fields:
            raise DataError(f"no statistics of {field!r}, only of {', '.join(sorted(self.fields))}")
        moments = self.fields[field]
        std = np.where(moments.std > 0, moments.std, 1.0)
        mean, std = (v if len(v) > 1 else v[0] for v in (moments.mean, std))
        return torch.as_tensor(mean, dtype=x.dtype, device=x.device), torch.as_tensor(
            std, dtype=x.dtype, device=x.device
        )

    def save(self, file: Path) -> None:
        """Write JSON."""
        table = {
            name: {"count": m.count, **{key: getattr(m, key).tolist() for key in ("mean", "m2", "low", "high")}}
            for name, m in self.fields.items()
        }
        file.write_text(json.dumps(table, indent=1))

    @staticmethod
    def load(file: Path) -> "Statistics":
        """Read what `save` wrote."""
        table = json.loads(file.read_text())
        arrays = {n: {k: np.array(v) for k, v in row.items() if k != "count"} for n, row in table.items()}
        return Statistics({name: Moments(row["count"], **arrays[name]) for name, row in table.items()})


def compute_statistics(
    dataset: PointDataset, mesh: DeviceMesh | None = None, fields: Sequence[str] | None = None
) -> Statistics:
    """Statistics of all rows of all cars (not of a sub-sample), the same on every rank of the mesh.

    Every rank reads 1/ranks of each car, in blocks. Of files that cannot be read in parts each is read by one rank.

    Args:
        dataset: the training cars; statistics must not see the validation cars.
        mesh: any mesh; all its ranks share the work. None for one process.
        fields: those of the clouds by default.

    Raises:
        DataError: on all ranks, when one of them met a bad file.
    """
    names = tuple(f for cloud in dataset.clouds.values() for f in cloud.fields) if fields is None else tuple(fields)
    ranks = 1 if mesh is None else mesh.size()
    rank = 0 if mesh is None else int((mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero().item())

    def of_rank() -> Columns:
        cars = (_of_car(path, names, rank, ranks, number) for number, path in enumerate(dataset.cars.values()))
        return reduce(_both, cars, [None] * len(names))

    found = together(of_rank, mesh)
    everyone = [found] if mesh is None else gather(found, mesh)
    total = reduce(_both, everyone)
    return Statistics({name: m for name, m in zip(names, total, strict=True) if m is not None})


def _both(a: Columns, b: Columns) -> Columns:
    return [merged(old, new) for old, new in zip(a, b, strict=True)]


def _of_car(path: Path, names: Sequence[str], rank: int, ranks: int, number: int) -> list[Moments | None]:
    if reads_whole_file(kind_of(path)):
        if number % ranks != rank:
            return [None] * len(names)
        rank, ranks = 0, 1
    with closing(open_source(path)) as source:
        out: list[Moments | None] = []
        for name in names:
            sizes = shard_sizes(field_of(source, name).rows, ranks)
            lo, hi = sum(sizes[:rank]), sum(sizes[: rank + 1])
            moments: Moments | None = None
            for start in range(lo, hi, BLOCK_ROWS):
                rows = checked_rows(source, name, start, min(start + BLOCK_ROWS, hi))
                moments = merged(moments, Moments.of(rows))
            out.append(moments)
    return out
