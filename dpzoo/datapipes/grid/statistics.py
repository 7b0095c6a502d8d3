"""Statistics of a dataset for normalisation, computed by all ranks together, each reading only its rows."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.agreement import gather
from dpzoo.datapipes.agreement import together
from dpzoo.datapipes.errors import DataError
from dpzoo.datapipes.grid.cut import aligned_sizes
from dpzoo.datapipes.grid.dataset import INVARIANTS, GridDataset, GridIndex
from dpzoo.datapipes.grid.part import OpenStores, read_static, read_stream
from dpzoo.datapipes.grid.read import Box
from dpzoo.datapipes.grid.statistics_table import GridStatistics
from dpzoo.datapipes.grid.store import common_chunk
from dpzoo.datapipes.moments import Moments, merged

Found = dict[str, list[Moments | None]]


def compute_grid_statistics(
    dataset: GridDataset, mesh: DeviceMesh | None = None, streams: Sequence[str] | None = None
) -> GridStatistics:
    """Mean and spread per channel over all times and members of the dataset, the same on every rank of the mesh.

    Every rank reads its rows of every time once, one time in memory. Pixels without a value do not count. Streams of
    the same stores and channels (past and next) are read once and get the same statistics.

    Args:
        dataset: the training times; statistics must not see the validation times.
        mesh: any mesh; all its ranks share the work. None for one process.
        streams: names; all, and the invariants, by default.

    Raises:
        DataError: on all ranks, when one of them met bad data, or a channel has no valid pixel.
    """
    ranks = 1 if mesh is None else mesh.size()
    rank = 0 if mesh is None else int((mesh.mesh.flatten() == torch.distributed.get_rank()).nonzero().item())
    found = together(lambda: _of_rank(dataset.index, streams, rank, ranks), mesh)
    everyone = [found] if mesh is None else cast(list[Found], gather(found, mesh))
    total = everyone[0]
    for other in everyone[1:]:
        total = {name: [merged(a, b) for a, b in zip(total[name], other[name], strict=True)] for name in total}
    return GridStatistics({name: _named(dataset, name, columns) for name, columns in total.items()})


def _of_rank(index: GridIndex, streams: Sequence[str] | None, rank: int, ranks: int) -> Found:
    ny, nx = index.grid
    sizes = aligned_sizes(ny, ranks, 1, common_chunk(index.infos)[0], index.window.top, slack=0.5)
    top = sum(sizes[:rank])
    box = index.in_store(Box(top, top + sizes[rank], 0, nx))
    invariants = index.dataset.invariants
    everything = (*index.timelines, *([INVARIANTS] if invariants is not None else []))
    found: Found = {}
    done: dict[object, str] = {}
    for name in everything if streams is None else streams:
        if name == INVARIANTS and invariants is not None:
            fields = read_static(index.static_infos, invariants.fields, index.coordinates, box)
            found[name] = [Moments.of(field.reshape(-1)) for field in fields]
            continue
        if name not in index.timelines:
            raise DataError(f"no stream {name!r}; the dataset has {', '.join(everything)}")
        key = _identity(index, name)
        found[name] = found[done[key]] if key in done else _of_stream(index, name, box)
        done.setdefault(key, name)
    return found


def _identity(index: GridIndex, name: str) -> object:
    line = index.timelines[name]
    s = line.stream
    select = tuple(sorted(s.select.items()))
    return tuple(map(str, s.stores)), line.channels, s.log1p, s.masked, s.invalid_values, s.absent_chunks, select


def _of_stream(index: GridIndex, name: str, box: Box) -> list[Moments | None]:
    """Moments of every channel over the times that any stream of the same identity uses."""
    alike = [n for n in index.timelines if _identity(index, n) == _identity(index, name)]
    offsets = {offset for n in alike for offset in index.timelines[n].stream.offsets}
    times = np.unique(np.concatenate([index.times + offset * index.step for offset in sorted(offsets)]))
    channels = len(index.timelines[name].channels)
    total: list[Moments | None] = [None] * channels
    for member in range(len(index.members)):
        for time in times:
            request = index.frame_request(name, time)
            with OpenStores() as stores:
                values, valid = read_stream(request, member, box, stores)
            for c in range(channels):
                total[c] = merged(total[c], Moments.of(values[:, c][valid[:, c]]))
    return total


def _named(dataset: GridDataset, name: str, columns: list[Moments | None]) -> dict[str, Moments]:
    if name == INVARIANTS and dataset.invariants is not None:
        channels = dataset.invariants.fields
    else:
        channels = dataset.index.timelines[name].channels
    out = {}
    for channel, moments in zip(channels, columns, strict=True):
        if moments is None or moments.count == 0:
            raise DataError(f"stream {name!r}: {channel} has no valid pixel at any time, so it has no statistics")
        out[channel] = moments
    return out
