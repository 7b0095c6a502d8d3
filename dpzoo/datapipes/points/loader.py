"""The loader: the same car for all ranks of a domain group, different cars along the data-parallel axes.

Workers read this rank's rows ahead of time (plain arrays, no communication). The main thread takes them in order, the
ranks agree that every one of them has a good part, and only then is a sample made of it.
"""

import warnings
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.agreement import raise_together
from dpzoo.datapipes.errors import DataError, DataWarning
from dpzoo.datapipes.points.dataset import CarPart, PointDataset, read_part
from dpzoo.datapipes.points.sample import PointSample, layout_digest, make_sample
from dpzoo.datapipes.read_ahead import ReadsAhead, read_ahead
from dpzoo.datapipes.replicas import parted, steps_of, steps_per_epoch

_told_of_one_reader = False


class PointLoader(ReadsAhead):
    """Iterate over the cars of a dataset.

    Args:
        dataset: what to read; the same on every rank.
        mesh: a 1-D domain mesh, or a mesh with one axis named `domain_axis` and data-parallel axes. None: one process,
            plain tensors, no process group.
        domain_axis: the axis over which a car is cut.
        shuffle: another order of the cars in every epoch.
        last: when the cars do not divide among the data-parallel ranks, "repeat" some (`PointSample.is_repeat`) or
            "drop" the rest, so that all ranks make the same number of steps.
        prefetch: cars read ahead, 0 to read when asked.
        workers: "thread" or "process" (spawned: nothing is forked, so zarr and HDF5 are safe).
        device: for `mesh=None`, where the tensors go.

        with PointLoader(dataset, mesh) as loader:
            for epoch in range(epochs):
                for sample in loader.epoch(epoch):
                    ...

    Raises:
        DataError: on all ranks, when the ranks were given different datasets or the arguments do not fit.
    """

    def __init__(
        self,
        dataset: PointDataset,
        mesh: DeviceMesh | None = None,
        *,
        domain_axis: str = "domain",
        shuffle: bool = True,
        last: Literal["repeat", "drop"] = "repeat",
        prefetch: int = 2,
        workers: Literal["thread", "process"] = "thread",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(workers, prefetch)
        self.dataset, self.mesh, self.shuffle, self.last = dataset, mesh, shuffle, last
        self.device, self.bytes_read = device, 0
        self.domain, self.replica, self.replicas = parted(mesh, (domain_axis,))
        known = (dataset.names, dataset.clouds, dataset.whole, dataset.seed, shuffle, last)
        raise_together(self._fault(), mesh, zlib.crc32(repr(known).encode()))

    def _fault(self) -> DataError | None:
        if len(self) == 0:
            return DataError(
                f"{len(self.dataset)} cars for {self.replicas} data-parallel ranks and last='drop': no step"
            )
        return None

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return steps_per_epoch(len(self.dataset), self.replicas, self.last)

    def __iter__(self) -> Iterator[PointSample]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[PointSample]:
        """The samples of an epoch, from step `start` (to go on where a run was stopped).

        Raises:
            DataError: on all ranks of the mesh, when any of them met a bad file.
        """
        order = (self.dataset.seed, number) if self.shuffle else None
        steps = steps_of(len(self.dataset), self.replica, self.replicas, self.last, order)[start:]
        with closing(read_ahead(steps, lambda step: self._submit(step[0], number), self.prefetch)) as under_way:
            for (_, is_repeat), future in under_way:
                yield self._take(future, is_repeat)

    def _submit(self, index: int, epoch: int) -> "Future[CarPart]":
        rank, ranks = (0, 1) if self.domain is None else (self.domain.get_local_rank(), self.domain.size())
        return self._read(read_part, self.dataset.request(index, epoch, rank, ranks))

    def _take(self, future: "Future[CarPart]", is_repeat: bool) -> PointSample:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        part = CarPart("") if error is not None else future.result()
        raise_together(error, self.mesh, layout_digest(part), self._domain_name)
        self.bytes_read += part.bytes_read
        if part.one_reader:
            _tell_of_one_reader(part.name)
        return make_sample(part, self.domain, self.device, is_repeat)

    @property
    def _domain_name(self) -> str | None:
        return self.domain.mesh_dim_names[0] if self.domain is not None and self.domain.mesh_dim_names else None


def _tell_of_one_reader(name: str) -> None:
    global _told_of_one_reader
    if not _told_of_one_reader:
        _told_of_one_reader = True
        warnings.warn(
            f"{name}: VTK files cannot be read in parts, so one rank of each domain group reads the whole file and "
            "sends the rows; convert once with `dpzoo convert drivaer SRC DST` and each rank reads only its own",
            DataWarning,
            stacklevel=4,
        )
