"""Does a prediction show where the car was cut? Compact shards, and the distance of each point to the nearest border.

In a shuffled file every rank's points lie everywhere. Sorted along a Hilbert curve, a rank's points are a piece of
the car.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from aero.clouds import Kind
from dpzoo.datapipes.points import PointSample
from dpzoo.datapipes.points.curves import curve_order
from dpzoo.shard import ShardTensor


def compact(sample: PointSample, kind: Kind) -> PointSample:
    """The same car with the rows of one cloud sorted along a Hilbert curve; the ranks exchange rows, sizes stay."""
    centers = sample[kind.centers]
    everywhere = centers.full_tensor() if isinstance(centers, ShardTensor) else centers
    order = torch.from_numpy(curve_order(everywhere.cpu().numpy())).to(everywhere.device)
    moved = {name: sample[name].index_select(0, order) for name in kind.cloud.fields}
    return replace(sample, tensors={**sample.tensors, **moved})


def owners(t: Tensor) -> np.ndarray:
    """The domain rank that holds each row."""
    if not isinstance(t, ShardTensor):
        return np.zeros(t.shape[0], np.int64)
    shapes = t._spec.sharding_shapes()
    sizes = [shape[0] for shape in shapes[0]] if shapes else [t.shape[0]]
    return np.repeat(np.arange(len(sizes)), sizes)


def distance_to_border(centers: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Distance of each point to the nearest point of another rank, in the unit of `centers`; infinite on one rank."""
    from scipy.spatial import cKDTree

    found = np.full(len(centers), np.inf)
    for rank in np.unique(owner):
        mine, others = owner == rank, owner != rank
        if others.any():
            found[mine] = cKDTree(centers[others]).query(centers[mine])[0]
    return found
