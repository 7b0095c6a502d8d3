"""The integer arithmetic of pieces, against brute force."""

import itertools

import pytest
import torch

from dpzoo.shard import partition
from dpzoo.shard.partition import align_sizes, chunk_sizes, even_sizes, local_range, moved, own_intervals, starts

CUTS = [(5,), (0,), (3, 4), (0, 5), (5, 0), (1, 0, 6), (0, 0, 3), (2, 3, 4, 1), (0, 0, 0)]


def owners(sizes):
    """The piece of each index, one by one."""
    return [piece for piece, n in enumerate(sizes) for _ in range(n)]


@pytest.mark.parametrize("parts", range(1, 6))
def test_chunk_sizes_are_those_of_torch(parts):
    for total in range(12):
        found = [len(c) for c in torch.arange(total).chunk(parts)] if total else []
        assert chunk_sizes(total, parts) == (*found, *[0] * (parts - len(found)))


@pytest.mark.parametrize("parts", range(1, 6))
def test_even_sizes_differ_by_one(parts):
    for total in range(12):
        sizes = even_sizes(total, parts)
        assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


@pytest.mark.parametrize("sizes", CUTS)
def test_intervals_follow_each_other(sizes):
    assert starts(sizes) == tuple(itertools.accumulate(sizes, initial=0))
    assert [i for i, (lo, hi) in enumerate(own_intervals(sizes)) for _ in range(lo, hi)] == owners(sizes)


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_slices_of_pieces(sizes, step):
    total = sum(sizes)
    for lo, hi in itertools.product(range(total + 1), range(total + 1)):
        wanted = [owners(sizes)[i] for i in range(lo, hi, step)]
        assert partition.cut_at(sizes, lo, hi, step) == tuple(wanted.count(p) for p in range(len(sizes)))
        found = [own[0] + i for own in own_intervals(sizes) for i in local_range(own, lo, hi, step)]
        assert found == list(range(lo, hi, step))


@pytest.mark.parametrize("src", CUTS)
def test_moved_counts_changes_of_owner(src):
    for dst in CUTS:
        if len(dst) == len(src) and sum(dst) == sum(src):
            wanted = sum(a != b for a, b in zip(owners(src), owners(dst), strict=True))
            assert moved(src, dst) == wanted


def test_overlap():
    for a, b in itertools.product(itertools.combinations(range(5), 2), repeat=2):
        common = sorted(set(range(*a)) & set(range(*b)))
        assert partition.overlap(a, b) == ((common[0], common[-1] + 1) if common else None)


@pytest.mark.parametrize(
    ("sizes", "multiple"), [((5, 7), 4), ((1, 0, 11), 3), ((6, 6), 6), ((0, 0, 8), 2), ((3, 3, 2), 8)]
)
def test_align_moves_borders_to_multiples(sizes, multiple):
    found = align_sizes(sizes, multiple)
    assert sum(found) == sum(sizes) and all(n % multiple == 0 and n >= 0 for n in found)
    assert all(abs(a - b) <= multiple / 2 for a, b in zip(starts(found), starts(sizes), strict=True))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 0, 3), (4, 1, 2)])
def test_contiguous_stride_is_torchs(shape):
    assert partition.contiguous_stride(shape) == torch.empty(shape).stride()
