"""Area vectors of polygons with any number of corners, block by block."""

import numpy as np

BLOCK = 1 << 18


def area_vectors(points: np.ndarray, offsets: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Half the sum of cross products along the border of each polygon: its normal times its area, float64 `(n, 3)`.

    Args:
        points: `(v, 3)`.
        offsets: `(n + 1,)`: the corners of polygon i are `corners[offsets[i]:offsets[i + 1]]`; none is empty.
        corners: indices into `points`.
    """
    count = len(offsets) - 1
    out = np.empty((count, 3))
    for lo in range(0, count, BLOCK):
        hi = min(lo + BLOCK, count)
        first = offsets[lo:hi] - offsets[lo]
        here = points[corners[offsets[lo] : offsets[hi]]].astype(np.float64)
        here -= np.repeat(here[first], np.diff(offsets[lo : hi + 1]), axis=0)  # near the origin: no loss of digits
        following = np.roll(here, -1, axis=0)
        following[offsets[lo + 1 : hi + 1] - offsets[lo] - 1] = here[first]
        out[lo:hi] = 0.5 * np.add.reduceat(np.cross(here, following), first, axis=0)
    return out
