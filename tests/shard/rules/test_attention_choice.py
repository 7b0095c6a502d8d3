"""The choice between ring, gather and ulysses: integers and seconds, no ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpzoo.shard import LayoutError
from dpzoo.shard.partition import even_sizes
from dpzoo.shard.rules.attention_choice import HELD_BYTES, LINKS, Link, Work, choose_mode, slowest_pairs, visible_pairs

CPU, CUDA = LINKS["cpu"], LINKS["cuda"]


def work(tokens: int, ranks: int, heads: int = 8, **options) -> Work:
    sizes = even_sizes(tokens, ranks)
    return replace(Work(sizes, sizes, 1, heads, 1, 64, 64, 4), **options)


@pytest.mark.parametrize("a", [0, 2, 5])
@pytest.mark.parametrize("b", [5, 6, 9])
@pytest.mark.parametrize(("c", "d"), [(0, 9), (2, 5), (3, 3), (6, 8)])
def test_visible_pairs(a, b, c, d):
    assert visible_pairs((a, b), (c, d)) == sum(j <= i for i in range(a, b) for j in range(c, d))


def test_slowest_pairs():
    assert slowest_pairs((3, 5, 0), (4, 4), False) == 5 * 8
    assert slowest_pairs((4, 4), (4, 4), True) == 5 + 6 + 7 + 8


def test_small_sequences_gather():
    assert choose_mode(work(196, 2), link=CPU).mode == "gather"
    assert choose_mode(work(1024, 4, itemsize=2), link=CUDA).mode == "gather"


def test_what_does_not_fit_is_not_gathered():
    long = work(200_000, 2, heads=1)
    assert long.kv_bytes > HELD_BYTES
    choice = choose_mode(long, link=CPU)
    assert choice.mode == "ring"
    assert "98 MiB" in choice.reason and "1 head(s) for 2 ranks" in choice.reason


def test_causal_masks_and_uneven_shards_go_to_ulysses():
    assert choose_mode(work(16_384, 4, causal=True), link=CPU).mode == "ulysses"
    assert choose_mode(work(16_384, 4, causal=True, itemsize=2), link=CUDA).mode == "ulysses"
    assert choose_mode(work(16_384, 2, q_sizes=(14_000, 2_384)), link=CPU).mode == "ulysses"


def test_causal_with_few_heads_is_balanced():
    choice = choose_mode(work(16_384, 4, heads=2, causal=True), link=CPU)
    assert choice.mode in ("ring", "gather") and choice.balanced
    assert not choose_mode(work(64, 4, heads=2, causal=True), link=CPU).balanced  # moving queries costs more
    assert not choose_mode(work(16_384, 4, heads=2), link=CPU).balanced


def test_heads_that_do_not_divide_count():
    """Five heads on four ranks leave three ranks half idle."""
    even, odd = choose_mode(work(16_384, 4, heads=8), "ulysses"), choose_mode(work(16_384, 4, heads=5), "auto")
    assert even.mode == "ulysses" and odd.mode != "ulysses"


def test_batch_entries_stand_in_for_heads():
    choice = choose_mode(work(16_384, 4, heads=1, batch=8, causal=True))
    assert choice.mode == "ulysses" and choice.cut_dim == 0
    assert choose_mode(work(16_384, 4, causal=True)).cut_dim == 1


def test_a_whole_mask_counts_as_memory():
    masked = work(16_384, 4, causal=False, mask_bytes=16_384**2)
    assert choose_mode(masked).mode != "ulysses"
    assert choose_mode(masked, "ulysses").mode == "ulysses"


def test_slow_links_hide_in_a_ring():
    one_head = work(16_384, 2, heads=1)
    assert choose_mode(one_head, link=Link(1e9, 1e8, 1e12, 1e-4, True)).mode == "ring"
    assert choose_mode(one_head, link=Link(1e9, 1e8, 1e12, 1e-4, False)).mode == "gather"


def test_forced():
    for mode in ("ring", "gather", "ulysses"):
        choice = choose_mode(work(64, 2), mode)
        assert choice.mode == mode and choice.reason.startswith("asked for")
    with pytest.raises(LayoutError, match="one key head and one batch entry"):
        choose_mode(work(64, 2, heads=1), "ulysses")
