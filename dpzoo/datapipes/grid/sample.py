"""One sample as a model sees it: names -> tensors over the grid, cut over the domain ranks."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpzoo.datapipes.grid.dataset import GridIndex, GridPart
from dpzoo.datapipes.grid.layout import GridLayout, to_device


@dataclass(frozen=True)
class GridSample:
    """A sample, the same on all ranks of a domain group.

    Attributes:
        time: of the sample; offsets count from it.
        member: label of the ensemble member, empty without an ensemble.
        tensors: stream -> `(frame, channel, y, x)` in float32, normalised where the dataset has statistics;
            "invariants" -> `(field, y, x)`; "cos_zenith" -> `(frame, 1, y, x)`. ShardTensors on a mesh, cut along y, x
            or both.
        masks: stream that may have pixels without a value -> bool of the same shape and layout, True where valid.
        channels: stream -> channel names.
        times: stream -> time of each frame.
        is_repeat: the sample was seen before in this epoch and fills up the last step of the data-parallel ranks.
    """

    time: np.datetime64
    member: str
    tensors: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    channels: Mapping[str, tuple[str, ...]]
    times: Mapping[str, np.ndarray]
    is_repeat: bool = False

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def batched(self, name: str) -> Tensor:
        """A batch of one: `(1, frame, channel, y, x)`, or `(1, field, y, x)` of the invariants."""
        return self.tensors[name].unsqueeze(0)

    def stacked(self, name: str) -> Tensor:
        """A batch of one with the frames among the channels: `(1, frame * channel, y, x)`."""
        x = self.tensors[name]
        return (x.flatten(0, 1) if x.ndim == 4 else x).unsqueeze(0)


def part_digest(part: GridPart) -> int:
    """A number that is equal on all ranks of a domain group if they read the same sample."""
    told = [(name, array.shape[:2]) for name, array in part.arrays.items()]
    return zlib.crc32(repr((str(part.time), part.member, told)).encode())


def make_sample(
    part: GridPart,
    index: GridIndex,
    layout: GridLayout,
    whole_epoch: Mapping[str, Tensor],
    device: torch.device | None,
    is_repeat: bool,
) -> GridSample:
    """Tensors of what the ranks read; `whole_epoch` are those that every sample shares. No communication."""
    made = {name: layout.shard(to_device(torch.from_numpy(a), device)) for name, a in part.arrays.items()}
    tensors = {name: t for name, t in made.items() if not name.endswith("/mask")}
    masks = {name.removesuffix("/mask"): t for name, t in made.items() if name.endswith("/mask")}
    return GridSample(
        part.time,
        index.members[part.member],
        {**tensors, **whole_epoch},
        masks,
        {name: line.channels for name, line in index.timelines.items()},
        {
            name: part.time + np.array([offset * index.step for offset in line.stream.offsets])
            for name, line in index.timelines.items()
        },
        is_repeat,
    )
