"""Where a grid is cut over the ranks: borders on whole patches, and on chunk borders where that costs little."""

from itertools import pairwise

from dpzoo.datapipes.errors import DataError


def aligned_sizes(
    total: int, ranks: int, multiple: int = 1, chunk: int = 1, start: int = 0, slack: float = 0.0625
) -> tuple[int, ...]:
    """Rows (or columns) per rank; every border is a multiple of `multiple`, the union is the whole.

    Args:
        total: rows of the grid in use.
        ranks: pieces; with fewer multiples than ranks, some pieces are empty.
        multiple: patch size times down-sampling.
        chunk: rows per chunk of the store; a border on a chunk border spares two ranks from decoding the same chunk.
        start: the row of the store where the grid in use begins.
        slack: chunk borders are taken while the largest piece grows by at most this fraction.

    Raises:
        DataError: `multiple` does not divide `total`.

    >>> aligned_sizes(60, 4, 4), aligned_sizes(1024, 3, 8), aligned_sizes(1024, 3, 8, chunk=128)
    ((16, 16, 16, 12), (344, 344, 336), (344, 344, 336))
    >>> aligned_sizes(1024, 3, 8, chunk=64, slack=0.2), aligned_sizes(1056, 8, 4, chunk=66, start=0)
    ((320, 384, 320), (132, 132, 132, 132, 132, 132, 132, 132))
    """
    if multiple < 1 or total % multiple:
        near = total // max(multiple, 1) * multiple
        raise DataError(
            f"{total} rows or columns are not divisible by {multiple} (patch size times down-sampling): crop to "
            f"{near}, or choose another patch size"
        )
    base, extra = divmod(total // multiple, ranks)
    fine = tuple((base + (rank < extra)) * multiple for rank in range(ranks))
    if chunk <= 1:
        return fine
    borders = [b for b in range(0, total + 1, multiple) if (b + start) % chunk == 0 or b in (0, total)]
    chosen = [min(borders, key=lambda b: (abs(b - total * rank / ranks), b)) for rank in range(ranks + 1)]
    coarse = tuple(hi - lo for lo, hi in pairwise(chosen))
    return coarse if max(coarse) <= (1 + slack) * max(fine) and min(coarse) > 0 else fine
