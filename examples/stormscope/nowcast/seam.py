"""Does a forecast show where the grid was cut? The same forecast without a cut, and the distance to the borders."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import ShardTensor, scatter
from nowcast.scores import whole


def on_one_rank(t: Tensor, alone: DeviceMesh) -> Tensor:
    """The whole tensor on a mesh of this rank alone: uncut, and with the random numbers of any number of ranks."""
    return scatter(whole(t), alone, dim=t.ndim - 2)


def borders_of(t: Tensor) -> list[int]:
    """First rows of the shards of `(..., y, x)` after the first shard."""
    if not isinstance(t, ShardTensor):
        return []
    dim = t.ndim - 2
    shapes = t._spec.sharding_shapes()
    rows = accumulate(shape[dim] for shape in shapes[0]) if shapes else ()
    return sorted({row for row in rows if 0 < row < t.shape[dim]})


def distance_to_border(rows: int, borders: Sequence[int]) -> np.ndarray:
    """Rows between the middle of each row and the nearest border; infinite without a border."""
    middle = np.arange(rows) + 0.5
    return np.min([np.abs(middle - border) for border in borders], axis=0) if borders else np.full(rows, np.inf)
