"""Order points along a space-filling curve, so that a contiguous piece of the order is a compact piece of space.

Morton (Z) order interleaves the bits of the coordinates; Hilbert order (Skilling 2004, "Programming the Hilbert curve",
AIP Conf. Proc. 707) never jumps: neighbours on the curve are neighbours in space.
"""

from typing import Literal

import numpy as np

Curve = Literal["hilbert", "morton"]


def curve_order(points: np.ndarray, curve: Curve = "hilbert") -> np.ndarray:
    """Indices `(n,)` that sort `points (n, 2 or 3)` along the curve; equal cells keep their order."""
    return np.argsort(curve_keys(points, curve), kind="stable")


def curve_keys(points: np.ndarray, curve: Curve = "hilbert") -> np.ndarray:
    """Position along the curve, uint64 `(n,)`, on a grid of 2^21 (3-D) or 2^31 (2-D) cells a side."""
    if points.ndim != 2 or points.shape[1] not in (2, 3):
        raise ValueError(f"curve_keys: expected points of shape (n, 2) or (n, 3), got {points.shape}")
    if not len(points):
        return np.empty(0, np.uint64)
    dims = points.shape[1]
    bits = 63 // dims
    low = points.min(0).astype(np.float64)
    side = float((points.max(0) - low).max()) or 1.0
    cells = np.minimum((points - low) / side * 2.0**bits, 2.0**bits - 1).astype(np.uint64)
    axes = [cells[:, d] for d in range(dims)]
    return _interleaved(_transposed(axes, bits) if curve == "hilbert" else axes, bits)


def _transposed(axes: list[np.ndarray], bits: int) -> list[np.ndarray]:
    """Skilling's transform of coordinates into the bits of the Hilbert index, spread over the axes."""
    x = [axis.copy() for axis in axes]
    one = np.uint64(1)
    for level in range(bits - 1, 0, -1):
        q = one << np.uint64(level)
        below = q - one
        for axis in range(len(x)):
            high = (x[axis] & q) != 0
            swapped = np.where(high, np.uint64(0), (x[0] ^ x[axis]) & below)
            x[0] = np.where(high, x[0] ^ below, x[0] ^ swapped)
            if axis:
                x[axis] = x[axis] ^ swapped
    for axis in range(1, len(x)):
        x[axis] ^= x[axis - 1]
    flips = np.zeros_like(x[0])
    for level in range(bits - 1, 0, -1):
        q = one << np.uint64(level)
        flips ^= np.where((x[-1] & q) != 0, q - one, np.uint64(0))
    return [axis ^ flips for axis in x]


def _interleaved(axes: list[np.ndarray], bits: int) -> np.ndarray:
    """Bits of the axes in turn, from the highest down, the first axis first."""
    key = np.zeros_like(axes[0])
    one = np.uint64(1)
    for level in range(bits - 1, -1, -1):
        for axis in axes:
            key = (key << one) | ((axis >> np.uint64(level)) & one)
    return key
