"""The loader: the same sample for all ranks of a domain group, different samples along the data-parallel axes.

Workers read this rank's block ahead of time (plain arrays, no communication). The main thread takes them in order, the
ranks agree that every one of them has a good part, and only then is a sample made of it.
"""

import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.datapipes.agreement import device_of, raise_together
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.dataset import INVARIANTS, GridDataset, GridIndex, GridPart
from dpzoo.datapipes.grid.layout import GridDim, GridLayout, grid_dims, to_device
from dpzoo.datapipes.grid.part import read_part, read_static
from dpzoo.datapipes.grid.sample import GridSample, make_sample, part_digest
from dpzoo.datapipes.read_ahead import ReadsAhead, read_ahead
from dpzoo.datapipes.replicas import parted, steps_of, steps_per_epoch

CUT_ROWS: Mapping[str, GridDim] = {"domain": "y"}


class GridLoader(ReadsAhead):
    """Iterate over the samples of a dataset.

    Args:
        dataset: what to read; the same on every rank.
        mesh: domain axes and, if it has more axes, data-parallel ones. None: one process, plain tensors, no process
            group.
        cut: mesh axis -> "y" or "x"; `{"rows": "y", "columns": "x"}` for a 2-D cut.
        multiple: every border is a multiple of it: patch size times down-sampling.
        shuffle: another order of the samples in every epoch, the same for any number of ranks.
        last: when the samples do not divide among the data-parallel ranks, "repeat" some (`GridSample.is_repeat`) or
            "drop" the rest, so that all ranks make the same number of steps.
        prefetch: samples read ahead, 0 to read when asked.
        workers: "thread" or "process" (spawned: nothing is forked, so zarr and HDF5 are safe).
        device: for `mesh=None`, where the tensors go.

    Attributes:
        layout: the blocks of the ranks.
        bytes_read: what this rank took from disk, chunks as they are stored.

    Raises:
        DataError: on all ranks, when a store is bad, the grid does not divide, or ranks were given different datasets.
    """

    def __init__(
        self,
        dataset: GridDataset,
        mesh: DeviceMesh | None = None,
        *,
        cut: Mapping[str, GridDim] = CUT_ROWS,
        multiple: int = 1,
        shuffle: bool = True,
        last: Literal["repeat", "drop"] = "repeat",
        prefetch: int = 2,
        workers: Literal["thread", "process"] = "thread",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(workers, prefetch)
        self.dataset, self.mesh, self.shuffle, self.last = dataset, mesh, shuffle, last
        self.bytes_read = 0
        grid_dims(cut, None)
        self._domain, self.replica, self.replicas = parted(mesh, tuple(cut))
        dims = grid_dims(cut, self._domain)
        self.device = device if self._domain is None else device_of(self._domain)
        error: Exception | None = None
        digest, static = 0, None
        try:
            self.layout = _layout(dataset.index, self._domain, dims, multiple)
            static = self._read_static(dataset.index)
            if len(self) == 0:
                error = DataError(
                    f"{len(dataset)} samples for {self.replicas} data-parallel ranks and last='drop': no step"
                )
            digest = zlib.crc32(repr((dataset.index.digest, self.layout.sizes, dataset.seed, shuffle, last)).encode())
        except Exception as failure:
            error = failure
        raise_together(error, mesh, digest)
        self._static: dict[str, Tensor] = {}
        if static is not None:
            self._static[INVARIANTS] = self.layout.shard(to_device(torch.from_numpy(static), self.device))

    def _read_static(self, index: GridIndex) -> np.ndarray | None:
        if self.dataset.invariants is None:
            return None
        box = index.in_store(self.layout.box)
        fields = read_static(index.static_infos, self.dataset.invariants.fields, index.coordinates, box)
        mean, std = index.tables.get(INVARIANTS, (0.0, 1.0))
        return np.asarray((fields - mean) / std, np.float32)

    def __len__(self) -> int:
        """Steps per epoch, the same on every rank."""
        return steps_per_epoch(len(self.dataset), self.replicas, self.last)

    def __iter__(self) -> Iterator[GridSample]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[GridSample]:
        """The samples of an epoch, from step `start` (to go on where a run was stopped).

        Raises:
            DataError: on all ranks of the mesh, when any of them met bad data.
        """
        order = (self.dataset.seed, number) if self.shuffle else None
        steps = steps_of(len(self.dataset), self.replica, self.replicas, self.last, order)[start:]
        with closing(read_ahead(steps, lambda step: self._submit(step[0]), self.prefetch)) as under_way:
            for (_, is_repeat), future in under_way:
                yield self._take(future, is_repeat)

    def _submit(self, number: int) -> "Future[GridPart]":
        return self._read(read_part, self.dataset.index.request(number, self.layout.box))

    def _take(self, future: "Future[GridPart]", is_repeat: bool) -> GridSample:
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        part = GridPart(np.datetime64(0, "s"), 0) if error is not None else future.result()
        raise_together(error, self.mesh, part_digest(part), self._domain_axes)
        self.bytes_read += part.bytes_read
        return make_sample(part, self.dataset.index, self.layout, self._static, self.device, is_repeat)

    @property
    def _domain_axes(self) -> tuple[str, ...] | None:
        return None if self._domain is None or self._domain is self.mesh else self._domain.mesh_dim_names


def _layout(index: GridIndex, domain: DeviceMesh | None, dims: tuple[GridDim, ...], multiple: int) -> GridLayout:
    for dim in ("y", "x"):
        index.sizes(dim, 1, multiple)  # the other dim has to be whole patches too
    sizes = [] if domain is None else [index.sizes(dim, domain.size(axis), multiple) for axis, dim in enumerate(dims)]
    return GridLayout.make(domain, dims, index.grid, sizes)
